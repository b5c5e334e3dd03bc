"""What makes a job slow, and what that costs: pure functions of samples, and of what is known beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from paceline.node.watching.asking import Asked
from paceline.node.watching.outside import Process
from paceline.node.watching.slowness import causes, in_words
from paceline.node.watching.spent import Samples

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT, TORCH = "/home/ada/train.py", "/opt/venv/lib/python3.12/site-packages/torch"
STACKS: dict[str, list[tuple[str, int, str]]] = {
    "loading": [
        (SCRIPT, 5, "__getitem__"), (f"{TORCH}/utils/data/_utils/fetch.py", 54, "fetch"),
        (f"{TORCH}/utils/data/dataloader.py", 788, "_next_data"), (SCRIPT, 31, "<module>"),
    ],
    "backward": [(f"{TORCH}/autograd/graph.py", 829, "_engine_run_backward"), (SCRIPT, 34, "<module>")],
    "exchange": [(f"{TORCH}/distributed/distributed_c10d.py", 81, "all_reduce"), (SCRIPT, 35, "<module>")],
    "evaluation": [(f"{TORCH}/nn/modules/module.py", 1776, "_call_impl"), (SCRIPT, 40, "evaluate")],
    "nothing of the script": [("/usr/lib/python3.12/site-packages/torch/__init__.py", 1, "<module>")],
}  # fmt: skip

_LOADER = {"loader": {"workers": 2, "batch": 8}}


def add(samples: Samples, counts: dict[str, int], rank: int = 0, state: str = "R", **known: Any) -> None:
    """Samples of a rank, a second apart: how many of each part. In each second it gets two batches and reads 1 MB."""
    number = 0
    for part, count in counts.items():
        for _ in range(count):
            number += 1
            loader = {"id": 1, "workers": 0, "pinned": False, "batch": 4, "done": 2 * number}
            samples.add(
                Asked("", 0, rank, 0, 100 + rank),
                {"threads": [{"name": "MainThread", "frames": STACKS[part]}], "sizes": {}, "loader": loader, **known},  # type: ignore[typeddict-item]
                Process(state, read=number * 1_000_000, reads=number * 9), float(number),
            )  # fmt: skip


def test_what_ranks_spend_their_time_on() -> None:
    samples = Samples()
    add(samples, {"loading": 62, "backward": 38, "nothing of the script": 3})
    spent = samples.spent()
    assert (spent["samples"], spent["step"]) == (100, 0.5)
    assert in_words(spent) == "loading 62 %, backward 38 %"
    (line,) = causes({**spent, "cores": 8, "used": 1.0, "free": 7.0})
    assert line == (
        "62 % of each step waits for data at train.py:5: 0 workers read 125 kB a sample; "
        "num_workers=2 would save about 0.31 s of 0.5 s"
    )
    (line,) = causes({**spent, "cores": 1, "used": 1.0, "free": 0.0})
    assert "no core is free for more of them" in line


def test_what_the_library_has_measured_counts_for_more_than_samples() -> None:
    samples = Samples()
    times = {"data": 86.0, "forward_backward": 10.0, "sync": 0.0, "optimizer": 3.0, "total": 100.0, "steps": 200.0}
    add(samples, {"backward": 20, "loading": 10}, state="S", times=times)
    spent = samples.spent()
    assert in_words(spent) == "0.5 s a step: data 86 %, forward_backward 10 %, optimizer 3 %, other 1 %"
    (line,) = causes(spent)
    assert line.startswith("86 % of each step waits for data at train.py:5, without computing: ")
    assert "num_workers=7 would save about 0.43 s of 0.5 s (paceline tune tries it)" in line


@pytest.mark.parametrize(
    ("line", "runs", "part"),
    [
        ("print(x); time.sleep(1)", "time.sleep(1)", "script"),
        ("print(x); time.sleep(1)", "print(x)", "logging"),
        ("print(loss.item())", "loss.item()", "item"),
        ("print(loss.item())", "print(loss.item())", "logging"),
        ("ü = x.to('é').cuda(); fit(x)", "x.to('é')", "copy"),
        ("if loss > best:", "loss > best", "script"),
        ("print(x); time.sleep(1)", None, "script"),  # a Python that does not say it
        ("print(x)", None, "logging"),
    ],
)
def test_the_call_that_runs_decides_and_not_its_line(tmp_path: Path, line: str, runs: str | None, part: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"\n    {line}\n")
    known = {}
    if runs is not None:
        start = f"    {line}".encode().index(runs.encode())
        known = {"runs": [2, 2, start, start + len(runs.encode())]}
    samples = Samples()
    frames = [(str(script), 2, "<module>")]
    answer = {"threads": [{"name": "MainThread", "frames": frames}], "sizes": {}, **known}
    samples.add(Asked("", 0, 0, 0, 1), answer, Process("S"), 1.0)  # type: ignore[arg-type]
    assert samples.spent()["parts"] == {part: 1.0}


def test_the_times_of_attempts_are_added() -> None:
    samples = Samples()
    for pid, steps in ((1, 1.0), (1, 3.0), (2, 2.0)):
        samples.add(Asked("", 0, 0, 0, pid), {"threads": [], "times": {"total": steps, "steps": steps}}, Process(), 1.0)
    assert samples.spent()["seconds"] == {"total": 1.0}


def test_a_rank_that_evaluates_alone_is_named() -> None:
    samples = Samples()
    add(samples, {"evaluation": 60, "backward": 40})
    add(samples, {"exchange": 60, "backward": 40}, rank=1)
    (line,) = causes(samples.spent())
    assert line == (
        "60 % of the time ranks wait for rank 0, which evaluates alone, at train.py:40; "
        "evaluation on all ranks, each with its share of the data, would save about 30 % of the time"
    )


@pytest.mark.parametrize(
    ("parts", "known", "words"),
    [
        ({"forward": 0.9, "exchange": 0.1}, {}, None),
        ({"loading": 0.5}, {"read": 1e5, "reads": 400.0}, "in 400 reads of 250 B on average: many small files"),
        ({"workers": 0.6}, {**_LOADER, "used": 2.0, "free": 6.0}, "num_workers=5 would save"),
        ({"workers": 0.6}, {**_LOADER, "used": 2.0, "free": 0.0, "still": {"loading": 1}}, "less work on each sample"),
        ({"exchange": 0.4}, {"busiest": {"rank": 3, "exchange": 0.1, "others": 0.5, "part": "script",
                                         "line": "train.py:9"}}, "wait for rank 3, .* would save about 40 %"),
        ({"exchange": 0.4}, {}, "paceline tune"),
        ({"checkpoint": 0.5}, {}, "a tenth as often would save about 45 %"),
        ({"logging": 0.5}, {}, "every hundredth step would save about 50 %"),
        ({"item": 0.5}, {}, "would save up to 50 %"),
        ({"item": 0.5}, {"gpu": True}, "waits for the GPU each time"),
        ({"copy": 0.3}, {"gpu": True}, "pin_memory=True"),
        ({"forward": 0.9}, {"queued": 0.4, "computing": 8, "cores": 8, "ranks": 4, "used": 4.0, "free": 0.0},
         "^20 % .* OMP_NUM_THREADS=2 for each"),
        ({"forward": 0.9}, {"computing": 1, "cores": 8, "ranks": 4, "used": 4.0, "free": 4.0},
         "OMP_NUM_THREADS=2 would save up to 45 %"),
        ({"forward": 0.9}, {"computing": 1, "cores": 8, "ranks": 4, "used": 4.0, "free": 0.0}, None),
        ({"loading": 0.3, "checkpoint": 0.3, "logging": 0.2, "item": 0.2}, {}, ".*\n.*\n.*$"),
    ],
)  # fmt: skip
def test_each_cause_has_its_own_evidence(parts: dict[str, float], known: dict[str, Any], words: str | None) -> None:
    import re

    lines = causes({"samples": 99, "parts": parts, "lines": {}, **known})  # type: ignore[typeddict-item]
    assert bool(lines) == (words is not None)
    assert words is None or re.search(words, "\n".join(lines)), lines
    assert len(lines) <= 3
