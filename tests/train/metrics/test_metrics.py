"""What `run.log` is given and how long steps take: in files, in TensorBoard, and on the screen."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from tests.conftest import eventually  # noqa: E402
from tests.train.launching import launch  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402 - after torch is known to be there

import paceline  # noqa: E402
from paceline.train.metrics.progress import Moment, Progress  # noqa: E402
from paceline.train.metrics.reduction import LogMismatch  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import Paceline

pytestmark = pytest.mark.torch
PARTS = ("data", "forward_backward", "sync", "optimizer", "checkpoint", "total")


def numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(float(count)))


def read(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


# -- means -------------------------------------------------------------------------------------------------------------


def log_batches(folder: str, samples: int) -> None:
    with paceline.init(log_every=10, log_dir=folder, progress=False) as run:
        loader = run.dataloader(numbers(samples), global_batch_size=4)
        for epoch in run.epochs(2):
            for (batch,) in loader:
                mean = batch.mean()
                # A number one time, a tensor another; a stand-in's batch may be anything.
                run.log(
                    value=mean if run.step % 2 else mean.item(), square=(batch**2).mean() if run.step else torch.nan
                )
                run.log(stand_in=0.0 if run._steps.feeds[0].samples else torch.nan)
                mean.zero_()  # what was logged stays
            run.log(epoch_end=10.0 * run.rank + epoch)


@pytest.mark.parametrize("samples", [41, 43, 48, 90])
def test_means_are_those_over_samples_the_uneven_last_batch_included(samples: int, tmp_path: Path) -> None:
    launch(log_batches, (str(tmp_path), samples), nproc=3)
    lines = read(tmp_path / "metrics.jsonl")
    steps = math.ceil(samples / 4)
    ends = [*range(10, steps, 10), steps]
    assert [(line["epoch"], line["step"]) for line in lines if "value" in line] == [
        (epoch, epoch * steps + end) for epoch in (0, 1) for end in ends
    ]
    begins = [0, *ends]
    for line in lines[: len(ends)]:
        end = line["step"]
        first, last = 4 * begins[ends.index(end)], min(4 * end, samples)
        mine = range(first, last)
        assert line["value"] == pytest.approx(sum(mine) / len(mine), rel=1e-12)
        assert line["stand_in"] == 0.0
        if first:
            assert line["square"] == pytest.approx(sum(x * x for x in mine) / len(mine), rel=1e-6)
    assert lines[0]["square"] is None, "NaN is null"
    assert [line["epoch_end"] for line in lines if "epoch_end" in line] == [10.0, 11.0], "the mean over three ranks"


def test_a_line_of_metrics(tmp_path: Path) -> None:
    began = time.time()
    launch(log_batches, (str(tmp_path), 8), nproc=1)
    line = read(tmp_path / "metrics.jsonl")[0]
    assert list(line) == [
        "time", "epoch", "step", "attempt", "square", "stand_in", "value", *(f"{part}_seconds" for part in PARTS),
        "sent_bytes",
    ]  # fmt: skip
    assert began <= line["time"] <= time.time()
    assert (line["epoch"], line["step"], line["attempt"]) == (0, 2, 0)


def log_and_break(folder: str) -> None:
    with paceline.init(log_every=10, log_dir=folder, progress=False) as run:
        for _ in run.dataloader(numbers(4), global_batch_size=3):
            break
        run.log(rank=run.rank)  # of batches of two samples and of one


def test_after_a_break_every_value_weighs_the_same(tmp_path: Path) -> None:
    launch(log_and_break, (str(tmp_path),), nproc=2)
    (line,) = read(tmp_path / "metrics.jsonl")
    assert line["rank"] == 0.5
    assert "total_seconds" not in line, "no step was done"


def log_what(names: dict[int, str], when: str) -> None:
    with paceline.init(log_every=10, progress=False, timeout=60) as run:
        for _ in run.epochs(1):
            for _ in run.dataloader(numbers(80), global_batch_size=4):
                run.log(loss=1.0)
                if when == "step" and run.step == 13:
                    run.log(**{names[run.rank]: 1.0})
            if when == "end" and names[run.rank]:
                run.log(**{names[run.rank]: 1.0})
        if when == "after" and names[run.rank]:
            run.log(**{names[run.rank]: 1.0})


@pytest.mark.parametrize(
    ("names", "when", "said"),
    [
        ({0: "a", 1: "b", 2: "a"}, "step", "rank 0 has logged a, loss, and rank 1 b, loss"),
        ({0: "loss", 1: "loss", 2: "accuracy"}, "step", "rank 0 has logged loss, and rank 2 accuracy, loss"),
        ({0: "a", 1: "", 2: ""}, "end", "since step 20 rank 0 has logged a, and rank 1 nothing"),
        ({0: "a", 1: "", 2: ""}, "after", "rank 0 has logged a after the last step, and another rank has left without"),
    ],
)
def test_ranks_that_log_different_names_are_told_so(names: dict[int, str], when: str, said: str) -> None:
    with pytest.raises(LogMismatch, match=said):
        launch(log_what, (names, when), nproc=3)


def told() -> str:
    try:
        log_what({0: "a", 1: "b"}, "step")
    except LogMismatch as error:
        return str(error)
    return "nothing"


def test_different_names_are_an_error_on_every_rank() -> None:
    for message in launch(told, nproc=2):
        assert "call run.log with the same names on each" in message


def test_values_that_cannot_be_logged() -> None:
    with paceline.init(log_every=10, progress=False) as run:
        with pytest.raises(ValueError, match=r"loss has the shape \[2\]; log a single number"):
            run.log(loss=torch.zeros(2))
        for name in ("epoch", "step", "sync_seconds"):
            with pytest.raises(ValueError, match=f"has its own {name}; log yours under another name"):
                run.log(**{name: 1.0})
        run.log(
            one=torch.ones(1, 1),
            whole=torch.tensor(3),
            true=torch.tensor(True),
            half=torch.ones((), dtype=torch.bfloat16),
        )
        run.log(one=2, whole=torch.tensor(4), true=torch.tensor(False), half=0.5)


# -- step times --------------------------------------------------------------------------------------------------------


class Slow:
    """Makes a chosen part of chosen steps slow, on one rank."""

    SECONDS = 1.0

    def __init__(self, part: str, rank: int) -> None:
        self.part, self.rank = part, rank

    def __call__(self, part: str, rank: int, step: int) -> None:
        if self.is_now(part, rank, step):
            time.sleep(self.SECONDS)

    def is_now(self, part: str, rank: int, step: int) -> bool:
        """Whether this part of this step is to be slow."""
        return (part, rank) == (self.part, self.rank) and step in (4, 12)


class Data(torch.utils.data.Dataset[Any]):
    def __init__(self, wait: Callable[[int], None]) -> None:
        self.wait = wait

    def __len__(self) -> int:
        return 28

    def __getitem__(self, index: int) -> Any:
        self.wait(index // 2)
        return torch.full((4,), float(index))


def train_slowly(folder: str, slow: Slow) -> None:
    with paceline.init(
        log_every=10, log_dir=folder, progress=False, checkpoint_dir=f"{folder}/checkpoints", checkpoint_every=7
    ) as run:
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        model, optimizer = run.setup(model, optimizer)

        def reached(rank: int, step: int) -> Path:
            return Path(folder) / f"exchange-{rank}-{step}"

        def slowly(part: str, step: int) -> None:
            if run.world_size > 1 and slow.is_now(part, run.rank, step):  # by then the other rank waits for this one
                due = step + (part in ("optimizer", "other"))
                eventually(reached(1 - run.rank, due).exists, "the other rank is at the exchange")
            slow(part, run.rank, step)

        class Slower(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                slowly("optimizer", run.step - 1)  # the other one has stepped
                return super().step(closure)

        slower = run.setup(Slower(model.parameters(), lr=1e-4))
        times = run._metrics.times
        computed = times.computed

        def exchanges() -> None:
            computed()  # what follows is the exchange's time
            reached(run.rank, run.step).touch()

        times.computed = exchanges  # type: ignore[method-assign]
        data = Data(lambda step: slowly("data", step))
        for _ in run.epochs(1):
            for batch in run.dataloader(data, global_batch_size=2):
                loss = model(batch).mean()
                slowly("forward_backward", run.step)
                run.backward(loss)
                slowly("other", run.step)
                optimizer.step()
                slower.step()
                run.log(loss=loss)


def steps_of(folder: Path, rank: int) -> dict[str, list[float]]:
    lines = read(folder / "steps" / f"rank-{rank}.jsonl")
    assert [(line["epoch"], line["step"], line["attempt"], len(line["data"])) for line in lines] == [
        (0, 1, 0, 10),
        (0, 11, 0, 4),
    ]
    assert all(list(line)[3:] == list(PARTS) for line in lines)
    return {part: [x for line in lines for x in line[part]] for part in PARTS}


def slow_steps(seconds: list[float]) -> set[int]:
    """The steps, counted from 0, that took as long as a slow part does."""
    return {step for step, x in enumerate(seconds) if x > 0.99 * Slow.SECONDS}


@pytest.mark.parametrize("part", ["data", "forward_backward", "optimizer", "other"])
def test_a_slow_part_shows_where_it_is_and_the_other_rank_waits_in_sync(part: str, tmp_path: Path) -> None:
    launch(train_slowly, (str(tmp_path), Slow(part, 1)), nproc=2)
    fast, slow = steps_of(tmp_path, 0), steps_of(tmp_path, 1)
    for times in (fast, slow):
        for step in range(14):
            parts = [times[p][step] for p in PARTS[:-1]]
            assert min(parts) >= 0
            assert sum(parts) <= times["total"][step] + 1e-5
        assert [step for step, x in enumerate(times["checkpoint"]) if x] == [6], "the last is taken behind the body"
    where = {p for p in PARTS[:-1] if {4, 12} <= slow_steps(slow[p])}
    assert where == (set() if part == "other" else {part})
    assert {4, 12} <= slow_steps(slow["total"])
    waited = {4, 12} if part in ("data", "forward_backward") else {5, 13}  # the slow rank comes late to that exchange
    assert {p for p in PARTS[:-1] if waited <= slow_steps(fast[p])} == {"sync"}
    means = read(tmp_path / "metrics.jsonl")[0]
    both = [sum(times["total"][:10]) / 10 for times in (fast, slow)]
    assert means["total_seconds"] == pytest.approx(sum(both) / 2, abs=1e-4)


def test_one_process_waits_for_nobody(tmp_path: Path) -> None:
    launch(train_slowly, (str(tmp_path), Slow("forward_backward", 0)))
    times = steps_of(tmp_path, 0)
    assert set(times["sync"]) == {0.0}
    assert slow_steps(times["forward_backward"]) >= {4, 12}


def train_otherwise(folder: str) -> None:
    """Loops that are not of the usual form."""
    with paceline.init(log_every=10, log_dir=folder, progress=False) as run:
        model, second = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
        model, second, optimizer = run.setup(model, second, torch.optim.SGD(model.parameters(), lr=1e-4))
        loader = run.dataloader(numbers(100), global_batch_size=2)
        for epoch in run.epochs(2):
            for (batch,) in loader:
                if run.step % 3 == 0:
                    model(batch[:, None]).mean().backward()  # not through the run
                elif run.step % 3 == 1:
                    run.backward(model(batch[:, None]).mean())
                    run.backward(second(batch[:, None]).mean())
                    optimizer.step()
                optimizer.step()
                if (epoch, run.step) == (0, 25):
                    break
        loader = run.dataloader(numbers(8), global_batch_size=2)
        for (one,), (other,) in zip(loader, run.dataloader(numbers(8), global_batch_size=2), strict=True):
            run.backward(model(one[:, None] + other[:, None]).mean())


def test_loops_of_another_form_are_timed_too(tmp_path: Path) -> None:
    launch(train_otherwise, (str(tmp_path),), nproc=2)
    for rank in (0, 1):
        lines = read(tmp_path / "steps" / f"rank-{rank}.jsonl")
        assert [line["step"] for line in lines][:5] == [1, 11, 21, 26, 36]
        for line in lines:
            for step, total in enumerate(line["total"]):
                assert 0 <= sum(line[part][step] for part in PARTS[:-1]) <= total + 1e-5


# -- TensorBoard -------------------------------------------------------------------------------------------------------


def test_tensorboard_shows_the_last_attempt_of_each_step(paceline: Paceline) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    paceline.script("""
        import os, time, torch, paceline
        committed = os.environ["PACELINE_RUN_DIR"] + "/checkpoints/step-000025"
        with paceline.init(log_every=10, checkpoint_every=25, progress=False) as run:
            model = torch.nn.Linear(1, 1)
            model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), 0.1))
            data = torch.utils.data.TensorDataset(torch.arange(160.0))
            train = run.dataloader(data, global_batch_size=4)
            for epoch in run.epochs(1):
                for (batch,) in train:
                    run.log(loss=run.attempt * 1000 + batch.mean())
                    if run.step == 33 and run.attempt == 0:
                        while not os.path.exists(committed):
                            time.sleep(0.01)
                        if run.is_main:
                            run._metrics.settle()
                            run._metrics._board.close()  # all is written that is to be forgotten
                            os._exit(1)
                    run.step_done()
    """)
    paceline.succeeds("run", "-n", "2", "--max-restarts", "1", "script.py")
    lines = read(paceline.job() / "metrics.jsonl")
    assert [(line["attempt"], line["step"]) for line in lines] == [(0, 10), (0, 20), (0, 30), (1, 35), (1, 40)]
    events = accumulator.EventAccumulator(str(paceline.job() / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"loss", "sent_bytes", *(f"step_seconds/{part}" for part in PARTS)}
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [
        (line["step"], pytest.approx(line["loss"])) for line in lines if line["step"] != 30
    ]


# -- progress ----------------------------------------------------------------------------------------------------------

TRAIN = """
    import logging, sys
    import torch, paceline
    from paceline.train.metrics import progress
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    {before}
    for every, shown in {runs}:  # seconds between two updates, and whether progress is shown
        if every is not None:
            progress._Lines.every = progress._Bar.every = every
        with paceline.init(log_every=10, progress=shown) as run:
            train = run.dataloader(torch.utils.data.TensorDataset(torch.arange(30.0)), global_batch_size=2)
            for epoch in run.epochs(2):
                for (batch,) in train:
                    run.log(loss=batch.sum() * 0 + 0.52)
                print("between epochs")
        run.print("next run", file=sys.stderr)
