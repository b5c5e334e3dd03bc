"""From `kill -9` of one rank until all ranks step again."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ..case import Case, Goal, Side
from ..lab import SCRIPTS, Job, Lab, installed
from ..sample import Sample

SCRIPT = str(SCRIPTS / "stepping.py")
STEPS_BEFORE = 3  # that every rank has done when one is killed


@dataclass(frozen=True)
class _Step:
    """The report of a rank after a step."""

    attempt: int
    rank: int
    step: int
    pid: int
    time: float  # of the monotonic clock, which all processes of a machine share

    @classmethod
    def parse(cls, message: bytes) -> _Step:
        attempt, rank, step, pid, when = message.split()
        return cls(int(attempt), int(rank), int(step), int(pid), float(when))


def _measure(lab: Lab, launcher: Sequence[str], ranks: int, **env: str) -> Sample:
    """Kill the last rank once all have stepped, and wait for the first step of each in the next attempt."""
    address = lab.folder / "steps"
    address.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as reports:
        reports.bind(str(address))
        with lab.started([*launcher, SCRIPT, str(address)], **env) as job:
            victim = _wait_for(job, reports, ranks, attempt=0, step=STEPS_BEFORE)[ranks - 1]
            killed = time.monotonic()
            os.kill(victim.pid, signal.SIGKILL)
            again = _wait_for(job, reports, ranks, attempt=1, step=1)
            job.finish()
    return Sample(max(step.time for step in again.values()) - killed)


def _wait_for(job: Job, reports: socket.socket, ranks: int, attempt: int, step: int) -> dict[int, _Step]:
    """The reports of this step of this attempt, by rank, once every rank has done it."""
    done: dict[int, _Step] = {}
    while len(done) < ranks:
        report = _Step.parse(job.receive(reports))
        if (report.attempt, report.step) == (attempt, step):
            done[report.rank] = report
    return done


def _paceline(lab: Lab, ranks: int) -> Sample:
    return _measure(lab, [installed("paceline"), "run", "-n", str(ranks), "--max-restarts", "1"], ranks)


def _torchrun(lab: Lab, ranks: int) -> Sample:
    # torchrun's own store keeps the addresses of the first attempt's ranks, and the second attempt may connect to those
    # and fail. This variable, which only the rendezvous of --standalone knows, gives each attempt a store of its own.
    launcher = [installed("torchrun"), "--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "1"]
    return _measure(lab, launcher, ranks, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")


def _case(ranks: int) -> Case:
    return Case(
        f"restart-{ranks}",
        f"kill -9 one of {ranks} ranks → all step again",
        Side("paceline run", lambda lab: _paceline(lab, ranks)),
        Side("torchrun", lambda lab: _torchrun(lab, ranks)),
        Goal(0.15),
    )


CASES = [_case(2), _case(4)]
