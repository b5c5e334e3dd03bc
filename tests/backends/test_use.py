"""What `why` says of a job's use: while it runs, and when memory ran out."""

from __future__ import annotations

import dataclasses
from typing import Any

from paceline.backends.why import use_in_words
from paceline.job.job import Job

JOB = Job(
    name="it", state="RUNNING", backend="local", framework=None, nodes=1, ranks=2, attempt=0, exit_code=None,
    created=1.0, started=2.0, finished=None, instances=(), error=None,
)  # fmt: skip


def node(*lines: tuple[float, int, float | None]) -> Any:
    """Lines of a node: time, memory of rank 1, and use of its GPU."""
    return {"host": "a", "node_rank": 0, "metrics": None, "software": {}, "missing": [], "telemetry": [
        {"time": time, "seconds": 10.0, "job": {"cpu": 1.5, "memory": memory + 1024, "read": 2e6, "written": 0},
         "machine": {"cores": 8.0, "load": 2.0, "memory": 1 << 34, "memory_used": 1 << 33, "disk": 1, "disk_used": 1,
                     "received": 1e3, "sent": 0},
         "ranks": {"rank": [0, 1], "memory": [1024, memory]},
         **({} if use is None else {"gpus": {"index": [0], "use": [use], "memory": [80 << 30],
                                            "memory_used": [40 << 30], "power": [None]}})}
        for time, memory, use in lines
    ]}  # fmt: skip


def test_a_job_that_runs() -> None:
    (line,) = use_in_words(JOB, [node((1000.0, 1 << 30, 10.0), (5000.0, 1 << 30, 50.0), (5010.0, 1 << 30, 70.0))])
    assert line.startswith("use in the last 20 s: GPUs 60 % busy, 40.0 GiB of 80.0 GiB; 1.5 of 8 cores; ")
    assert " W" not in line
    (both,) = use_in_words(JOB, [node((5.0, 1 << 30, None)), node((6.0, 1 << 30, None))])
    assert both.startswith("use in the last 10 s: 3.0 of 16 cores; ")
    assert list(use_in_words(JOB, [node()])) == []


def test_memory_ran_out() -> None:
    job = dataclasses.replace(JOB, state="FAILED", cause="out of memory", finished=9000.0)
    (line,) = use_in_words(job, [node((100.0, 1 << 30, None), (3700.0, 3 << 30, None))])
    assert line == "the memory of rank 1 grew from 1.0 GiB to 3.0 GiB in 1h00m"
    assert list(use_in_words(job, [node((100.0, 1 << 30, None), (3700.0, 1 << 30, None))])) == []
    other = dataclasses.replace(job, cause="exit")
    assert list(use_in_words(other, [node((100.0, 1 << 30, None), (3700.0, 3 << 30, None))])) == []
