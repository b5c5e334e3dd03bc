"""The position of a run in its loops over epochs: `Run.epochs` may be called several times, as for cross-validation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.train.data.random_state import random_states, set_random_states

if TYPE_CHECKING:
    from collections.abc import Mapping

Body = tuple[int, int]  # one epoch of one loop: the number of the loop and the epoch, both from 0


class EpochLoops:
    """Numbers the loops over epochs, and says which epoch of which loop is under way.

    Attributes:
        number: number of the loop entered last, from 0; -1 before the first one.
        epoch: its current epoch, from 0; the number of its epochs when it has ended.
        count: number of its epochs; None before the first loop.
        is_active: whether an epoch is under way.
    """

    def __init__(self, *, keep_random: bool) -> None:
        """Initialize before the first loop."""
        self.number = -1
        self.epoch = 0
        self.count: int | None = None
        self.is_active = False
        self._keep_random = keep_random
        self._ends: list[Any] = []  # random states at the end of each loop
        self._target: Body | None = None  # where a resumed run continues

    @property
    def body(self) -> Body | None:
        """The epoch that is under way; None outside of `Run.epochs`."""
        return (self.number, self.epoch) if self.is_active else None

    @property
    def is_resuming(self) -> bool:
        """Whether the loop in which a resumed run continues was not entered yet."""
        return self._target is not None

    def resume(self, body: Body) -> None:
        """Continue with this epoch: earlier loops are skipped."""
        self._target = body

    def enter(self, count: int) -> None:
        """Start a loop over `count` epochs."""
        if self.is_active:
            raise RuntimeError(
                "run.epochs was called within an epoch of another run.epochs; "
                "use range for the outer loop, with one run.epochs after the other in it"
            )
        self.number += 1
        self.epoch, self.count = 0, count

    def is_skipped(self) -> bool:
        """Whether a resumed run continues in a later loop than the one just entered."""
        return self._target is not None and self.number < self._target[0]

    def skip(self) -> None:
        """End the loop just entered, which was done before the resume; restore the random states from its end."""
        self.epoch = self.count or 0
        if self.number < len(self._ends) and self._ends[self.number] is not None:
            set_random_states(self._ends[self.number])

    def reach(self) -> None:
        """Go to the epoch in which a resumed run continues."""
        if self._target is not None:
            self.epoch, self._target = self._target[1], None

    def leave(self) -> None:
        """Note that the loop has ended, or was left."""
        self.is_active = False
        if self._keep_random:
            unknown = [None] * (self.number - len(self._ends))  # those of a start with another number of ranks
            self._ends = [*self._ends[: self.number], *unknown, random_states()]

    def state_dict(self) -> dict[str, Any]:
        """This rank's random states at the ends of the loops."""
        return {"ends": list(self._ends)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self._ends = list(state["ends"])
