"""The position of a run: its passes and its loops over epochs.

The passes of an epoch's body: each is one iteration over a training loader, or one `Run.steps`.

A pass trains if a step follows one of its batches; else it is a look, which leaves the loaders where they were. A
resumed run leaves out the passes that have trained, and does the looks again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from paceline.train.data.random_state import random_states, set_random_states

if TYPE_CHECKING:
    from paceline.train.data.loader import Loader
    from paceline.train.data.random_state import RandomStates
    from paceline.train.data.sampler import Mark
    from paceline.train.torch_types import StateDict

Body = tuple[int, int]  # one epoch of one loop: the number of the loop and the epoch, both from 0
Start = tuple["Loader", "Mark"]  # a training loader, and where it was at the start of a pass


class Pass:
    """One pass over an iterable. To the run it looks like a loader whose batches have one sample on each rank."""

    samples = 1  # of this rank per step
    weight = 1.0  # factor for a rank's mean loss

    def __init__(self, items: Iterable[Any], world_size: int) -> None:
        self.total = world_size  # samples of all ranks per step: the number of ranks
        self.done = 0  # items that the pass has yielded, including those of earlier attempts
        self.repeats = False  # those of earlier attempts come again
        self._items = items
        self._began: RandomStates | None = None
        self._starts: Sequence[Start] = ()
        self._size = length_of(items)

    def skip(self, taken: int, began: RandomStates | None, starts: Sequence[Start], *, same_ranks: bool) -> None:
        """Before the first item: skip those that were trained on before a resume, if the first items are the same.

        With another number of ranks, that is so for a sequence alone: a loader may give each rank other items.
        """
        self.repeats = not (same_ranks or isinstance(self._items, (Sequence, torch.Tensor)))
        if not self.repeats:
            self.done, self._began, self._starts = taken, began, starts

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
        places = [loader.mark() for loader, _ in self._starts]
        for loader, start in self._starts:  # items may be made of their batches
            loader.go_back(start)
        items = iter(self._items)
        for _ in range(self.done):
            next(items, None)
        for (loader, start), place in zip(self._starts, places, strict=True):
            if loader.is_at(start):  # the items are not made of its batches
                loader.go_back(place)
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


class Place(NamedTuple):
    """Where a checkpoint was taken in an epoch's body."""

    ended: int = 0  # passes that had ended
    trains: bool = False  # whether the next one was under way, and had trained
    taken: int = 0  # items of it that were trained on, if it is one of `Run.steps`
    events: int = 0  # if it had not trained: batches of a look, and calls of `Run.save`, since the last pass ended
    looks: bool = False  # whether a look was under way


