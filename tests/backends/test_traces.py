"""What a trace of torch.profiler says is summed up, and its steps are marked."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.backends.traces import OTHER, Sum, add, file_name


def event(name: str, begin: float, length: float, kind: str = "cpu_op", thread: int = 7, number: int = 0) -> Any:
    return {"ph": "X", "cat": kind, "name": name, "pid": 7, "tid": thread, "ts": begin, "dur": length,
            "args": {"External id": number}}  # fmt: skip


def test_operators_have_their_own_time_and_that_of_their_kernels() -> None:
    events = [
        event("before", 0.0, 5.0),
        event("aten::linear", 10.0, 30.0, number=1), event("aten::mm", 15.0, 20.0, number=2),
        event("sgemm", 20.0, 60.0, "kernel", 1, number=2),
        event("aten::mm", 60.0, 10.0, thread=8, number=3),
        event("Optimizer.step#SGD.step", 90.0, 20.0, "user_annotation"),
        event("aten::linear", 120.0, 10.0, number=4),
        {"ph": "i", "name": "Record Window End", "ts": 300.0},
    ]  # fmt: skip
    trace = json.dumps({"baseTimeNanoseconds": 1_000_000, "traceEvents": events}).encode()
    found = Sum()
    marked, steps = add(trace, {"thread": 7, "pid": 7, "times": [1_006_000, 1_105_000, 1_210_000]}, found)
    assert steps == pytest.approx([104e-6, 100e-6])  # the first ends with its optimizer
    assert (found.steps, found.time) == (2, 204.0)
    shown = {name: (it.cpu, it.device, it.calls) for name, it in found.operators.items()}
    assert shown == {"aten::linear": (20.0, 0.0, 2), "aten::mm": (30.0, 60.0, 2), OTHER: (164.0, 0.0, 0)}
    marks = [it for it in json.loads(marked)["traceEvents"] if it["name"].startswith("ProfilerStep")]
    assert [(it["name"], it["ts"], it["dur"]) for it in marks] == [
        ("ProfilerStep#0", 6.0, 104.0), ("ProfilerStep#1", 110.0, 100.0)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("node-1.lab", "node-1.lab"),
        ("/etc/x", "_etc_x"),
        ("../../up", "__.._up"),
        ("..", "_"),
        ("a\nb", "a_b"),
        ("é", "_"),
    ],
)
def test_what_a_rank_says_leads_to_no_other_folder(host: str, name: str) -> None:
    assert file_name({"host": host, "pid": 7}, 1) == f"{name}_7.1.pt.trace.json.gz"
    with pytest.raises(ValueError, match="invalid literal"):
        file_name({"host": host, "pid": "/7"}, 1)  # type: ignore[typeddict-item]
