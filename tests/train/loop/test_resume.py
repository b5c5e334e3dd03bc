"""Trainings of many forms are killed and resumed: each step counts once, and all ends as if nothing had happened."""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import GENEROUS, eventually

torch = pytest.importorskip("torch")

from tests.train.launching import launch  # noqa: E402
from tests.train.scripts import run as run_script  # noqa: E402
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset  # noqa: E402 - after torch is known to be there

import paceline  # noqa: E402
from paceline.contract.functions import RankFailed  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.conftest import Paceline

pytestmark = pytest.mark.torch
torch.optim.SGD([torch.zeros(1)])  # imports what would take each process a second or two


class Training:
    """A training in processes of its own, of which some kill themselves at a place that they name."""

    def __init__(self, folder: Path, train: Callable[..., Any], *args: Any) -> None:
        self.folder, self.train, self.args = folder, train, args

    def _run(self, name: str, ranks: int, kill_at: str) -> list[Any]:
        args = (str(self.folder / name), kill_at, *self.args)
        return list(launch(self.train, args, ranks))

    def whole(self, ranks: int = 1) -> list[Any]:
        """What it gives when nothing happens."""
        return self._run("whole", ranks, "")

    def killed(self, *places: str, ranks: int = 1) -> None:
        for place in places:
            with pytest.raises((RankFailed, paceline.PeerLost)):
                self._run("killed", ranks, place)

    def resumed(self, ranks: int = 1) -> list[Any]:
        return self._run("killed", ranks, "")

    def check(self, *places: str, ranks: int = 1) -> None:
        """It gives the same, to the bit, when it is killed at these places, one after the other."""
        self.killed(*places, ranks=ranks)
        assert self.resumed(ranks) == self.whole(ranks)


def die(run: paceline.Run, kill_at: str, place: str) -> None:
    """Kill this process, once the checkpoint under way is committed, or ask it to stop."""
    if place == kill_at:
        store = run._steps._checkpoints._store
        assert store is not None
        store.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    elif kill_at == f"stop {place}":
        os.kill(os.getpid(), signal.SIGTERM)
        watch = run._steps._watch
        assert watch is not None
        eventually(lambda: watch.stop_signal, "the ranks have agreed where to stop")  # few steps are left


