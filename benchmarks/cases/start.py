"""From the command to its end: start the ranks, one all-reduce, exit."""

from __future__ import annotations

import sys

from ..case import Case, Goal, Side
from ..lab import SCRIPTS, Lab, free_port, installed, timed
from ..sample import Sample

PACELINE = installed("paceline")
SCRIPT = str(SCRIPTS / "allreduce.py")


def _torchrun(lab: Lab, ranks: int) -> Sample:
    # Only the port differs from the defaults: another process on this machine may use 29500.
    port = str(free_port())
    return lab.timed([installed("torchrun"), "--nproc-per-node", str(ranks), "--master-port", port, SCRIPT])


def _case(ranks: int, goal: float) -> Case:
    return Case(
        f"start-{ranks}",
        f"start {ranks} ranks, one all-reduce, exit",
        Side("paceline run", timed(PACELINE, "run", "-n", str(ranks), SCRIPT)),
        Side("torchrun", lambda lab: _torchrun(lab, ranks)),
        Goal(goal),
    )


def _warm(lab: Lab, ranks: int) -> Sample:
    """The time of a start while a process is kept warm, without the time that this one takes to import torch."""
    with lab.started([PACELINE, "warm"]) as warm:
        warm.finish()
        with lab.started([PACELINE, "run", "-n", str(ranks), SCRIPT]) as job:
            return Sample(job.finish())


def _warm_case(ranks: int, goal: float) -> Case:
    return Case(
        f"warm-{ranks}",
        f"start {ranks} ranks from a process kept warm",
        Side("paceline run", lambda lab: _warm(lab, ranks)),
        Side("torchrun", lambda lab: _torchrun(lab, ranks)),
        Goal(goal),
    )


CASES = [
    Case(
        "import",
        "one framework import: the limit of a start",
        None,
        Side("import torch", timed(sys.executable, "-c", "import torch")),
    ),
    _case(2, 0.45),
    _case(4, 0.38),
    _case(8, 0.28),
    _warm_case(2, 0.12),
    _warm_case(4, 0.08),
    _warm_case(8, 0.06),
]
