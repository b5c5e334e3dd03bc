"""A machine that has no more threads, processes or descriptors."""

from __future__ import annotations

import errno
import os
import re
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from paceline.backends.remote import engine
from paceline.cli import main

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("can't start new thread"), "no more threads and processes can be started here; .*ulimit -u"),
        (OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)), "no more threads and processes .*ulimit -u"),
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "Too many open files here; .*ulimit -n"),
    ],
)
def test_what_a_machine_has_no_more_of_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, said: str
) -> None:
    def start(_: threading.Thread) -> None:
        raise error

    (tmp_path / "paceline.toml").write_text('[targets.lab]\nbackend = "ssh"\nhosts = ["nowhere"]\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "argv", ["paceline", "list", "--on", "lab"])
    monkeypatch.setattr(engine, "_engine", engine._Engine())  # that of this process may run already
    monkeypatch.setattr(threading.Thread, "start", start)
    assert main.run() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(f"paceline: {said}.*", line), line
