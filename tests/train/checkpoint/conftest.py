"""A disk that is soon full."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def small_disk() -> Iterator[Callable[[Path, int], Path]]:
    """Makes a folder that is a file system of so many KiB; skips the test where that is not allowed."""
    with contextlib.ExitStack() as stack:

        def mount(folder: Path, size: int) -> Path:
            folder.mkdir()
            command = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "none", str(folder)]
            allowed = os.geteuid() == 0 and shutil.which("mount")
            if not allowed or subprocess.run(command, capture_output=True, check=False).returncode:
                pytest.skip("needs the right to mount a tmpfs")
            stack.callback(subprocess.run, ["umount", "-l", str(folder)], check=True)
            return folder

        yield mount
