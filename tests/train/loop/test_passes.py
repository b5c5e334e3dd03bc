"""Passes over loaders count by what they trained; random programs of them survive kills."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import logging
import os
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from tests.train.launching import launch  # noqa: E402
from tests.train.loop.passes_program import Execution, Killed, Program, programs  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

import paceline  # noqa: E402
from paceline.contract.functions import RankFailed  # noqa: E402
from paceline.train.checkpoint.store import Checkpoint  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tests.conftest import Paceline

pytestmark = pytest.mark.torch
PROGRAMS = int(os.environ.get("PACELINE_PASS_PROGRAMS", "200"))
PARTS = 4  # so that processes share them
KILLS = int(os.environ.get("PACELINE_PASS_KILLS", "2"))


# -- the four forms ----------------------------------------------------------------------------------------------------


class Dead(BaseException):
    """The process is killed here."""


def train(folder: Path, body: Callable[..., None], dies: int = -1, before: Callable[..., None] | None = None) -> Any:
    """Train for three epochs, of which `body` is the body; it may be killed before a step.

    Returns:
        The samples of each step, `run.step`, and the weights.
    """
    with paceline.init(seed=1, checkpoint_dir=folder, checkpoint_every=3, progress=False, stop_signals=False) as run:
        model = torch.nn.Linear(6, 1)
        model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), 0.01))
        data = torch.arange(24.0)[:, None].expand(24, 6) / 24
        loader = run.dataloader(TensorDataset(data), global_batch_size=8, shuffle=True)
        used = run.state(samples=[])

        def step(x: torch.Tensor) -> None:
            if run.step == dies:
                store = run._steps._checkpoints._store
                assert store is not None
                store.wait()
                raise Dead
            optimizer.zero_grad()
            run.backward((model(x) - 1).pow(2).mean())
            optimizer.step()
            used.samples = [*used.samples, (x[:, 0] * 24).round().int().tolist()]

        if before is not None:
            before(loader)
        for _ in run.epochs(3):
            body(loader, step)
        return used.samples, run.step, [p.tolist() for p in model.parameters()]


def once(loader: Any, step: Callable[[Any], None]) -> None:
    for (x,) in loader:
        step(x)


def twice(loader: Any, step: Callable[[Any], None]) -> None:
    once(loader, step)
    once(loader, step)


def evaluated(loader: Any, step: Callable[[Any], None]) -> None:
    once(loader, step)
    assert sorted(round(float(x[0]) * 24) for (batch,) in loader for x in batch) == list(range(24))


def look(loader: Any) -> None:
    assert sum(len(x) for (x,) in loader) == 24


def test_a_pass_before_the_epochs_leaves_the_first_one_whole(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", once)
    assert [sorted(itertools.chain(*plain[0][at : at + 3])) for at in (0, 3, 6)] == [list(range(24))] * 3
    assert train(tmp_path / "looked", once, before=look) == plain


@pytest.mark.parametrize("body", [twice, evaluated])
def test_a_second_pass_in_the_body_is_resumed_exactly(body: Callable[..., None], tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", body)
    assert whole[1] == len(whole[0]) == (18 if body is twice else 9)
    assert body is twice or whole == train(tmp_path / "once", once)
    for dies in range(whole[1]):
        with pytest.raises(Dead):
            train(tmp_path / f"{dies}", body, dies)
        assert train(tmp_path / f"{dies}", body) == whole


def test_two_stages_of_a_script_have_a_folder_each(paceline: Paceline) -> None:
    paceline.script("""
        import pathlib, sys, torch, paceline
        for stage in ("first", "second"):
            with paceline.init(seed=1, checkpoint_dir=stage, checkpoint_every=3, progress=False) as run:
                model = torch.nn.Linear(6, 1)
                model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), 0.01))
                data = torch.utils.data.TensorDataset(torch.ones(64, 6))
                loader = run.dataloader(data, global_batch_size=8)
                for _ in run.epochs(3):
                    for (x,) in loader:
                        if stage == "second" and run.step == 1 and run.attempt == 0:
                            raise SystemExit(3)  # before this stage has saved anything
                        run.backward(model(x).mean())
                        optimizer.step()
                print(stage, run.rank, run.step, flush=True)
    """)
    done = paceline.run("-n", "2", "--max-restarts", "1", "script.py")
    assert done.returncode == 0, done.stderr
    assert "second 0 24" in done.stdout


def test_a_second_stage_in_the_folder_of_the_first_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = train(tmp_path, once)
    with caplog.at_level(logging.WARNING, "paceline"):
        assert train(tmp_path, once) == first
    (message,) = [record.message for record in caplog.records]
    assert message.startswith(f"run.epochs goes on from {tmp_path}")
    assert message.endswith("pass a checkpoint_dir= of its own to paceline.init")


# -- iterators that are held -------------------------------------------------------------------------------------------


def held(loader: Any) -> Iterator[Any]:
    """An iterator that has given a batch, and goes on when it is asked for the next one."""
    batches = iter(loader)
    next(batches)
    return batches


def test_an_iterator_that_is_held_counts_as_a_look(tmp_path: Path) -> None:
    kept: list[Any] = []

    def around(loader: Any, step: Callable[[Any], None]) -> None:
        kept[:] = [held(loader)]
        for number, (x,) in enumerate(loader, loader.batch_index):
            kept.clear()
            assert loader.batch_index == number
            step(x)
        kept[:] = [held(loader)]

    plain = train(tmp_path / "plain", once)
    for name, body, before in (
        ("dropped", once, lambda loader: next(iter(loader))),
        ("held", once, lambda loader: kept.append(held(loader))),
        ("around", around, None),
    ):
        assert train(tmp_path / name, body, before=before) == plain, name
        if body is once:
            saved = [sorted(path.name for path in (tmp_path / each).glob("step-*")) for each in ("plain", name)]
            assert saved[0] == saved[1], name


def test_an_iterator_that_is_over_is_told(tmp_path: Path) -> None:
    def within(loader: Any, step: Callable[[Any], None]) -> None:
        for (x,) in loader:
            kept = held(loader)
            step(x)
            del kept

    with pytest.raises(RuntimeError, match="this iteration of a training loader is over, since"):
        train(tmp_path / "within", within)

    kept: list[Any] = []
    with pytest.raises(RuntimeError, match="iterate the loader again"):
        train(tmp_path / "before", lambda *_: next(kept[0]), before=lambda loader: kept.append(held(loader)))


def ahead(loader: Any, step: Callable[[Any], None]) -> None:
    batches = iter(loader)
    following = next(batches, None)
    while following is not None:
        (x,), following = following, next(batches, None)
        step(x)


def but_first(loader: Any, step: Callable[[Any], None]) -> None:
    for number, (x,) in enumerate(loader, loader.batch_index):
        if number:
            step(x)
    once(loader, step)


@pytest.mark.parametrize(("body", "times"), [(ahead, 1), (but_first, 0), (twice, 0)])
def test_batches_that_are_requested_ahead_are_told(
    body: Callable[..., None], times: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, body)
    assert caplog.text.count("something requests the batches of a training loader ahead of the loop") == times


@pytest.mark.parametrize("hold", ["none", "same", "other", "evaluation", "trained"])
def test_steps_are_counted_while_an_iterator_is_held(hold: str) -> None:
    with paceline.init(seed=1, progress=False) as run:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer = run.setup(model, optimizer, strategy=paceline.Strategy(accumulate=2))
        data = TensorDataset(torch.arange(8.0)[:, None])
        loader, other = (run.dataloader(data, global_batch_size=2) for _ in range(2))
        loaders = {"same": loader, "other": other, "evaluation": run.dataloader(data, 2, evaluation=True)}
        kept = held(loaders[hold]) if hold in loaders else iter(other)
        counted = []
        for epoch in run.epochs(2):
            for (x,) in itertools.islice(kept, 4) if (hold, epoch) == ("trained", 0) else loader:
                before = model.weight.item()
                run.backward(model(x).mean())
                optimizer.step()
                optimizer.zero_grad()
                counted.append(model.weight.item() != before)
        assert (run.step, counted) == (8, [False, True] * 4)
        del kept


def test_loops_over_two_loaders_are_counted_by_the_first() -> None:
    with paceline.init(seed=1, progress=False) as run:
        model, optimizer = run.setup(model := torch.nn.Linear(1, 1), torch.optim.SGD(model.parameters(), 0.1))
        data = TensorDataset(torch.arange(6.0)[:, None])
        one, other = run.dataloader(data, global_batch_size=2), run.dataloader(data, global_batch_size=3)
        kept, again = iter(one), iter(other)
        for epoch in run.epochs(4):  # iterators go on in the next epoch
            for _ in range(2):
                try:
                    (x,) = next(kept)
                except StopIteration:
                    (x,) = next(kept := iter(one))
                try:
                    (y,) = next(again)
                except StopIteration:
                    (y,) = next(again := iter(other))
                run.backward(model(torch.cat([x, y])).mean())
                optimizer.step()
            assert run.step == 2 * epoch + 2


# -- random programs ---------------------------------------------------------------------------------------------------


class InMemory:
    """A `CheckpointStore` for one rank that keeps the newest checkpoint in memory: a program takes twenty of them."""

    kept: dict[Path, Checkpoint] = {}  # noqa: RUF012 - it is the disk

    def __init__(self, folder: Path, *_: Any, required: bool) -> None:
        self.folder, self.lost, self.follows = folder, None, False

    def save(self, step: int, shared: Mapping[str, Any], own: Any, **_: Any) -> None:
        copied = {name: state if name == "progress" else copy.deepcopy(state) for name, state in shared.items()}
        self.kept[self.folder] = Checkpoint(self.folder, step, 1, copied, own)

    def begins_with_weights(self) -> bool:
        return False

    def load(self, _: Any) -> Checkpoint | None:
        found = self.kept.get(self.folder)
        return found and dataclasses.replace(found, shared_state=copy.deepcopy(found.shared_state))

    def read_again(self, found: Checkpoint, device: Any, *, whole: bool) -> Checkpoint:
        again = self.load(device)
        assert again is not None
        assert again.step == found.step, "nothing was saved before the run came to the place of the checkpoint"
        return again if whole else dataclasses.replace(again, shared_state={})

    def wait(self) -> None:
        """All is written."""

    close = disconnect = wait


@pytest.fixture(scope="module")
def memory() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.train.run.open_store", InMemory)
        logging.disable(logging.WARNING)  # programs do what a script is warned of
        yield
    logging.disable(logging.NOTSET)
    InMemory.kept.clear()


def undisturbed(program: Program, folder: Path) -> tuple[Any, int]:
    """How a program ends, and how many points it has at which it may be killed."""
    points = itertools.count()
    return Execution(program, folder / "whole", lambda _: next(points)).run(), next(points)


def check(program: Program, kills: list[int], folder: Path, expected: Any) -> None:
    """A program that is killed at these points, one in each start, ends as the undisturbed one."""
    for kill in (*kills, -1):
        # A start that has ended is not followed by another, which would go on in the pass that it left.
        with contextlib.suppress(Killed):
            assert Execution(program, folder / "killed", Killer(kill)).run() == expected
            return


class Killer:
    """Kills a program at one of its points, as far as that goes within a process."""

    def __init__(self, at: int) -> None:
        self.points, self.at = itertools.count(), at

    def __call__(self, _: paceline.Run) -> None:
        if next(self.points) == self.at:
            self.kill()

    def kill(self) -> None:
        raise Killed


class KillerOfRanks(Killer):
    """Kills the process."""

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.soak
@pytest.mark.usefixtures("memory")
def test_random_programs_of_passes_survive_kills(part: int) -> None:
    @seed(part)
    @settings(max_examples=PROGRAMS // PARTS, database=None)
    @given(programs(), st.lists(st.integers(0, 999), min_size=1, max_size=KILLS))
    def survives(program: Program, kills: list[int]) -> None:
        InMemory.kept.clear()
        expected, count = undisturbed(program, Path("/nowhere"))
        check(program, [kill % max(count, 1) for kill in kills], Path("/nowhere"), expected)

    survives()


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@settings(max_examples=500, phases=[Phase.generate])
@given(programs())
@pytest.mark.usefixtures("memory")
def test_random_programs_of_passes_survive_a_kill_at_every_point(program: Program) -> None:
    InMemory.kept.clear()
    expected, count = undisturbed(program, Path("/nowhere"))
    for kill in range(count):
        InMemory.kept.clear()
        check(program, [kill], Path("/nowhere"), expected)


# -- real kills --------------------------------------------------------------------------------------------------------


def execute(folder: str, program: Program, kill: int) -> Any:
    return Execution(program, Path(folder), KillerOfRanks(kill)).run()


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@settings(max_examples=200, phases=[Phase.generate])
@given(programs(), st.integers(0, 30))
def test_random_programs_of_passes_survive_real_kills_of_two_ranks(program: Program, kill: int) -> None:
    program = dataclasses.replace(program, own_backward=True)  # so that ranks exchange their gradients
    with tempfile.TemporaryDirectory() as folder:
        expected = launch(execute, (f"{folder}/whole", program, -1), 2)
        try:
            result = launch(execute, (f"{folder}/killed", program, kill), 2)
        except (RankFailed, paceline.PeerLost):
            result = launch(execute, (f"{folder}/killed", program, -1), 2)
        assert result == expected


def until(folder: Path, stop: int) -> tuple[list[list[float]], list[float]]:
    """Train until a number of steps, and leave both loops then; returns the samples of each step, and the weights."""
    with paceline.init(seed=1, checkpoint_dir=folder, checkpoint_every=2, progress=False) as run:
        model = torch.nn.Linear(1, 1)
        model, optimizer = run.setup(model, torch.optim.Adam(model.parameters(), 0.01))
        loader = run.dataloader(TensorDataset(torch.arange(21.0)[:, None]), global_batch_size=6, shuffle=True)
        used = []
        for _ in run.epochs(2):
            for (x,) in loader:
                run.backward(model(x).mean())
                optimizer.step()
                optimizer.zero_grad()
                used.append(x.flatten().tolist())
                if run.step == stop:
                    break
            if run.step == stop:
                break
        return used, [model.weight.item(), model.bias.item()]


@pytest.mark.parametrize("stop", [2, 3, 4, 7])
def test_a_run_that_leaves_both_loops_goes_on_in_the_middle_of_the_pass(stop: int, tmp_path: Path) -> None:
    used, weights = until(tmp_path / "whole", 0)
    first, _ = until(tmp_path / "left", stop)
    rest, again = until(tmp_path / "left", 0)
    assert (first + rest, again) == (used, weights)
