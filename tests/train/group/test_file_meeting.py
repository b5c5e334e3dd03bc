"""Ranks that meet at a file: who can only read it cannot keep them waiting."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import pytest

from paceline.train.group import file_meeting

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.torch


def test_only_its_user_may_open_the_file_that_ranks_lock(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        file_meeting.join(str(tmp_path / "meeting"), 1)
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "meeting.ranks").stat().st_mode) == 0o600
    file_meeting.leave()
    assert os.listdir(tmp_path) == []
