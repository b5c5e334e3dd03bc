"""Horovod's API for TensorFlow and Keras, with the Python of PACELINE_FRAMEWORKS_PYTHON (`make test-frameworks`)."""

from __future__ import annotations

import os
from functools import partial

from ..case import Case, Goal, Side
from ..lab import SCRIPTS, Lab
from ..sample import Failed, Sample

STEPS = str(SCRIPTS / "horovod_tensorflow.py")
START = str(SCRIPTS / "horovod_start.py")


def _python() -> str:
    if python := os.environ.get("PACELINE_FRAMEWORKS_PYTHON"):
        return python
    raise Failed("PACELINE_FRAMEWORKS_PYTHON names no Python with TensorFlow; `make test-frameworks` builds one")


def _step(lab: Lab, side: str, size: str, ranks: int) -> Sample:
    framework = "horovod" if side == "hvd" else "tensorflow"
    line = [_python(), "-m", "paceline", "run", "-n", str(ranks), "--framework", framework, STEPS, side, size]
    return Sample(lab.answer(line))


def _case(size: str, ranks: int) -> Case:
    ours, other = (partial(_step, side=side, size=size, ranks=ranks) for side in ("hvd", "strategy"))
    return Case(
        f"horovod-tensorflow-{size}-{ranks}",
        f"a step of a Keras model, {ranks} ranks, {'0.4' if size == 'small' else '7.8'} MB of gradients",
        Side("DistributedGradientTape", ours),
        Side("MultiWorkerMirroredStrategy", other),
        Goal(0.9),
    )


def _two(lab: Lab) -> Sample:
    line = f"'{_python()}' -c 'import tensorflow'"
    return lab.timed(["sh", "-c", f"{line} & {line} & wait"])


CASES = [
    Case(
        "horovod-start",
        "start 2 ranks with TensorFlow, one allreduce, exit",
        Side(
            "horovodrun",
            lambda lab: lab.timed([_python(), "-m", "paceline", "horovodrun", "-np", "2", _python(), START]),
        ),
        Side("two times import tensorflow", _two),
        Goal(0.6),
    ),
    *[_case(size, ranks) for size in ("small", "large") for ranks in (2, 4)],
]