def build(run: paceline.Run, features: int = 1) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(features, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    result: tuple[torch.nn.Module, torch.optim.Optimizer] = run.setup(model, torch.optim.Adam(model.parameters(), 0.05))
    return result


def step(run: paceline.Run, model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: Any) -> float:
    optimizer.zero_grad()
    loss = (model(x) - 1).pow(2).mean()
    run.backward(loss)
    optimizer.step()
    return float(loss.detach())


def weights(model: torch.nn.Module) -> list[float]:
    return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


# -- several loops over epochs -----------------------------------------------------------------------------------------


def folds(folder: str, kill_at: str) -> Any:
    with paceline.init(seed=1, checkpoint_dir=folder, checkpoint_every=2, keep=2, progress=False) as run:
        state = run.state(used=[], scores={}, turns=[])
        for fold in range(3):
            picked = torch.randperm(20)[:16].float()[:, None]  # drawn between two loops
            model, optimizer = build(run)
            train = run.dataloader(TensorDataset(picked), global_batch_size=4, shuffle=True)
            for epoch in run.epochs(2):
                for (x,) in train:
                    die(run, kill_at, f"{fold} {epoch} {run.step}")
                    state.used.append((fold, epoch, run.step, x.flatten().tolist()))
                    step(run, model, optimizer, x)
                state.turns.append((fold, epoch))
            state.scores[fold] = weights(model)
            die(run, kill_at, f"behind {fold}")
        return run.step, state.used, state.turns, state.scores


def test_each_loop_over_epochs_is_its_own(tmp_path: Path) -> None:
    training = Training(tmp_path, folds)
    training.killed("0 1 5", "1 0 11", "behind 1", "2 1 21")
    done, used, turns, scores = training.resumed()[0]
    assert (done, used, turns, scores) == training.whole()[0]
    assert done == len(used) == 24
    assert turns == [(fold, epoch) for fold in range(3) for epoch in range(2)]
    again = training.resumed()[0]
    assert again[0] == 24, "nothing is trained again"


def nested(folder: str) -> None:
    with paceline.init(checkpoint_dir=folder, progress=False) as run:
        for _ in run.epochs(2):
            for _ in run.epochs(2):
                pass


def test_loops_over_epochs_do_not_nest(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"run.epochs was called within an epoch of another run.epochs; use range"):
        nested(str(tmp_path))


# -- loops without run.dataloader --------------------------------------------------------------------------------------


class Halves(IterableDataset):  # type: ignore[type-arg]
    """A stream without a length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(10.0)[:, None] / 2


def own_loops(folder: str, kill_at: str, form: str) -> Any:
    with paceline.init(seed=1, checkpoint_dir=folder, checkpoint_every=3, progress=False) as run:
        model, optimizer = build(run)
        state = run.state(used=[], hidden=None)
        text = torch.arange(20.0).reshape(10, 2, 1)
        shuffled = DataLoader(TensorDataset(torch.arange(20.0)[:, None]), batch_size=2, shuffle=True)
        forms: dict[str, Callable[[], Any]] = {
            "text": lambda: text,
            "loader": lambda: shuffled,
            "stream": lambda: DataLoader(Halves(), batch_size=2),
            "generator": lambda: (torch.tensor([[float(n)]]) for n in range(10)),
            "feed": lambda: train,
            "part of a feed": lambda: itertools.islice(train, 6),
            "pieces of a feed": lambda: (piece for (x,) in train for piece in x.split(1)),
        }
        if "feed" in form:
            size = 1 if form == "part of a feed" else 2
            data = TensorDataset(torch.arange(20.0 if form == "feed" else 10.0)[:, None])
            train = run.dataloader(data, global_batch_size=size, shuffle=True)
        for epoch in run.epochs(3):
            for item in run.steps(forms[form]()):
                x = item[0] if isinstance(item, list) else item
                die(run, kill_at, f"{run.step}")
                hidden = x.mean() if state.hidden is None else 0.5 * state.hidden + x.mean()
                step(run, model, optimizer, x + 0.01 * hidden)
                state.hidden = hidden.detach()
                state.used.append((epoch, run.step, x.flatten().tolist()))
            state.used.append(("behind", epoch, run.step))
            state.hidden = None
        return run.step, state.used, weights(model)


@pytest.mark.parametrize(
    "form", ["text", "loader", "stream", "generator", "feed", "part of a feed", "pieces of a feed"]
)
def test_steps_over_anything_are_whole(form: str, tmp_path: Path) -> None:
    training = Training(tmp_path, own_loops, form)
    steps = {"stream": 15, "part of a feed": 6 + 4 + 6}.get(form, 30)  # a part is followed by the rest of the epoch
    training.check("4", "8", f"{steps - 1}")
    done, used, _ = training.resumed()[0]
    assert done == steps
    assert [entry[1] for entry in used if entry[0] != "behind"] == list(range(1, steps + 1))


def own_share(folder: str, form: str, stop: int) -> list[int]:
    with paceline.init(seed=1, checkpoint_dir=folder, checkpoint_every=2, progress=False) as run:
        model, optimizer = build(run)
        data: Any = torch.arange(8.0)[:, None]
        sampler = DistributedSampler(data, run.world_size, run.rank, shuffle=False)
        items = DataLoader(data, sampler=sampler) if form == "loader" else data
        used = []
        for _ in run.epochs(2):
            for x in run.steps(items):
                step(run, model, optimizer, x.reshape(1, 1))
                used.append(int(x))
                if run.step == stop:
                    break
            if run.step >= stop:
                break
        return used


@pytest.mark.parametrize("form", ["loader", "tensor"])
def test_steps_over_no_sequence_begin_again_with_another_number_of_ranks(
    form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, everything = str(tmp_path), list(range(8))
    launched = launch(own_share, (folder, form, 3), 2)
    assert launched == ([[0, 2, 4], [1, 3, 5]] if form == "loader" else [[0, 1, 2]] * 2)
    assert own_share(folder, form, 11) == (everything if form == "loader" else everything[3:] + everything[:3])
    told = [record.message for record in caplog.records if record.message.startswith("run.steps begins with its first")]
    assert len(told) == (form == "loader")


def drawn(folder: str, pipeline: int, stop: int) -> list[tuple[int, float]]:
    with paceline.init(seed=1, checkpoint_dir=folder, checkpoint_every=1, progress=False) as run:
        model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
        _, optimizer = run.setup(
            model, torch.optim.SGD(model.parameters(), 0.1), strategy=paceline.Strategy(pipeline=pipeline)
        )
        seen = []
        for _ in run.epochs(1):
            for number in run.steps(iter(range(4))):
                seen.append((number, float(torch.rand(()))))
                run.pipeline_step((torch.full((2, 1), float(number)), None), lambda result, _: result.mean())
                optimizer.step()
                if run.step == stop:
                    break
            if run.step >= stop:
                break
        return seen


def test_as_many_ranks_that_share_data_now_have_the_same_random_numbers_and_all_items(tmp_path: Path) -> None:
    apart = launch(drawn, (str(tmp_path), 1, 2), 2)
    assert apart[0] != apart[1]
    first, second = launch(drawn, (str(tmp_path), 2, 9), 2)
    assert first == second
    assert [number for number, _ in first] == [0, 1, 2, 3]


def outermost(folder: str, kill_at: str) -> Any:
    with paceline.init(seed=1, checkpoint_dir=folder, checkpoint_every=2, progress=False) as run:
        model, optimizer = build(run)
        used = run.state(episodes=[])
        for episode in run.steps(range(7)):
            die(run, kill_at, f"{run.step}")
            step(run, model, optimizer, torch.rand(2, 1))
            used.episodes.append(episode)
        for number in run.steps([7, 8]):
            die(run, kill_at, f"{run.step}")
            step(run, model, optimizer, torch.rand(2, 1))
            used.episodes.append(number)
        return run.step, used.episodes, weights(model)


def test_steps_without_epochs_resume_by_themselves(tmp_path: Path) -> None:
    training = Training(tmp_path, outermost)
    training.check("3", "stop 5", "stop 7", "8", ranks=2)
    assert [result[:2] for result in training.resumed(2)] == [(9, list(range(9)))] * 2


def outermost_feed(folder: str, kill_at: str) -> Any:
    with paceline.init(seed=1, checkpoint_dir=folder, checkpoint_every=2, progress=False) as run:
        model, optimizer = build(run)
        train = run.dataloader(TensorDataset(torch.arange(16.0)[:, None]), global_batch_size=4, shuffle=True)
        used = run.state(samples=[])
        for _ in range(2):
            for (x,) in run.steps(train):
                die(run, kill_at, f"{run.step}")
                step(run, model, optimizer, x)
                used.samples.append(x.flatten().tolist())
        return run.step, used.samples, weights(model)


def test_steps_over_a_training_loader_without_epochs_leave_out_whole_passes(tmp_path: Path) -> None:
    training = Training(tmp_path, outermost_feed)
    training.check("2", "stop 5", "7", ranks=2)
    assert training.resumed(2)[0][0] == 8


def by_hand(folder: str, kill_at: str, every: int | None) -> Any:
    with paceline.init(seed=1, checkpoint_dir=folder, checkpoint_every=every, progress=False) as run:
        model, optimizer = build(run)
        critic, critics = build(run)
        state = run.state(used=[])
        for epoch in run.epochs(4):
            for piece in range(3):
                step(run, critic, critics, torch.rand(2, 1))
                step(run, model, optimizer, torch.rand(2, 1))
                state.used.append((epoch, piece, run.step))
                die(run, kill_at, f"{epoch} {piece}")
            if every is None:
                run.save()
            state.used.append(epoch)
        return run.step, state.used, weights(model)


@pytest.mark.parametrize("every", [2, None])
def test_loops_of_another_form_are_saved_between_epochs(
    every: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(tmp_path, by_hand, every)
    training.check("0 2", "2 1", "3 2")
    with caplog.at_level(logging.WARNING, "paceline"):
        done, used, _ = by_hand(str(tmp_path / "here"), "", every)
    assert done == 12, "one optimizer counts"
    assert used[:4] == [(0, 0, 1), (0, 1, 2), (0, 2, 3), 0]
    warnings = [record.message for record in caplog.records if "neither from run.dataloader nor" in record.message]
    assert len(warnings) == 1


def test_checkpoints_that_cannot_be_taken_or_used_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with paceline.init(checkpoint_dir=tmp_path / "hand", checkpoint_every=2, progress=False) as run:
        model, optimizer = build(run)
        for _ in range(4):
            step(run, model, optimizer, torch.ones(2, 1))
        assert run.step == 4
    with paceline.init(checkpoint_dir=tmp_path / "loader", checkpoint_every=2, progress=False) as run:
        model, optimizer = build(run)
        for (x,) in run.dataloader(TensorDataset(torch.ones(4, 1)), batch_size=2):
            step(run, model, optimizer, x)
    with paceline.init(checkpoint_dir=tmp_path / "inner", checkpoint_every=2, progress=False) as run:
        for _ in run.epochs(2):
            for _ in run.dataloader(TensorDataset(torch.ones(4, 1)), batch_size=2):
                pass
    told = [record.message for record in caplog.records]
    assert [text.partition(";")[0] for text in told] == [
        "checkpoint_every: no checkpoints are taken in a loop of this form",
        "checkpoint_every: checkpoints are taken, but nothing here resumes from them",
        "a run.dataloader made within an epoch begins with the order of the first one each time, and the epoch cannot "
        "be resumed in its middle",
    ]
    with paceline.init(progress=False) as run:
        for _ in run.steps([1]):
            with pytest.raises(RuntimeError, match="within another loop whose steps are counted"):
                next(iter(run.steps([1])))


# -- where checkpoints fall --------------------------------------------------------------------------------------------


def accumulated(folder: str, kill_at: str, own_backward: bool) -> Any:
    with paceline.init(seed=1, checkpoint_dir=folder, checkpoint_every=2, progress=False) as run:
        model, optimizer = build(run)
        train = run.dataloader(TensorDataset(torch.arange(18.0)[:, None]), global_batch_size=2, shuffle=True)
        for _ in run.epochs(3):
            for number, (x,) in enumerate(train, start=run.step % 9):
                die(run, kill_at, f"{run.step}")
                loss = (model(x) - 1).pow(2).mean() / 3
                loss.backward() if own_backward else run.backward(loss)
                if number % 3 == 2:
                    optimizer.step()
                    optimizer.zero_grad()
        return run.step, weights(model)


@pytest.mark.parametrize("own_backward", [False, True])
def test_gradients_accumulated_by_hand_are_used_before_a_checkpoint(own_backward: bool, tmp_path: Path) -> None:
    Training(tmp_path, accumulated, own_backward).check("5", "8", "14", "19")
    names = sorted(path.name for path in (tmp_path / "whole").glob("step-*"))
    assert names == ["step-000021", "step-000024", "step-000027"]


def means(folder: str, kill_at: str, when: str) -> Any:
    every = {"automatic": 4, "stream": 4}.get(when)
    with paceline.init(seed=1, checkpoint_dir=folder, checkpoint_every=every, progress=False) as run:
        model, optimizer = build(run)
        data: Any = TensorDataset(torch.arange(16.0)[:, None])
        if when == "stream":
            data = Stream()
        train = run.dataloader(data, global_batch_size=4)
        losses = []
        for epoch in run.epochs(4):
            loss_sum, batches = 0.0, 0
            for x in train:
                loss_sum += step(run, model, optimizer, x if when == "stream" else x[0])
                batches += 1
                if when == "save" and run.step % 4 == 0:
                    run.save()
            die(run, kill_at, f"{epoch}")
            losses.append(loss_sum / batches)  # not of no batches, ever
            if when == "behind":
                run.save()
            die(run, kill_at, f"end of {epoch}")
        return run.step, weights(model)


class Stream(IterableDataset):  # type: ignore[type-arg]
    """A stream that does not tell its length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(16.0)[:, None]


@pytest.mark.parametrize("when", ["automatic", "stream", "save", "behind"])
def test_a_checkpoint_in_an_epochs_last_step_is_taken_behind_its_body(when: str, tmp_path: Path) -> None:
    Training(tmp_path, means, when).check("1", "end of 2", "3")


# -- the script's own values -------------------------------------------------------------------------------------------


def summed(folder: str, kill_at: str) -> Any:
    with paceline.init(seed=1, checkpoint_dir=folder, checkpoint_every=3, progress=False) as run:
        model, optimizer = build(run)
        sums = run.state(loss_sum=0.0, samples=torch.zeros(1), reshard="sum")
        state = run.state(best=float("inf"), history=[])
        train = run.dataloader(TensorDataset(torch.arange(17.0)[:, None]), global_batch_size=4, shuffle=True)
        for _ in run.epochs(3):
            for (x,) in train:
                if run.rank == 0:
                    die(run, kill_at, f"{run.step}")
                step(run, model, optimizer, x)
                sums.loss_sum += float(x[: train.samples].sum())
                sums.samples += train.samples
            mean = run.mean(sums.loss_sum, int(sums.samples))
            state.best = min(state.best, mean)
            state.history.append((mean, run.mean(sums.samples.item(), 1) * run.world_size))
            sums.loss_sum, sums.samples = 0.0, torch.zeros(1)
        return state.history, state.best


def test_sums_over_an_epoch_are_whole_with_any_number_of_ranks(tmp_path: Path) -> None:
    training = Training(tmp_path, summed)
    training.killed("4", "8", ranks=2)
    training.killed("11", ranks=3)
    history, best = training.resumed()[0]
    assert history == [(8.0, 17.0)] * 3
    assert best == 8.0


def test_values_of_a_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with paceline.init(checkpoint_dir=tmp_path, progress=False) as run:
        state, other = run.state(best=0.5, gone=1), run.state(best="other")
        state.best = 0.25
        with pytest.raises(AttributeError, match=r"bets is not a value of this run.state; name it there"):
            state.bets = 1
        with pytest.raises(AttributeError, match="cannot be deleted"):
            del state.best
        with pytest.raises(ValueError, match="must not begin with an underscore"):
            run.state(_best=1)
        with pytest.raises(
            TypeError, match=r"best is of type float, .* state = run.state\(best=0.5\), then state.best"
        ):
            run.register(best=0.5)
        with pytest.raises(ValueError, match="reshard='mean' is neither a function nor 'sum'"):
            run.state(a=1, reshard="mean")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="pass per_rank=True as well"):
            run.register(model=torch.nn.Linear(1, 1), reshard=lambda states, *_: states[0])
        run.save(block=True)
    with paceline.init(checkpoint_dir=tmp_path, progress=False) as run:
        state, other = run.state(best=0.0, new=3), run.state(best="")
        assert run.resume()
        assert (state.best, state.new, other.best) == (0.25, 3, "other")
        assert repr(state) == "State(best=0.25, new=3)"
    assert [record.message for record in caplog.records] == [
        "run.state: new is not in the checkpoint, and keeps its first value",
        "run.state: gone is only in the checkpoint, and is not set",
    ]


