"""Random programs of passes over loaders: what a training script may do between `init` and its end."""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st

import paceline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

SIZES = ((5, 2), (3, 2))  # samples and global batch size of each loader


@dataclass(frozen=True)
class Pass:
    """One loop.

    Attributes:
        over: "a", "b", "zip" or "nest" of both, "steps" or "items" of `run.steps`.
        trains: numbers of the batches that are trained on.
        leaves: number of the batch at whose beginning, or end, it is left: ("break" or "raise", number, is_end).
        saves: number of the batch in which `run.save` is called.
        late: only gradients are computed, and one step follows the loop.
    """

    over: str
    trains: frozenset[int] = frozenset()
    leaves: tuple[str, int, bool] | None = None
    saves: int | None = None
    late: bool = False


Action = Pass | str  # or "save", "block", "draw"


@dataclass(frozen=True)
class Program:
    """A script: passes before `run.epochs`, and loops over epochs with their bodies and what follows each."""

    before: tuple[Action, ...]
    loops: tuple[tuple[int, tuple[tuple[int, Action], ...], tuple[Action, ...]], ...]
    every: int | None
    own_backward: bool


class Killed(BaseException):
    """As SIGKILL: nothing of the run is ended."""


class Execution:
    """One start of a program.

    Args:
        program: what to run.
        folder: for its checkpoints.
        reached: called at each point where it may be killed.
    """

    def __init__(self, program: Program, folder: Path, reached: Callable[[paceline.Run], Any] = lambda _: None) -> None:
        self.program, self.folder, self.reached = program, folder, reached

    def run(self) -> tuple[Any, ...]:
        """The steps, what each trained on, the numbers drawn between passes, and the weights."""
        random.seed(1)
        torch.default_generator.manual_seed(1)  # `torch.manual_seed` takes 10 ms
        with paceline.init(
            checkpoint_dir=self.folder, checkpoint_every=self.program.every, progress=False, stop_signals=False
        ) as run:
            self._run = run
            self.model, self.optimizer = run.setup(model := torch.nn.Linear(1, 1), _sgd(model))
            self.state = run.state(used=[], draws=0)
            self.loaders = [
                run.dataloader(_Numbers(size), global_batch_size=batch, shuffle=True) for size, batch in SIZES
            ]
            self.seen = 0.0
            for action in self.program.before:
                self._act(("before",), action)
            for loop, (epochs, body, behind) in enumerate(self.program.loops):
                for epoch in run.epochs(epochs):
                    self.seen = 0.0
                    for number, (when, action) in enumerate(body):
                        if when in (2, epoch % 2):
                            self._act((loop, epoch, number), action)
                self.seen = 0.0
                for number, action in enumerate(behind):
                    self._act((loop, "behind", number), action)
            return run.step, tuple(self.state.used), self.state.draws, *(p.item() for p in self.model.parameters())

    def _act(self, where: tuple[Any, ...], action: Action) -> None:
        self.reached(self._run)
        if action == "draw":
            self.seen += float(torch.rand(1))
            self.state.draws += 1
        elif isinstance(action, str):
            self._run.save(block=action == "block")
        else:
            with contextlib.suppress(KeyError):
                self._loop(where, action)
            if action.late:
                self.optimizer.step()
                self.optimizer.zero_grad()
        self.reached(self._run)

    def _batches(self, over: str) -> Iterable[tuple[int, Any]]:
        """Batches of a pass and their numbers in it, whether or not it goes on in the middle."""
        one, other = self.loaders
        if over == "zip":
            for pair in zip(one, other, strict=False):
                yield one.batch_index, torch.cat(pair)
        elif over == "nest":
            for x in one:
                for y in other:
                    yield one.batch_index, torch.cat([x, y])
        elif over in ("a", "b"):
            loader = self.loaders["ab".index(over)]
            for x in loader:
                yield loader.batch_index, x
        else:
            for n in self._run.steps(range(3) if over == "steps" else (n for n in range(2))):
                yield n, torch.tensor([n])

    def _loop(self, where: tuple[Any, ...], one: Pass) -> None:
        run = self._run
        for number, x in self._batches(one.over):
            self.reached(run)
            kind, at, is_end = one.leaves or ("", -1, False)
            if (number, is_end) == (at, False):
                if kind == "break":
                    break
                raise KeyError
            if number in one.trains:
                self._train(x, steps=not one.late)
                self.state.used = [*self.state.used, (*where, *x.tolist())]
            else:
                noise = float(torch.rand(1))
                if not one.trains:  # a resumed pass does not repeat its batches, so no variable of the script may tell
                    self.seen = self.seen / 2 + float(x.sum()) + noise
            # What follows `run.save` in a step is not repeated, so a step that saves and then leaves might not leave.
            # Nor does a look by `run.steps` before `run.epochs` begin again with the random numbers it had.
            is_known = (number, True) != (at, is_end) and (where[0] != "before" or one.over not in {"steps", "items"})
            # A batch without a step comes again, with the random numbers of the moment of the checkpoint.
            is_known = is_known and (number in one.trains or not one.trains)
            if number == one.saves and not one.late and is_known:
                run.save(block=number % 2 == 0 and one.over != "nest")
            self.reached(run)
            if (number, is_end) == (at, True):
                if kind == "break":
                    break
                raise KeyError

    def _train(self, x: torch.Tensor, *, steps: bool) -> None:
        noise = torch.rand(1)
        if self.program.own_backward or not steps:
            loss = (self.model(x[:, None].float() + noise) - self.seen).pow(2).mean()
            self._run.backward(loss, weight=float(len(x)))  # the batches of several loaders need not be divided alike
        else:
            for p in self.model.parameters():
                p.grad = (p.detach() + x.float().mean() + noise - self.seen).reshape(p.shape)
        if steps:
            self.optimizer.step()
            self.optimizer.zero_grad()


class _Numbers(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Sample i is i."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> float:
        return float(index)


def _sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.01, momentum=0.5, foreach=False)


def _passes() -> st.SearchStrategy[Pass]:
    everything = frozenset(range(9))
    return st.builds(
        Pass,
        st.sampled_from(["a", "a", "a", "b", "zip", "nest", "steps", "items"]),
        st.one_of(st.just(everything), st.just(frozenset()), st.frozensets(st.integers(0, 3))),
        st.none() | st.tuples(st.sampled_from(["break", "raise"]), st.integers(0, 2), st.booleans()),
        st.none() | st.integers(0, 2),
    )


def _actions() -> st.SearchStrategy[Action]:
    late = st.builds(Pass, st.just("a"), st.just(frozenset(range(9))), late=st.just(True))
    return st.one_of(_passes(), _passes(), _passes(), st.sampled_from(["save", "block", "draw"]), late)


def programs() -> st.SearchStrategy[Program]:
    body = st.lists(st.tuples(st.sampled_from([2, 2, 0, 1]), _actions()), min_size=1, max_size=3).map(tuple)
    behind = st.lists(_actions(), max_size=1).map(tuple)
    loop = st.tuples(st.integers(1, 2), body, behind)
    return st.builds(
        Program,
        st.lists(_actions(), max_size=1).map(tuple),
        st.lists(loop, min_size=1, max_size=2).map(tuple),
        st.sampled_from([1, 2, 3, 5, None]),
        st.booleans(),
    )
