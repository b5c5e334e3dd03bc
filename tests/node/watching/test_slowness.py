"""What makes a job slow, and what that costs: pure functions of samples, and of what is known beside them."""

from __future__ import annotations

import random
import tempfile
from typing import TYPE_CHECKING, Any

import pytest

from paceline.node.machine.hardware import read_rate
from paceline.node.watching.asking import Asked
from paceline.node.watching.outside import Process
from paceline.node.watching.slowness import causes, compared, in_words
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
    "item": [(f"{TORCH}/_tensor.py", 1191, "__iter__"), (SCRIPT, 36, "<module>")],
    "script": [(SCRIPT, 37, "<module>")],
    "gathered objects": [
        (f"{TORCH}/distributed/distributed_c10d.py", 3000, "all_gather"),
        (f"{TORCH}/distributed/distributed_c10d.py", 3100, "all_gather_object"), (SCRIPT, 38, "<module>"),
    ],
    "printed tensor": [(f"{TORCH}/_tensor_str.py", 100, "_str"), (SCRIPT, 39, "<module>")],
    "nothing of the script": [("/usr/lib/python3.12/site-packages/torch/__init__.py", 1, "<module>")],
}  # fmt: skip

_DDP = {"finds_unused": False, "unused": 0, "buckets": 1, "bytes": 20_000_000, "exposed": 0.0}
_FAR = {"world": 4, "ranks": 2, "sent": 5e7}
_LOADER = {"loader": {"workers": 2, "batch": 8}}


def add(samples: Samples, counts: dict[str, int], rank: int = 0, state: str = "R", **known: Any) -> None:
    """Samples of a rank, a second apart: how many of each part. In each second it gets two batches and reads 1 MB."""
    parts = [part for part, count in counts.items() for _ in range(count)]
    random.Random(0).shuffle(parts)
    for number, part in enumerate(parts, 1):
        loader = {"id": 1, "workers": 0, "pinned": False, "batch": 4, "done": 2 * number}
        samples.add(
            Asked("", 0, rank, 0, 100 + rank),
            {"threads": [{"name": "MainThread", "frames": STACKS[part]}], "sizes": {}, "loader": loader, **known},  # type: ignore[typeddict-item]
            Process(state, read=number * 1_000_000, reads=number * 9), float(number),
        )  # fmt: skip


def test_a_rank_that_sleeps_is_idle() -> None:
    """Waiting for a core, computing and loading are no sleep."""
    samples = Samples()
    add(samples, {"script": 3, "loading": 2}, state="S")
    add(samples, {"script": 4}, state="R")
    parts, _ = samples.of_ranks()[0]
    assert (parts["idle"], parts["script"], parts["loading"]) == (3, 4, 2)
    assert samples.spent()["parts"]["script"] == round(7 / 9, 3)


def test_what_ranks_spend_their_time_on() -> None:
    samples = Samples()
    add(samples, {"loading": 62, "backward": 31, "item": 7, "nothing of the script": 3})
    spent = samples.spent()
    assert (spent["samples"], spent["step"]) == (100, 0.5)
    assert in_words(spent) == "loading 62 %, backward 31 %, item 7 %"
    (line,) = causes({**spent, "cores": 8, "used": 1.0, "free": 7.0})
    assert line == (
        "62 % of each step waits for data at train.py:5: 0 workers read 125 kB a sample; "
        "num_workers=2 would save about 0.31 s of 0.5 s"
    )
    (line,) = causes({**spent, "cores": 1, "used": 1.0, "free": 0.0})
    assert "no core is free for more of them" in line


def test_the_scripts_own_code_has_its_line() -> None:
    for state, said in (
        ("R", "; paceline profile shows what it calls; Python's loops over samples are slow, operations on whole "
              "tensors are not"),
        ("S", ", and mostly waits there; up to 95 % of the time would be saved if the script slept, wrote files or ran "
              "other programs less often, or in a thread"),
    ):  # fmt: skip
        samples = Samples()
        add(samples, {"script": 95, "backward": 5}, state=state)
        assert causes(samples.spent()) == [f"95 % of the time is in the script's own code at train.py:37{said}"]


