"""How much machines were in use lately, as jobs that ran on them have recorded it."""

from __future__ import annotations

import contextlib
import math
import time
from typing import TYPE_CHECKING

from paceline.backends.base import Recorded
from paceline.job.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paceline.backends.base import Backend
    from paceline.contract.records import NodeHistory
    from paceline.job.job import Job, Node

STEP = 5.0  # seconds between two points
POINTS = 120
_MOST_JOBS = 8  # that are asked

Curve = list[float | None]  # shares of what there is; None where nothing is known


def curves(there: Backend, jobs: Iterable[Job], nodes: Sequence[Node]) -> dict[str, dict[str, Curve]]:
    """Node → `cpu` and `memory`, the last point being now; nodes of which nothing is known are left out."""
    now = time.time()
    begin = now - POINTS * STEP
    recent = [job for job in jobs if job.state == "RUNNING" or (job.finished or 0.0) > begin]
    recent.sort(key=lambda job: job.state != "RUNNING")
    found: list[NodeHistory] = []
    if isinstance(there, Recorded):
        for job in recent[:_MOST_JOBS]:
            with contextlib.suppress(UserError):  # the page says already what does not answer
                found += there.history(job.name, begin).nodes
    return of_histories(found, nodes, now)


def of_histories(found: Iterable[NodeHistory], nodes: Sequence[Node], now: float) -> dict[str, dict[str, Curve]]:
    """See `curves`. Jobs that saw only a part of a machine, such as their control group, are left out."""
    by_name = {node.name: node for node in nodes}
    shown: dict[str, dict[str, Curve]] = {}
    for history in found:
        node = by_name.get(history["host"])
        for line in history["telemetry"] if node is not None else ():
            machine = line["machine"]
            if node is None or (machine.get("cores"), machine.get("memory")) != (node.cores, node.memory):
                continue
            seen = {"cpu": (machine.get("load"), node.cores), "memory": (machine.get("memory_used"), node.memory)}
            values = {name: part / of for name, (part, of) in seen.items() if part is not None and of}
            first = math.ceil((line["time"] - line["seconds"] - now) / STEP) + POINTS - 1
            last = math.floor((line["time"] - now) / STEP) + POINTS - 1
            curve = shown.setdefault(node.name, {name: [None] * POINTS for name in seen})
            for point in range(max(0, first), min(POINTS - 1, last) + 1):
                for name, value in values.items():
                    curve[name][point] = round(value, 4)
    return shown