# -- what each rank has of its own -------------------------------------------------------------------------------------


class Buffer:
    """A replay buffer."""

    def __init__(self, items: list[int]) -> None:
        self.items = items

    def state_dict(self) -> dict[str, Any]:
        return {"items": self.items}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.items = state["items"]


def dealt(states: list[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
    return {"items": [item for state in states for item in state["items"]][rank::world_size]}


def buffers(folder: str, how: str, save: bool) -> Any:
    with paceline.init(checkpoint_dir=folder, progress=False) as run:
        buffer = Buffer([run.rank, 10 + run.rank] if save else [])
        run.register(buffer=buffer, per_rank=True, reshard=dealt if how == "reshard" else None)
        join = (lambda values, *_: {"hidden": [v["hidden"] for v in values]}) if how == "reshard" else None
        state = run.state(hidden=[float(run.rank)] if save else None, reshard=join)
        if save:
            run.save(block=True)
        elif not run.resume():
            return None
        return buffer.items, state.hidden


def test_each_rank_gets_what_it_had(tmp_path: Path) -> None:
    folder = str(tmp_path)
    launch(buffers, (folder, "", True), 2)
    assert launch(buffers, (folder, "", False), 2) == [([0, 10], [0.0]), ([1, 11], [1.0])]
    hidden = [[0.0], [1.0]]
    resharded = launch(buffers, (folder, "reshard", False), 3)
    assert resharded == [([0, 11], hidden), ([10], hidden), ([1], hidden)]
    with pytest.raises(RuntimeError, match=r"buffer was registered with per_rank=True and saved by 2 ranks, and now "):
        buffers(folder, "", False)


def stateful_alone(folder: str) -> None:
    with paceline.init(checkpoint_dir=folder, progress=False) as run:
        run.state(hidden=None)
        run.resume()


def test_values_that_differ_and_are_no_sums(tmp_path: Path) -> None:
    launch(lists, (str(tmp_path),), 2)
    with pytest.raises(
        RuntimeError, match=r"hidden differs between the 2 ranks that saved it, .* pass reshard=.sum. to"
    ):
        stateful_alone(str(tmp_path))


def lists(folder: str) -> None:
    with paceline.init(checkpoint_dir=folder, progress=False) as run:
        run.state(hidden=[run.rank])
        run.save(block=True)


# -- what is logged behind a loop --------------------------------------------------------------------------------------


def test_what_is_logged_behind_the_loop_belongs_to_its_epoch_and_is_never_lost(paceline: Paceline) -> None:
    paceline.script("""
        import sys, torch, paceline
        run = paceline.init(log_dir=sys.argv[1], progress=False)
        model = torch.nn.Linear(1, 1)
        model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), 0.1))
        train = run.dataloader(torch.utils.data.TensorDataset(torch.arange(12.0)[:, None]), global_batch_size=4)
        for epoch in run.epochs(2):
            for (x,) in train:
                run.backward(model(x).mean())
                optimizer.step()
                run.log(loss=1.0)
            run.log(accuracy=epoch + 0.5)
        run.log(test=0.25)
    """)
    alone = run_script(paceline, "script.py", "alone", timeout=GENEROUS)
    for name, done in (("alone", alone), ("two", paceline.run("-n", "2", "script.py", "two"))):
        assert done.returncode == 0, done.stderr
        text = (paceline.folder / name / "metrics.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        values = [
            (line["epoch"], line["step"], {key: line[key] for key in ("loss", "accuracy", "test") if key in line})
            for line in lines
        ]
        assert values == [
            (0, 3, {"loss": 1.0}), (0, 3, {"accuracy": 0.5}),
            (1, 6, {"loss": 1.0}), (1, 6, {"accuracy": 1.5}), (1, 6, {"test": 0.25}),
        ], done.stderr  # fmt: skip
    eventually(lambda: not paceline.processes(), "all have ended")