def test_data_that_the_first_epoch_alone_waits_for() -> None:
    """More workers would load it as fast from the cache as it is loaded now."""
    samples = Samples()
    add(samples, {"loading": 300, "backward": 30}, state="S")
    (line,) = causes(samples.spent())
    assert "num_workers=" in line
    add(samples, {"backward": 300, "loading": 3})
    (line,) = causes(samples.spent())
    assert line == (
        "48 % of the time waits for data at train.py:5, but 1 % of the last quarter of it: the first epoch may fill a "
        "cache; fill it before the job, or leave it: more workers gain nothing any more"
    )


def test_objects_that_are_gathered_are_no_gradients() -> None:
    samples = Samples()
    add(samples, {"gathered objects": 80, "backward": 20}, numbers={"": 1000})
    (line,) = causes({**samples.spent(), "collectives": 300.0})
    assert line == (
        "80 % of the time exchanges Python objects of all ranks at train.py:38, which are pickled; every hundredth "
        "step, or tensors in one all_gather or all_reduce, would save up to 80 % of the time"
    )


def test_printing_a_tensor_prints() -> None:
    samples = Samples()
    add(samples, {"printed tensor": 80, "backward": 20})
    (line,) = causes(samples.spent())
    assert line.startswith("80 % of the time logs and prints at train.py:39")


def test_threads_that_the_script_sets(tmp_path: Path) -> None:
    """A variable would change nothing; and ranks that wait for each other wait for a core."""
    script = tmp_path / "train.py"
    script.write_text("import torch\n# torch.set_num_threads(1)\ntorch.set_num_threads(16)\n")
    machine: Any = {"queued": 0.4, "cores": 2, "used": 2.0, "free": 0.0}
    for given, says in ((16, "OMP_NUM_THREADS=1 for each"), (1, "torch.set_num_threads(1) at train.py:3")):
        samples = Samples()
        frames = [(f"{TORCH}/distributed/distributed_c10d.py", 81, "all_reduce"), (str(script), 9, "<module>")]
        known: Any = {"threads": [{"name": "MainThread", "frames": frames}], "sizes": {}, "computing": 16}
        for rank in range(2):
            samples.add(Asked("", 0, rank, 0, 1 + rank), {**known, "given": given}, Process("S"), 1.0)
        (line,) = causes({**samples.spent(), **machine})
        assert line == (
            "40 % of the time ranks wait for a core: 2 with 16 threads each compute on 2 cores; "
            f"{says} would save about 40 % of the time"
        )


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
    for pid, total, steps in ((1, 1.0, 1.0), (1, 3.0, 3.0), (2, 7.0, 2.0)):
        samples.add(Asked("", 0, 0, 0, pid), {"threads": [], "times": {"total": total, "steps": steps}}, Process(), 1.0)
    assert samples.spent()["seconds"] == {"total": 2.0}


def test_a_rank_that_evaluates_alone_is_named() -> None:
    samples = Samples()
    add(samples, {"evaluation": 60, "backward": 40})
    add(samples, {"exchange": 60, "backward": 40}, rank=1)
    (line,) = causes(samples.spent())
    assert line == (
        "60 % of the time ranks wait for rank 0, which evaluates alone, at train.py:40; "
        "evaluation on all ranks, each with its share of the data, would save about 30 % of the time"
    )


