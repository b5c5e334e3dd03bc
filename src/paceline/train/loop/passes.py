"""Loops over items that are not from `Run.dataloader`, each of which is a step: `Run.steps`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from paceline.train.data.random_state import random_states, set_random_states


class Pass:
    """One pass over an iterable. To the run it looks like a loader whose batches have one sample on each rank.

    Attributes:
        done: items that the pass has yielded, including those of earlier attempts.
        samples: samples of this rank per step: 1.
        total: samples of all ranks per step: the number of ranks.
        weight: factor for a rank's mean loss: 1.
    """

    samples = 1
    weight = 1.0

    def __init__(self, items: Iterable[Any], world_size: int, taken: int, began: Mapping[str, Any] | None) -> None:
        """Initialize a pass that was not iterated yet.

        Args:
            items: the iterable.
            world_size: number of ranks; all take the same number of items.
            taken: number of items that were trained on before a resume, and are skipped.
            began: random states at the start of the pass that is resumed.
        """
        self.total = world_size
        self.done = taken
        self._items = items
        self._began = began
        self._size = _length(items)

    def __len__(self) -> int:
        if self._size is None:
            raise TypeError(f"{type(self._items).__name__} has no length")
        return self._size

    def __iter__(self) -> Iterator[Any]:
        for item in self._rest():
            self.done += 1
            yield item

    def _rest(self) -> Iterable[Any]:
        """The items that were not trained on yet."""
        if not self.done:
            return self._items
        if isinstance(self._items, (Sequence, torch.Tensor)):
            return (self._items[index] for index in range(self.done, len(self._items)))
        now = random_states()
        if self._began is not None:  # so that an order drawn at the start of the iteration is the same again
            set_random_states(self._began)
        items = iter(self._items)
        for _ in range(self.done):
            next(items, None)
        if self._began is not None:
            set_random_states(now)
        return items

    @property
    def remaining(self) -> int | None:
        """Samples of all ranks that come after this step; None if that is not known."""
        return None if self._size is None else max(0, self._size - self.done) * self.total

    @property
    def is_last(self) -> bool:
        """Whether this is the last item; False also if that is not known."""
        return self._size is not None and self.done >= self._size

    def put_back(self) -> None:
        """Take back the item yielded last, which was not trained on: a resumed run begins with it."""
        self.done -= 1


class Passes:
    """The passes of an epoch's body, numbered in their order: how many have ended, and the position in the last one.

    Attributes:
        ended: number of passes that have reached their end, or were left.
        current: the pass that is under way.
    """

    def __init__(self) -> None:
        self.ended = 0
        self.current: Pass | None = None
        self._began: Any = None  # random states at its start
        self._resumed: tuple[int, int] | None = (
            None  # from the checkpoint: passes that had ended, and items taken of the next one
        )

    def begin(self, items: Iterable[Any], world_size: int, *, keep_random: bool) -> Pass | None:
        """Return the next pass; None if it had ended before the resume."""
        taken, began = 0, None
        if self._resumed is not None:
            if self.ended < self._resumed[0]:
                self.ended += 1
                return None
            taken, began = self._resumed[1], self._began
            self._resumed = None
        if began is None:
            began = random_states() if keep_random else None
        self._began = began
        self.current = Pass(items, world_size, taken, began)
        return self.current

    def end(self) -> None:
        """End the pass under way."""
        self.ended += 1
        self.current = self._began = None

    def restart(self) -> None:
        """Start another epoch's body."""
        self.ended, self.current, self._began, self._resumed = 0, None, None, None

    def position(self, *, before: bool) -> tuple[int, int]:
        """Number of passes that have ended, and of items taken of the next one.

        Args:
            before: do not count the current item.
        """
        if self._resumed is not None:
            return self._resumed
        return self.ended, self.current.done - before if self.current is not None else 0

    def resume(self, position: Sequence[int]) -> None:
        """Continue from a position."""
        self.restart()
        self._resumed = (position[0], position[1]) if tuple(position) != (0, 0) else None

    def state_dict(self) -> dict[str, Any]:
        """This rank's random states at the start of the pass under way."""
        return {"began": self._began}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self._began = state["began"]


def _length(items: Any) -> int | None:
    try:
        return len(items)
    except TypeError:  # torch's DataLoader has a length or not, as its data set has
        return None
