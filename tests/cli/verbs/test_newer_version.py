"""A job in whose folder a newer version of paceline has written."""

from __future__ import annotations

import fcntl
from typing import TYPE_CHECKING

import pytest
from tests import recorded
from tests.typed import refusal

if TYPE_CHECKING:
    from tests.conftest import Paceline


@pytest.mark.parametrize(("runs", "state"), [(True, "RUNNING"), (False, "LOST")])
def test_a_job_of_a_newer_version(paceline: Paceline, runs: bool, state: str) -> None:
    recorded.ended(paceline, "new")
    folder = paceline.home / "jobs" / "new"
    (folder / "status.json").write_text('{"v": 2, "journal": 60, "condition": "fine"}')
    (folder / "journal.jsonl").write_text('{"time": 1.0, "v": 2, "event": "state", "condition": "fine"}\n')
    said = "it was written by a newer version of paceline; update paceline here to see how it is"
    with open(folder / "lock") as lock:
        if runs:
            fcntl.flock(lock, fcntl.LOCK_EX)
        job = paceline.json("get", "new")
        assert (job["state"], job["error"], job["command"][-9:]) == (state, said, "script.py")
        if runs:
            refused = refusal(paceline, "stop", "new")
            assert refused == f"job new cannot be stopped here: {said}"
    (folder / "status.json").unlink()  # which this version cannot check