def test_nodes_are_compared() -> None:
    spents: list[Any] = []
    for host, counts in (("gpu-1", {"exchange": 50, "backward": 50}), ("gpu-2", {"exchange": 5, "backward": 95})):
        samples = Samples()
        add(samples, counts, rank=2 * len(spents))
        add(samples, counts, rank=2 * len(spents) + 1)
        spents.append({"host": host, **samples.spent()})
    (line,) = compared(spents)
    assert line.startswith(
        "50 % of the time ranks on other nodes wait for those on gpu-2, of which rank 2 is at train.py:34 (backward) "
        "when it does not wait; as fast as the others they would save about 45 % of the time; look at this host: "
    )
    assert compared(spents[:1]) == compared([spents[0], dict(spents[0])]) == []
    samples = Samples()
    add(samples, {"exchange": 80, "backward": 20})
    add(samples, {"backward": 100}, rank=1)
    assert compared([spents[0], {"host": "gpu-2", **samples.spent()}]) == []  # the line of its node names rank 1


def test_what_happens_once_is_no_part_of_a_step() -> None:
    samples, own = Samples(), (SCRIPT, 3, "<module>")
    fetch, loader = (f"{TORCH}/utils/data/_utils/fetch.py", 54, "fetch"), f"{TORCH}/utils/data/dataloader.py"
    for number, frames in enumerate((
        [(f"{TORCH}/optim/__init__.py", 9, "<module>"), ("<frozen importlib._bootstrap>", 241, "_call"), own],
        [(f"{TORCH}/distributed/rendezvous.py", 9, "_create_c10d_store"),
         (f"{TORCH}/distributed/distributed_c10d.py", 99, "init_process_group"), own],
        [(f"{TORCH}/serialization.py", 9, "load_tensor"), (f"{TORCH}/serialization.py", 8, "load"), own],
        [(f"{TORCH}/nn/modules/module.py", 9, "_call_impl"), (f"{TORCH}/_dynamo/convert_frame.py", 8, "_compile"), own],
        [("/tmp/torchinductor_ada/x/y.py", 9, "call"), (f"{TORCH}/_inductor/output_code.py", 8, "__call__"), own],
        [(f"{TORCH}/serialization.py", 8, "load"), (SCRIPT, 5, "__getitem__"), fetch, own],
        [(loader, 8, "__init__"), (loader, 9, "__iter__"), own],
    )):  # fmt: skip
        answer: Any = {"threads": [{"name": "MainThread", "frames": frames}]}
        samples.add(Asked("", 0, 0, 0, 7), answer, Process("R"), float(number))
    parts = ["import", "joining", "restore", "compile", "forward", "loading", "start of workers"]
    assert sorted(samples.spent()["parts"]) == sorted(parts)


def test_the_innermost_function_says_whether_a_rank_evaluates() -> None:
    samples, loop, evaluates = Samples(), (SCRIPT, 9, "train_and_evaluate"), (SCRIPT, 40, "evaluate")
    for number, frames in enumerate((
        [*STACKS["loading"][:3], loop, (SCRIPT, 50, "<module>")],
        [*STACKS["loading"][:3], (SCRIPT, 20, "main"), (SCRIPT, 60, "run_tests")],
        [*STACKS["evaluation"][:1], (SCRIPT, 3, "forward"), evaluates, loop],
        [*STACKS["loading"][:3], evaluates, (SCRIPT, 20, "main")],
    )):  # fmt: skip
        answer: Any = {"threads": [{"name": "MainThread", "frames": frames}]}
        samples.add(Asked("", 0, 0, 0, 7), answer, Process("R"), float(number))
    assert samples.spent()["parts"] == {"loading": 0.5, "evaluation": 0.5}


def test_workers_that_start_are_no_part_of_a_step() -> None:
    samples, get = Samples(), (f"{TORCH}/utils/data/dataloader.py", 1275, "_try_get_data")
    for number in range(40):  # four epochs of ten seconds; a worker of two has something to do
        answer: Any = {
            "threads": [{"name": "MainThread", "frames": [get, (SCRIPT, 3, "<module>")]}],
            "loader": {"id": 1, "workers": 2, "batch": 4, "done": 3 * (number % 10), "prefetch": 2, "busy": 1},
        }
        samples.add(Asked("", 0, 0, 0, 7), answer, Process("S"), float(number))
    spent = samples.spent()
    assert spent["parts"] == {"workers": 0.9, "start of workers": 0.1}
    assert (spent["iterations"], spent["busy"], spent["step"]) == (4, 0.5, pytest.approx(1 / 3))
    lines = causes({**spent, "cores": 8, "used": 1.0, "free": 7.0})
    assert "prefetch_factor=8" in lines[0]
    assert "persistent_workers=True would save about 10 % of the time" in lines[1]


