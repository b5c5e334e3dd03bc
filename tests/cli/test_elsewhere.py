"""What happens where paceline does not run: one line, and exit code 2."""

from __future__ import annotations

import subprocess
import sys

import pytest

# What these systems lack is hidden; click is imported before, as it asks for modules that only they have.
START = """
import sys, click
for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None
sys.platform = sys.argv.pop(1)
from paceline.cli.main import main
main()
"""


@pytest.mark.parametrize(("platform", "said"), [("win32", "WSL2"), ("darwin", "a Linux container")])
@pytest.mark.parametrize("arguments", [["run", "-n", "2", "train.py"], ["--help"], []])
def test_one_line_says_where_it_runs(platform: str, said: str, arguments: list[str]) -> None:
    command = [sys.executable, "-c", START, platform, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith("paceline: this runs on Linux, not on ") and said in done.stderr