class Passes:
    """The passes of an epoch's body, numbered in their order, and the place in them."""

    def __init__(self, *, keep_random: bool) -> None:
        self.source: Any = None  # the pass that is under way: a loader, or one of `Run.steps`; None between two
        self.trains = False  # whether it has trained
        self.target: Place | None = None  # of the checkpoint that is resumed, until the script has come there again
        # In the pass that ended last, if it had trained and was left before its end; None behind it.
        self.left: Place | None = None
        self.looks: dict[int, Any] = {}  # that have ended, by number: what is kept of the loaders at their start
        self.starts: Sequence[Start] = ()  # of the pass that began last, if it is one of `Run.steps`
        self._keep_random = keep_random
        self._same_ranks = True  # as in the checkpoint that is resumed
        self._ended = self._events = 0
        # Random states: where the body begins, where the pass under way began, and where passes that trained ended.
        self._body: RandomStates | None = None
        self._began: RandomStates | None = None
        self._ends: dict[int, RandomStates | None] = {}

    def restart(self) -> None:
        self.source, self.trains, self.target, self.left, self.looks = None, False, None, None, {}
        self._ended = self._events = 0
        self._body, self._began, self._ends = self._random(), None, {}

    def begin(self, source: Any, starts: Sequence[Start] = ()) -> bool:
        """Begin a pass; returns whether it goes on where the checkpoint was taken that is resumed."""
        target = self.target
        is_resumed = target is not None and target.trains and target.ended == self._ended
        is_of_items = isinstance(source, Pass)
        if target is not None and is_resumed and is_of_items:
            source.skip(target.taken, self._began, self.starts, same_ranks=self._same_ranks)
        self.source, self.trains, self.left = source, is_resumed, None
        if target is None:
            self._began = self._random()
        if target is None or (is_resumed and is_of_items and source.repeats):
            self.starts = starts if is_of_items else ()
        return is_resumed

    def skips(self) -> bool:
        """Whether the next pass had trained, and ended, before the resume; if so, go on behind it."""
        if self.target is None or self._ended >= self.target.ended or self._ended in self.looks:
            return False
        self._set_random(self._ends.get(self._ended))
        self._ended, self._events = self._ended + 1, 0
        return True

    def end(self, before: Any, *, is_whole: bool) -> None:
        self.left = self.place(before=False) if self.trains and not is_whole else None
        if not self.trains:
            self.looks[self._ended] = before
        elif self._keep_random:
            if self._ended - 1 not in self.looks:  # only looks and the next pass need to know
                self._ends.pop(self._ended - 1, None)
            self._ends[self._ended] = self._random()
        self._ended, self._events = self._ended + 1, 0
        self.source, self.trains = None, False

    @property
    def has_any(self) -> bool:
        """Whether a pass of the body has ended."""
        return self._ended > 0

    def seen_look(self) -> Any:
        """What was kept at the start of the look that comes next, if a resumed run does it again."""
        return self.looks.get(self._ended) if self.target is not None else None

    def event(self) -> bool:
        """Count a batch of a look, or a call of `Run.save`; returns whether the resumed run comes to its place here."""
        self._events += 1
        target = self.target
        return (
            target is not None
            and not target.trains
            and (target.ended, target.events, target.looks) == (self._ended, self._events, self.source is not None)
        )

    def is_behind(self) -> bool:
        """Whether the next pass comes behind the place of a resumed run, as if `Run.save` is not called again."""
        target = self.target
        if target is None:
            return False
        return target.ended < self._ended or (target.ended == self._ended and not (target.trains or target.looks))

    def place(self, *, before: bool) -> Place:  # before the current item, or behind it
        if self.target is not None:
            return self.target
        if not self.trains:
            return Place(self._ended, events=self._events, looks=self.source is not None)
        taken = self.source.done - before if isinstance(self.source, Pass) else 0
        return Place(self._ended, trains=True, taken=taken)

    def resume(
        self, place: Sequence[Any], looks: Mapping[int, Any], starts: Sequence[Start], *, same_ranks: bool
    ) -> None:
        """Continue from a place; `load_state_dict` must have been called, if random states are known."""
        self._same_ranks, self.starts = same_ranks, starts
        self.source, self.trains, self._ended, self._events = None, False, 0, 0
        self.target = None if Place(*place) == Place() else Place(*place)
        self.looks = dict(looks)

    def set_random(self) -> None:
        self._set_random(self._body)

    def _random(self) -> RandomStates | None:
        return random_states() if self._keep_random else None

    def _set_random(self, states: RandomStates | None) -> None:
        if states is not None:
            set_random_states(states)

    def state_dict(self) -> StateDict:
        return {"body": self._body, "began": self._began, "ends": dict(self._ends)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._body, self._began, self._ends = state["body"], state["began"], dict(state["ends"])


def length_of(items: Any) -> int | None:
    """The length of a loader or of other items; None if it is not known."""
    try:
        return len(items)
    except TypeError:  # torch's DataLoader has a length or not, as its data set has
        return None


# -- loops over epochs: `Run.epochs` may be called several times, as for cross-validation ------------------------------


class EpochLoops:
    """Numbers the loops over epochs, and says which epoch of which loop is under way."""

    def __init__(self, *, keep_random: bool) -> None:
        self.number = -1  # number of the loop entered last, from 0; -1 before the first one
        self.epoch = 0  # its current epoch, from 0; the number of its epochs when it has ended
        self.count: int | None = None  # number of its epochs; None before the first loop
        self.is_active = False  # whether an epoch is under way
        self._keep_random = keep_random
        self._ends: list[RandomStates | None] = []  # random states at the end of each loop
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
        if self.number < len(self._ends) and (ends := self._ends[self.number]) is not None:
            set_random_states(ends)

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

    def state_dict(self) -> StateDict:
        """This rank's random states at the ends of the loops."""
        return {"ends": list(self._ends)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._ends = list(state["ends"])