def test_the_rate_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (read_rate(str(tmp_path), 60.0) or 0) > 0
    assert read_rate(str(tmp_path / "missing")) is None
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "missing")])
    assert read_rate() is None


@pytest.mark.parametrize(
    ("parts", "known", "words"),
    [
        ({"forward": 0.9, "exchange": 0.1}, {}, None),
        ({"workers": 0.5}, {**_LOADER, "late": 0.02}, "waits for data, but 2 % of the last quarter of it: the first"),
        ({"workers": 0.5}, {**_LOADER, "late": 0.5, "used": 1.0, "free": 7.0}, "num_workers="),
        ({"forward": 0.9}, {"computing": 1, "cores": 8, "ranks": 4, "used": 4.0, "free": 4.0,
                            "threads_at": "train.py:2"}, r"; torch.set_num_threads\(2\) at train.py:2 would save"),
        ({"loading": 0.5}, {"read": 1e5, "reads": 400.0}, "in 400 reads of 250 B on average: many small files"),
        ({"workers": 0.6}, {**_LOADER, "used": 2.0, "free": 6.0}, "num_workers=5 would save"),
        ({"workers": 0.55}, {**_LOADER, "used": 2.0, "free": 6.0}, "num_workers=5 would save"),
        ({"workers": 0.6}, {**_LOADER, "used": 2.0, "free": 0.0, "still": {"loading": 1}}, "less work on each sample"),
        ({"exchange": 0.4}, {"busiest": {"rank": 3, "exchange": 0.1, "others": 0.5, "part": "script",
                                         "line": "train.py:9"}}, "wait for rank 3, .* would save about 40 %"),
        ({"exchange": 0.4}, {}, "paceline tune"),
        ({"workers": 0.5}, {**_LOADER, "busy": 0.5, "used": 1.0, "free": 7.0},
         "while 50 % of the 2 workers have nothing to load; prefetch_factor=8 would save about 50 %"),
        ({"loading": 0.5}, {"still": {"loading": 1}, "step": 1.0, "read": 5e6, "ranks": 1, "local": 1e9},
         "read 5 MB a batch from slow storage, 10 MB/s, .* 1 GB/s; a copy on a local disk would save up to 0.49 s"),
        ({"loading": 0.5}, {"still": {"loading": 1}, "step": 1.0, "read": 5e8, "ranks": 1, "local": 2e9},
         "from slow storage; num_workers=1 would save about 0.5 s"),
        ({"workers": 0.5}, {**_LOADER, "rate": 1e7, "local": 1e9, "used": 1.1, "free": 2.0, "ranks": 1},
         "2 workers read 10 MB/s .* up to 50 % of the time, or num_workers=4 about 50 %"),
        ({"workers": 0.5}, {**_LOADER, "rate": 1e7, "local": 1e9, "used": 2.4, "free": 2.0, "ranks": 1}, "too few"),
        ({"start of workers": 0.3}, {"iterations": 3, "ranks": 1}, "persistent_workers=True would save about 30 %"),
        ({"start of workers": 0.3, "restore": 0.3}, {"iterations": 2, "ranks": 2}, None),
        ({"exchange": 0.3}, {"ddp": {**_DDP, "finds_unused": True}}, "find_unused_parameters.* save up to 15 %"),
        ({"exchange": 0.25}, {"ddp": {**_DDP, "finds_unused": True, "unused": 4}}, None),
        ({"exchange": 0.3}, {"ddp": {**_DDP, "buckets": 10}}, "10 buckets of 2 MB on average; .* up to 24 %"),
        ({"forward": 0.8}, {"gpu": True, "step": 1.0, "ddp": {**_DDP, "buckets": 10, "exposed": 0.4}}, "10 buckets"),
        ({"exchange": 0.4}, {"collectives": 90.0, "by_hand": 0.4}, "in 90 collectives of the script.* up to 40 %"),
        ({"exchange": 0.25}, {"collectives": 90.0, "by_hand": 0.0}, None),
        ({"optimizer": 0.6}, {}, "60 % .* a batch twice as large would save about 30 %"),
        ({"forward": 0.9}, {"gpu": True, "gpu_use": 0.3, "gpu_memory": 0.1}, "twice as large would save about 50 %"),
        ({"forward": 0.9}, {"gpu": True, "gpu_use": 0.3, "gpu_memory": 0.8}, "reduce-overhead.* up to 70 %"),
        ({"forward": 0.5, "compile": 0.4}, {"gpu": True, "gpu_use": 0.3, "gpu_memory": 0.1}, None),
        ({"loading": 0.9}, {"gpu": True, "gpu_use": 0.3, "gpu_memory": 0.1}, "^90 % .* num_workers=[^\n]*$"),
        ({"forward": 0.9}, {"gpu": True, "gpu_use": 0.9, "single": True}, "in float32; torch.autocast"),
        ({"forward": 0.9}, {"gpu": True, "gpu_use": 0.9, "single": False}, None),
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
        ({"exchange": 0.5}, {**_FAR, "gpu": True, "infiniband": 10.0}, "at 100 MB/s over TCP, .* NCCL_IB_DISABLE=1"),
        ({"exchange": 0.5}, {**_FAR, "link": 125e6}, "at 100 MB/s of the 125 MB/s .* would save up to 25 % of the"),
        ({"exchange": 0.5}, {**_FAR, "link": 1e9, "gpu": True}, "NCCL_NSOCKS_PERTHREAD=4 .* save up to 45 % of"),
        ({"exchange": 0.5}, {**_FAR, "link": 1e9, "gpu": True, "infiniband": 4e7}, "paceline tune"),
        ({"exchange": 0.5}, {**_FAR, "link": 125e6, "world": 2}, "paceline tune"),  # all ranks are here
        ({"forward": 0.9}, {"swapped": 5e6, "stalled": 0.4}, "^the machine swaps 5 MB/s, and 40 % of the time"),
        ({"forward": 0.9}, {"swapped": 5e6}, "^the machine swaps 5 MB/s; fewer"),
        ({"forward": 0.9}, {"swapped": 5e5, "stalled": 0.4}, None),
        ({"forward": 0.9}, {"queued": 0.4, "cores": 8, "used": 2.0, "free": 0.0},
         "^30 % of the time ranks wait for a core, while other processes use 6 of 8; .* would save about 30 %"),
        ({"forward": 0.9}, {"queued": 0.4, "cores": 8, "used": 7.8, "free": 0.0}, None),
        ({"exchange": 0.4}, {"busiest": {"rank": 3, "exchange": 0.1, "others": 0.5, "part": "script",
                                         "line": "train.py:9"}, "cores": 8, "used": 4.0, "free": 1.0, "slowed": 7,
                             "swapped": 2e6, "hottest": 91.0},
         "at its host: other processes use 3 of 8 cores, it swaps 2 MB/s, heat has slowed .* 7 times, a GPU has 91 °C"),
        ({"loading": 0.3, "checkpoint": 0.3, "logging": 0.2, "item": 0.2}, {}, ".*\n.*\n.*$"),
    ],
)  # fmt: skip
def test_each_cause_has_its_own_evidence(parts: dict[str, float], known: dict[str, Any], words: str | None) -> None:
    import re

    lines = causes({"samples": 99, "parts": parts, "lines": {}, **known})  # type: ignore[typeddict-item]
    assert bool(lines) == (words is not None)
    assert words is None or re.search(words, "\n".join(lines)), lines
    assert len(lines) <= 3
