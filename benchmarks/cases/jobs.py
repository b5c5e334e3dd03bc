"""Jobs: submitting one, listing thousands, waiting for a device."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from ..case import Case, Goal, Side
from ..lab import SCRIPTS, Lab, installed, timed
from ..sample import Sample

NOTHING = str(SCRIPTS / "nothing.py")
JOBS, RECENT = 10_000, 100
PACELINE = installed("paceline")
_SUBMITIT = "import os, submitit; submitit.LocalExecutor('submitit').submit(os.getpid)"


def _list(*flags: str) -> Side:
    def measure(lab: Lab) -> Sample:
        home = _home(lab)
        with lab.started([PACELINE, "list", *flags], PACELINE_HOME=str(home)) as job:
            return Sample(job.finish())

    return Side(" ".join(["paceline list", *flags]), measure)


def _home(lab: Lab) -> Path:
    """A home with 10,000 jobs that have ended, 100 of them in the last days; the index is made later."""
    home = lab.folder / "many"
    if home.exists():
        return home
    with lab.started([PACELINE, "run", "-n", "2", "--name", "seed", NOTHING], PACELINE_HOME=str(home)) as job:
        job.finish()
    seed = home / "jobs" / "seed"
    files = {path.name: path.read_text() for path in seed.iterdir() if path.is_file()}
    status = json.loads(files.pop("status.json"))
    for number in range(JOBS - 1):
        folder = home / "jobs" / f"job-{number}"
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
        ended = time.time() - 60 * number if number < RECENT else time.time() - 86400 * 30 - number
        (folder / "status.json").write_text(json.dumps({**status, "finished": ended}))
    return home


def _waiting(lab: Lab) -> Sample:
    """An agent that waits for a device: the time until it waits, and its memory then."""
    (lab.folder / "paceline.toml").write_text("[local]\ndevices = 1\n")
    home = lab.folder / "queue"
    with lab.started([PACELINE, "run", "--gpus", "1", "--name", f"holder-{time.time()}", NOTHING, "600"],
                     PACELINE_HOME=str(home)):  # fmt: skip
        _until(home, "granted")
        name = f"waiter-{time.time()}"
        began = time.monotonic()
        with lab.started([PACELINE, "run", "--gpus", "1", "--name", name, NOTHING], PACELINE_HOME=str(home)):
            _until(home, "queued")
            seconds = time.monotonic() - began
            agent = json.loads((home / "jobs" / name / "status.json").read_text())["agent"]["pid"]
            with open(f"/proc/{agent}/status") as file:
                kilobytes = next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))
    return Sample(seconds, megabytes=kilobytes * 1024 / 1e6)


def _until(home: Path, event: str) -> None:
    """Wait until the newest job has recorded an event."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        logs = sorted((home / "jobs").glob("*/journal.jsonl"), key=os.path.getmtime)
        if logs and f'"event": "{event}"' in logs[-1].read_text():
            return
        time.sleep(0.01)
    raise TimeoutError(event)


CASES = [
    Case(
        "submit",
        "submit a job, until the prompt is back",
        Side("paceline submit", timed(PACELINE, "submit", NOTHING)),
        Side("submitit, local", timed(sys.executable, "-c", _SUBMITIT)),
        Goal(seconds=0.2),
    ),
    Case(
        "list",
        f"list, {JOBS:,} jobs, {RECENT} of them of this week",
        _list(),
        Side("torchx --help", timed(installed("torchx"), "--help")),
        Goal(1.0),
    ),
    Case(
        "list-all",
        f"list all of {JOBS:,} jobs",
        _list("-A"),
        Side("torchx --help", timed(installed("torchx"), "--help")),
        Goal(1.0),
    ),
    Case("waiting", "memory of an agent that waits for a device", Side("agent", _waiting), None, Goal(megabytes=25)),
]