"""


def script(paceline: Paceline, runs: list[tuple[float | None, bool]], before: str = "") -> str:
    return paceline.script(TRAIN.format(before=before, runs=runs))


def on_terminal(paceline: Paceline) -> str:
    """What a terminal gets to show, over the whole job."""
    code, seen = paceline.on_terminal("run", "-n", "2", "script.py")
    assert code == 0, seen
    return seen.decode()


def test_a_pipe_gets_plain_lines(paceline: Paceline) -> None:
    script(paceline, [(None, True), (0.0, True), (0.0, False)])
    done = paceline.succeeds("run", "-n", "2", "script.py")
    usual, all_steps, none = (
        [line for line in text.splitlines() if line.startswith("epoch")] for text in done.stderr.split("next run")[:3]
    )
    assert [line.split(" samples/s")[0].rpartition(" ")[0] for line in usual] == [
        "epoch 1/2 step 15/15 loss 0.52",
        "epoch 2/2 step 15/15 loss 0.52",
    ]
    (line,) = [line for line in all_steps if line.startswith("epoch 2/2 step 12/15 ")]
    assert line.endswith(" s left"), "in mid-epoch it says how long the rest takes"
    assert len(all_steps) == 2 * 16
    assert not none, "progress=False"
    assert done.stdout == "between epochs\n" * 6
    last = json.loads((paceline.job() / "progress.json").read_text())
    assert (last["epoch_seconds_left"], last["seconds_left"]) == (0, 0)
    assert last["metrics"] == {"loss": pytest.approx(0.52)}


def test_a_terminal_gets_a_bar_whose_last_state_stays(paceline: Paceline) -> None:
    pytest.importorskip("tqdm")
    script(paceline, [(None, True), (3600.0, True), (0.0, False)])
    usual, seldom, none = on_terminal(paceline).split("next run")[:3]
    for epoch in ("1/2", "2/2"):
        assert f"epoch {epoch}:   0%|" in usual
        assert f"epoch {epoch}: 100%|" in usual
    for line in usual.split("\r\n"):
        if line.endswith("between epochs"):
            assert line == "between epochs"
    assert "15/15, loss 0.52" in usual
    assert seldom.count("epoch 1/2") == 3, "at the begin, and at the end when it is finished and left"
    assert "epoch 1" not in none, "progress=False"


# -- the file ----------------------------------------------------------------------------------------------------------


def test_others_can_read_how_far_it_is(paceline: Paceline) -> None:
    paceline.script("""
        import json, os, time, torch, paceline
        from paceline.train.metrics import progress
        progress._File.every = 0.0
        file = os.environ["PACELINE_RUN_DIR"] + "/progress.json"
        with paceline.init(log_every=10, progress=False) as run:
            train = run.dataloader(torch.utils.data.TensorDataset(torch.arange(30.0)), global_batch_size=2)
            for epoch in run.epochs(3):
                for (batch,) in train:
                    run.log(loss=batch.sum() * 0 + run.step)
                    if epoch == 1 and run.step == 29 and run.is_main:
                        while json.load(open(file))["epoch"] == 0:
                            time.sleep(0.01)
                        print(open(file).read(), flush=True)
                    if epoch == 2 and run.step == 34:
                        break
    """)
    done = paceline.succeeds("run", "-n", "2", "script.py")
    seen = json.loads(done.stdout)
    assert (seen["epoch"], seen["epochs"], seen["steps"]) == (1, 3, 15)
    assert 1 <= seen["step"] <= 14
    assert seen["samples_per_second"] > 0
    assert 0 <= seen["epoch_seconds_left"] <= seen["seconds_left"]
    newest = {"loss": 12.0}, {"loss": 19.5}
    assert seen["metrics"] in newest, "of the steps 10 … 14, or 15 … 24 once the other rank has sent those"
    last = json.loads((paceline.job() / "progress.json").read_text())
    assert (last["epoch"], last["step"], last["steps"]) == (2, 4, 15)
    assert not list(paceline.job().glob(".progress*"))
    assert "progress     epoch 3/3, step 4/15, " in paceline("get", paceline.job().name).stdout


@pytest.mark.parametrize("trouble", ["no folder", "NaN"])
def test_a_file_of_progress_is_never_in_the_way(tmp_path: Path, trouble: str) -> None:
    path = tmp_path / ("gone" if trouble == "no folder" else "here") / "progress.json"
    (tmp_path / "here").mkdir()
    progress = Progress(screen=False, file=path)
    for epoch in range(2):
        progress.begin(epoch, None, None, 0)
        progress.measured({"loss": math.nan})
        progress.step_done(4)
        progress.end()
    progress.close()
    if trouble == "NaN":
        told = json.loads(path.read_text())
        assert (told["metrics"], told["epochs"], told["steps"], told["seconds_left"]) == (
            {"loss": None},
            None,
            None,
            None,
        )
        assert (told["epoch"], told["step"], told["epoch_seconds_left"]) == (1, 1, 0)


def test_a_file_of_progress_is_written_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[object] = []
    monkeypatch.setattr("paceline.train.metrics.progress._File.every", 3600.0)
    monkeypatch.setattr("paceline.train.metrics.progress._File._write", lambda self: written.append(self._latest))
    progress = Progress(screen=False, file=tmp_path / "progress.json")
    progress.begin(0, 1, 1000, 0)
    for _ in range(1000):
        progress.step_done(1)
    assert not written
    progress.leave()
    progress.leave()
    eventually(lambda: len(written) == 1, "it is written once")


@given(st.integers(0, 5), st.none() | st.integers(1, 6), st.none() | st.integers(0, 9), st.lists(st.integers(0, 9)))
def test_how_far_it_is_makes_sense(epoch: int, epochs: int | None, done: int | None, samples: list[int]) -> None:
    shown: list[Moment] = []
    progress = Progress(screen=False, file=Path("/nowhere"))
    view = progress._file
    assert view is not None
    view.every, view.show = 0.0, shown.append  # type: ignore[method-assign]
    steps = None if done is None else done + len(samples)
    progress.begin(epoch, None if epochs is None else epoch + epochs, steps, done or 0)
    for number in samples:
        progress.step_done(number)
    progress.end()
    assert len(shown) == len(samples) + (1 if samples else 0)
    for number, moment in enumerate(shown[:-1], 1):
        assert moment.done == (done or 0) + number
        assert (moment.epoch_seconds_left is None) == (steps is None)
        assert moment.rate >= 0
        assert moment.took is None
    if shown:
        last = shown[-1]
        assert last.epoch_seconds_left == 0
        assert (last.seconds_left is None) == (epochs is None)
        assert last.took is not None


# -- without what is not needed ----------------------------------------------------------------------------------------


def test_neither_tqdm_nor_tensorboard_is_needed(paceline: Paceline) -> None:
    script(paceline, [(None, True)], "sys.modules.update(tqdm=None, tensorboard=None)")
    seen = on_terminal(paceline)
    assert "epoch 2/2 step 15/15 loss 0.52" in seen
    assert seen.count("no event files for TensorBoard: ") == 1
    assert not (paceline.job() / "tensorboard").exists()
    assert [line["step"] for line in read(paceline.job() / "metrics.jsonl")] == [10, 15, 25, 30]


def test_a_full_disk_does_not_end_the_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    log_batches(str(tmp_path), 8)
    assert caplog.text.count("metrics.jsonl is no longer written: ") == 1


def test_a_script_that_does_not_close_the_run_ends_well(paceline: Paceline) -> None:
    paceline.script("""
        import torch, paceline
        run = paceline.init(log_every=10, checkpoint_every=7)
        model = torch.nn.Linear(1, 1)
        model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), 0.1))
        for epoch in run.epochs(2):
            for (batch,) in run.dataloader(torch.utils.data.TensorDataset(torch.arange(48.0)), global_batch_size=4):
                run.backward(model(batch[:, None]).mean())
                optimizer.step()
                run.log(loss=1)
    """)
    for command in (("run", "-n", "2"), ("run", "-n", "1", "--start-method", "exec")):
        done = paceline(*command, "--log-dir", "jobs", "--name", command[-1], "script.py")
        assert done.returncode == 0
        assert "Traceback" not in done.stderr
        folder = paceline.folder / "jobs" / command[-1]
        assert [line["loss"] for line in read(folder / "metrics.jsonl")] == [1, 1, 1, 1]
        assert list((folder / "tensorboard").iterdir())
        assert (folder / "checkpoints" / "step-000024").exists()


def test_a_loop_may_end_after_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = paceline.init(log_dir=tmp_path)
    batches = iter(run.dataloader(numbers(4), batch_size=1))
    next(batches)
    run.log(loss=1.0)
    run.close()
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 100)
    batches.close()
    assert [line["loss"] for line in read(tmp_path / "metrics.jsonl")] == [1.0]


def test_a_loss_without_a_loop_is_known(paceline: Paceline) -> None:
    script = "import paceline\nrun = paceline.init()\nfor step in range(4):\n    run.log(loss=float(step + run.rank))\n"
    paceline.script(script, "own.py")
    paceline("run", "-n", "2", "--name", "own", "own.py")
    facts = json.loads(paceline("get", "-o", "json", "own").stdout)["facts"]
    assert facts["loss"] == {"name": "loss", "value": 2.0, "is_finite": True}
    assert facts["steps"]["last"] is None, "nothing has counted its steps"
    assert "progress" not in paceline("get", "own").stdout
