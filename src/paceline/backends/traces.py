"""Traces of torch.profiler, in Chrome's format: the steps are marked in them, and the operators summed up."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paceline.contract.stands import Profiled

_EVENTS = b'"traceEvents": ['
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LONGEST_HOST = 64  # characters that are kept
_STEP = "Optimizer.step#"
OTHER = "no operator: Python, data, logs"  # what the thread that trains does besides


class _Event(NamedTuple):
    """An event with a duration; times in microseconds."""

    name: str
    kind: str
    thread: Any
    begin: float
    end: float
    operator: int | None  # the number of the operator that it is, or that has started it on a device


@dataclass
class Operator:
    """What an operator has taken, in microseconds, without the operators that it has called."""

    cpu: float = 0.0
    device: float = 0.0
    calls: int = 0


@dataclass
class Sum:
    """What ranks have done in steps.

    Attributes:
        operators: by name.
        time: that they have taken, in microseconds.
    """

    operators: dict[str, Operator] = field(default_factory=lambda: defaultdict(Operator))
    steps: int = 0
    time: float = 0.0


def file_name(said: Profiled, time: int) -> str:
    """The name of a trace's file, as TensorBoard wants it; what the rank says of itself leads to no other folder."""
    host = re.sub(r"[^A-Za-z0-9._-]|^\.+", "_", said["host"])[:_LONGEST_HOST]
    return f"{host}_{int(said['pid'])}.{time}.pt.trace.json.gz"


def add(trace: bytes, said: Profiled, found: Sum) -> tuple[bytes, list[float]]:
    """Mark the steps of a rank's trace as TensorBoard and others know them (`ProfilerStep#N`), and sum it up."""
    whole = json.loads(trace, object_hook=_event)
    base = whole.get("baseTimeNanoseconds", 0)
    events = [event for event in whole["traceEvents"] if isinstance(event, _Event)]
    times = [(time - base) / 1000 for time in said["times"]]
    optimizers = [it for it in events if it.thread == said["thread"] and it.name.startswith(_STEP)]
    # The rank has noted a time shortly before the end of the optimizer's own event; steps and these must not overlap.
    ends = [next((it.end for it in optimizers if it.begin <= time <= it.end), time) for time in times]
    steps = list(pairwise(ends))
    if not steps:
        ends = [min((it.begin for it in events), default=0.0), max((it.end for it in events), default=0.0)]
    inside = [event for event in events if ends[0] <= event.begin < ends[-1]]
    at_work = _sum(inside, found.operators)
    if steps:
        found.operators[OTHER].cpu += max(0.0, ends[-1] - ends[0] - at_work[said["thread"]])
    found.steps += max(1, len(steps))
    found.time += ends[-1] - ends[0]
    marks = b"".join(
        json.dumps({"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{number}", "pid": said["pid"],
                    "tid": said["thread"], "ts": begin, "dur": end - begin}).encode() + b",\n"
        for number, (begin, end) in enumerate(steps)
    )  # fmt: skip
    return trace.replace(_EVENTS, _EVENTS + b"\n" + marks, 1), [(end - begin) / 1e6 for begin, end in steps]


def _event(found: dict[str, Any]) -> Any:
    """An object of JSON; an event takes a tenth of the memory so."""
    if found.get("ph") != "X":
        return found
    begin, arguments = float(found["ts"]), found.get("args", {})
    return _Event(
        found["name"], found.get("cat", ""), found["tid"], begin, begin + float(found["dur"]),
        arguments.get("External id"),
    )  # fmt: skip


def _sum(events: Sequence[_Event], operators: dict[str, Operator]) -> dict[Any, float]:
    """Add these events; returns how long each thread was in an operator."""
    names = {event.operator: event.name for event in events if event.kind == "cpu_op"}
    threads: dict[Any, list[_Event]] = defaultdict(list)
    at_work: dict[Any, float] = defaultdict(float)
    for event in events:
        if event.kind == "cpu_op":
            threads[event.thread].append(event)
        elif event.kind in _ON_DEVICE:
            operators[names.get(event.operator, event.name)].device += event.end - event.begin
    for thread, those in threads.items():
        for event, alone in _alone(those):
            operators[event.name].cpu += alone
            operators[event.name].calls += 1
            at_work[thread] += alone
    return at_work


def _alone(events: Iterable[_Event]) -> Iterable[tuple[_Event, float]]:
    """The events of a thread, each with its time without those inside it."""
    open_: list[tuple[_Event, float]] = []
    for event in [*sorted(events, key=lambda it: (it.begin, -it.end)), None]:
        while open_ and (event is None or open_[-1][0].end <= event.begin):
            ended, inside = open_.pop()
            length = ended.end - ended.begin
            yield ended, max(0.0, length - inside)
            if open_:
                open_[-1] = open_[-1][0], open_[-1][1] + length
        if event is not None:
            open_.append((event, 0.0))
