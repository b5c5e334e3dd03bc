"""The page, and the report."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from ..case import Case, Goal, Side
from ..lab import SCRIPTS, TIMEOUT, Lab, free_port, installed
from ..sample import Failed, Sample

PACELINE = installed("paceline")


def _folder(lab: Lab) -> Path:
    """The run directory of a job of 64 ranks and 8 hours, alone in its home."""
    home = lab.folder / "long"
    run = home / "jobs" / "long"
    if not run.exists():
        from tests.web import long_job

        nothing = str(SCRIPTS / "nothing.py")
        with lab.started([PACELINE, "run", "-n", "1", "--name", "long", nothing], PACELINE_HOME=str(home)) as job:
            job.finish()
        long_job.main(run)
    return run


def _answers(command: Callable[[Path], Sequence[str]]) -> Callable[[Lab], Sample]:
    """The time until a server of this command, with its port behind it, has answered, and its memory then."""

    def measure(lab: Lab) -> Sample:
        run, port = _folder(lab), free_port()
        began = time.monotonic()
        with lab.started([*command(run), str(port)], PACELINE_HOME=str(run.parents[1])) as job:
            while not _is_answered(port):
                if time.monotonic() > began + TIMEOUT:
                    raise Failed(f"{command(run)[0]} does not answer")
                time.sleep(0.002)
            seconds = time.monotonic() - began
            status = Path(f"/proc/{job.pid}/status").read_text()
        kilobytes = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
        return Sample(seconds, megabytes=kilobytes * 1024 / 1e6)

    return measure


def _is_answered(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=TIMEOUT):
            return True
    except (OSError, urllib.error.URLError):
        return False


def _report(lab: Lab) -> Sample:
    home = _folder(lab).parents[1]
    with lab.started([PACELINE, "report", "long", "-o", "long.html"], PACELINE_HOME=str(home)) as job:
        seconds = job.finish()
    return Sample(seconds, megabytes=(lab.folder / "long.html").stat().st_size / 1e6)


CASES = [
    Case(
        "web",
        "start of the page until its first answer",
        Side("paceline web", _answers(lambda run: [PACELINE, "web", "--no-browser", "--port"])),
        Side("tensorboard", _answers(lambda run: [installed("tensorboard"), "--logdir", str(run), "--port"])),
        Goal(1.0),
    ),
    Case(
        "report",
        "report of a job of 64 ranks and 8 hours; its size",
        Side("paceline report", _report),
        None,
        Goal(seconds=2.0, megabytes=0.3),
    ),
]
