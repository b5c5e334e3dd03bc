"""The history in a run directory, however much of it is there."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.node.rundir.directory import RunDirectory
from paceline.node.telemetry.history import SKETCH, history, losses, metrics, usage


def write(path: Path, *lines: Any) -> None:
    path.write_text("".join(it if isinstance(it, str) else json.dumps(it) + "\n" for it in lines))


def line(time: float) -> dict[str, Any]:
    return {"time": time, "seconds": 10.0, "job": {"cpu": 1.0}, "machine": {"load": 1.0}, "ranks": {"rank": [0]}}


def test_an_empty_folder(tmp_path: Path) -> None:
    found = history(RunDirectory(tmp_path))
    assert (found["telemetry"], found["metrics"], found["node_rank"]) == ([], None, 0)
    assert "no telemetry was recorded" in found["missing"][0]


def test_the_packages_of_an_environment(tmp_path: Path) -> None:
    """Also of a job that was too short for anything to be recorded."""
    write(tmp_path / "environment.json", {"packages": {"first": "1.0"}})
    run = RunDirectory(tmp_path)
    write(run.spec, {"python": [str(tmp_path / "bin/python"), "-u"]})
    assert history(run)["software"] == {"first": "1.0"}


def test_what_is_no_line_is_left_out(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    odd: list[Any] = ["{}\n", "[1]\n", {**line(12.0), "ranks": [1]}, {**line(13.0), "ranks": {"rank": [0], "cpu": []}}]
    odd += [{**line(14.0), "job": {"cpu": it}} for it in ("x", [], float("nan"), 1e308, 10**400, True)]
    odd += [{**line(14.0), "job": {"cpu": 1.0, "memory": 10**400}}]
    odd += [{**line(15.0), "seconds": 0.0}, {**line(15.0), "ranks": {"rank": [None]}}, {**line(15.0), "machine": []}]
    odd += ["[" * 100_000 + "\n", '{"time": 1', "\n"]
    write(run.telemetry, line(10.0), *odd, line(20.0), line(30.0))
    assert [it["time"] for it in history(run)["telemetry"]] == [10.0, 20.0, 30.0]
    assert [it["time"] for it in history(run, since=20.0)["telemetry"]] == [30.0]
    assert [it["time"] for it in history(run, points=2)["telemetry"]] == [10.0, 30.0]


def test_a_clock_that_was_set_back(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    write(run.telemetry, line(500.0), line(510.0), line(10.0), line(20.0))
    assert [it["time"] for it in history(run)["telemetry"]] == [10.0, 20.0, 500.0, 510.0]


def test_what_a_job_uses_now(tmp_path: Path) -> None:
    """The sum of what its nodes have written last, if that is not long ago."""
    runs = [RunDirectory(tmp_path / str(node)) for node in range(4)]
    for run in runs:
        run.path.mkdir()
    now = time.time()
    job = {"processes": 3, "cpu": 1.25, "memory": 100}
    gpus = {"index": [0, 2], "use": [90.0, None], "memory": [9, 9], "memory_used": [7, 8], "power": [1.0, 2.0]}
    write(runs[0].telemetry, line(now - 20), {**line(now - 10), "job": job, "gpus": gpus}, '{"time": 1')
    write(runs[1].telemetry, {**line(now), "job": {**job, "memory": None}, "gpus": {"index": [5]}})
    write(runs[2].telemetry, line(now - 45))
    assert usage(runs) == {
        "processes": 6, "cpu": 2.5, "memory": 100,
        "gpus": ({"device": "0", "use": 90.0, "memory": 7}, {"device": "2", "use": None, "memory": 8}),
    }  # fmt: skip
    assert usage(runs[2:]) is None


def test_a_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "telemetry.jsonl").mkdir()
    assert "cannot be read" in history(RunDirectory(tmp_path))["missing"][0]


def test_metrics(tmp_path: Path) -> None:
    """Steps that a later attempt did again count once, and what is no number is none."""
    path = tmp_path / "metrics.jsonl"
    first = [
        {"time": 1.0 * it, "epoch": 0, "step": it, "attempt": 0, "loss": 9.0, "__proto__": 1} for it in range(1, 9)
    ]
    again = [{"time": 90.0 + it, "step": it, "attempt": 1, "loss": 1.0 / it} for it in range(5, 11)]
    write(path, *first, *again, {"time": 200.0, "step": 10, "attempt": 1, "accuracy": None, "sync_method": "x"})
    found = metrics(path)
    assert found["step"] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10]
    assert found["values"]["loss"][3:6] == [9.0, 0.2, 0.166667]
    assert set(found["values"]) == {"loss", "__proto__", "accuracy"}
    assert found["last"] == {"loss": 0.1, "__proto__": 1, "accuracy": None}
    write(path, *first, '{"time": 300.0, "step": 11, "loss": NaN}\n')
    assert metrics(path)["last"]["loss"] is None, "what was logged last is not finite"
    write(path, *first, *again)
    few = metrics(path, points=3)
    assert [len(few[key]) for key in ("time", "step")] == [3, 3]  # type: ignore[literal-required]
    assert few["step"][-1] == 10


@pytest.mark.parametrize("since", [0.0, 180.0, 450.0])
def test_steps_that_begin_again_in_one_process(tmp_path: Path, since: float) -> None:
    """Trainings one after the other: none has a mean with the one before."""
    path = tmp_path / "metrics.jsonl"
    steps = [(step, loss) for loss in (8.0, 4.0, 2.0) for step in range(1, 201)]
    write(path, *({"time": 1.0 + at, "step": step, "loss": loss} for at, (step, loss) in enumerate(steps)))
    found = metrics(path, since, points=6)
    trainings = 3 - int(since // 200)
    assert list(dict.fromkeys(found["values"]["loss"])) == [8.0, 4.0, 2.0][-trainings:]
    assert found["step"].count(200) == trainings
    assert len(found["step"]) <= 6 + trainings


def test_steps_that_always_fall(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, *({"time": 1.0 + at, "step": at % 2, "loss": 1.0} for at in range(100)))
    assert metrics(path, points=6)["values"] == {"loss": [1.0] * 6}


def test_metrics_that_no_chart_can_have(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    odd = [{"time": 1.0, "step": it, "a": 1.0} for it in (True, 10**400, None)]
    odd += [{"time": it, "step": 1, "a": 1.0} for it in (float("inf"), "x", 10**400)]
    large = [{"time": 1.0, "step": it, "a": 1e308, "b": 10**400, "c": float("inf")} for it in range(4)]
    write(path, *odd, *large, '{"time": 2.0, "step": 5, "a"')
    found = metrics(path, points=2)
    assert found["step"] == [1, 3]
    assert found["values"] == {"a": [1e308, 1e308], "b": [None, None], "c": [None, None]}


def test_the_losses_of_a_list_are_some_of_all_steps(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert losses(run) == []  # it has logged nothing

    def logged(count: int) -> list[float]:
        lines = ({"time": 1.0, "step": step, "train_loss": count - step, "lr": 1e-3} for step in range(count))
        (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return losses(run)

    assert logged(3) == [3.0, 2.0, 1.0]
    for count in (1000, 100_000):  # all of the file is read, or lines at equal distances
        found = logged(count)
        assert len(found) == SKETCH and found[0] == count and found[-1] < count / 25
        assert found == sorted(found, reverse=True)
    (tmp_path / "metrics.jsonl").write_bytes(b'{"loss": NaN}\n{"loss": "x"}\n{"loss": 0.5}\n[1]\n{"lo')
    assert losses(run) == [0.5]
