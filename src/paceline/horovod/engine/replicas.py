"""Compares what the ranks train: the variables of distributed optimizers and tapes, and the numbers of optimizers.

Digests go to rank 0 over the connections of the engine, and what follows from them comes back. Nobody waits for it but
`shutdown`, and that one second. What was found is raised at the next step, so a script that broadcasts its variables
between its first and its second step, as Horovod's examples for TensorFlow do, is right.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
import zlib
from collections import deque
from typing import TYPE_CHECKING

from paceline.train.control.errors import ReplicaMismatch
from paceline.train.replicas.judging import FAULT, Comparisons
from paceline.train.replicas.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.train.replicas.contents import Contents, Label
    from paceline.train.replicas.judging import Difference, Key, Message, Part

log = logging.getLogger("paceline")
_BITS = 32  # of a checksum
_KEPT = 32  # moments of which a rank can say what exactly it had


class Replicas:
    """What this rank compares with the others."""

    def __init__(self, rank: int, ranks: int, mode: str, wake: Callable[[], None]) -> None:
        self._rank, self._mode, self._wake = rank, mode, wake
        self.is_on = ranks > 1 and mode != "off"  # whether anything is compared
        self.comparisons = Comparisons(ranks, _cause)  # on rank 0, of all ranks
        self.generation = 0  # broadcasts of variables: what was found before does not count
        self.joins = 0  # of all ranks: steps are counted anew then
        self.is_suspended = False  # whether ranks have joined, and so have other variables, until these are broadcast
        self.why = ""  # in what ranks differ; "" if that is not known
        self._has_warned = False
        self._changed = threading.Condition()
        self._reports: deque[Message] = deque()
        self._unanswered: set[Key] = set()
        self._kept: dict[Key, tuple[Contents, Callable[[Label], str]]] = {}
        self._numbers = self._since = 0  # of what has begun; of that before the last broadcast
        self._all: weakref.WeakSet[Compared] = weakref.WeakSet()

    # -- called by the script's threads --------------------------------------------------------------------------------

    def broadcast(self) -> None:
        """Variables are being broadcast, on all ranks: comparisons begin anew."""
        with self._changed:
            self.generation += 1
            self._since = self._numbers
            self.is_suspended = False
            self.why = ""
            self._unanswered.clear()

    def joined(self) -> None:
        """All ranks have joined, some after fewer steps than others: there is nothing to compare."""
        with self._changed:
            self.joins += 1
            self.is_suspended = True
            self._unanswered.clear()

    @property
    def is_fatal(self) -> bool:
        """Whether ranks differ, and that is an error."""
        return bool(self.why) and self._mode == "check"

    def check(self) -> None:
        """Raise what was found, or let rank 0 warn of it, once."""
        if self.is_fatal:
            raise ReplicaMismatch(self.why)
        if self.why and self._rank == 0 and not self._has_warned:
            self._has_warned = True
            log.warning("%s", self.why)

    def begin(self, compared: Compared, shapes: str) -> int:
        """A number for what is compared: the same on ranks that begin with the same in the same order."""
        with self._changed:
            self._all.add(compared)
            self._numbers += 1
            return self._numbers << _BITS | zlib.crc32(shapes.encode())

    def send(self, key: Key, contents: Contents, name: Callable[[Label], str]) -> None:
        """Send a digest; waits for a GPU."""
        report: Message = {
            "do": "sum", "key": key, "step": key[2], "sum": contents.digest, "waits": True,
            "warns": self._mode == "warn",
        }  # fmt: skip
        with self._changed:
            while len(self._kept) >= _KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = contents, name
            self._unanswered.add(key)
            self._reports.append(report)
        self._wake()

    def finish(self) -> None:
        """Compare what was trained last, if it was not compared or changed since."""
        for compared in sorted(self._all, key=lambda each: each.number):
            compared.finish(self)

    def settle(self, timeout: float) -> None:
        """Wait until it is known whether ranks were equal, or for some seconds: others may never say so."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unanswered, timeout)

    # -- called by the engine's thread ---------------------------------------------------------------------------------

    def next_report(self) -> Message | None:
        """What is to be sent to rank 0; None if nothing is."""
        return self._reports.popleft() if self._reports else None

    def hear(self, answer: Message) -> None:
        of, _, count = answer["key"]
        key = of, 0, count
        with self._changed:
            if answer["do"] == "differ":
                contents, name = self._kept.get(key, (None, None))
                parts: Sequence[Part] = () if contents is None or name is None else contents.parts(name)
                self._reports.append({"do": "parts", "key": key, "parts": parts})
                self._wake()
                return
            if answer["do"] == "judged" and of >> _BITS > self._since and not self.why:
                self.why = answer["why"]
            self._unanswered = {each for each in self._unanswered if each[0] != of or each > key}
            self._changed.notify_all()

    def forget(self) -> None:
        """Horovod has ended: there are no more answers."""
        with self._changed:
            self._unanswered.clear()
            self._kept.clear()
            self._changed.notify_all()


class Compared:
    """An optimizer, or the variables of tapes."""

    def __init__(self) -> None:
        self.number = 0  # see `Replicas.begin`
        self._place: tuple[Replicas, int, int] | None = None  # and its generation and joins, for which `number` is
        self._schedule = Schedule()
        self._steps = self._last = 0  # so far; compared last
        self._version: object = None
        self._pending: deque[tuple[Key, Contents, Callable[[Label], str]]] = deque()  # those that a GPU computes

    def contents(self, steps: int) -> Contents:
        raise NotImplementedError

    def names(self) -> Callable[[Label], str]:
        """The names of it; the function outlives what is compared."""
        raise NotImplementedError

    def shapes(self) -> str:
        """What is equal on all ranks, and tells it from others."""
        raise NotImplementedError

    def version(self) -> object:
        """What changes with the variables; None if that is not known."""
        return None

    def is_due(self, replicas: Replicas) -> bool:
        """Whether the end of this step, or the begin of the next one, may compare."""
        if not replicas.is_on or replicas.is_suspended:
            return False
        return not self._is_current(replicas) or self._schedule.is_due(self._steps + 1)

    def begins_step(self, replicas: Replicas) -> None:
        """A step begins: raise what was found; before the first one, compare."""
        if not replicas.is_on:
            return
        replicas.check()
        place = replicas, replicas.generation, replicas.joins
        if replicas.is_suspended or self._place == place:
            return
        if self._place is None or self._place[0] is not replicas or self._place[2] != replicas.joins:
            self._steps = 0
        self._place = place
        self.number = replicas.begin(self, self.shapes())
        self._schedule = Schedule()
        if not self._steps:
            self._compare(replicas)

    def ends_step(self, replicas: Replicas) -> None:
        """A step has ended: compare if it is time to."""
        if not self._is_current(replicas):
            return
        self._steps += 1
        self._version = self.version()
        self._send(replicas)
        if self._schedule.is_due(self._steps):
            began = time.perf_counter()
            self._compare(replicas)
            if not self._pending:
                self._schedule.costs.append(time.perf_counter() - began)
            self._schedule.compared(self._steps, self._steps)

    def finish(self, replicas: Replicas) -> None:
        """Compare what was trained last, if it was not changed since."""
        if not self._is_current(replicas):
            return
        if self._last < self._steps and self._version is not None and self._version == self.version():
            self._compare(replicas)
        self._send(replicas, wait=True)

    def _is_current(self, replicas: Replicas) -> bool:
        return self._place == (replicas, replicas.generation, replicas.joins) and not replicas.is_suspended

    def _compare(self, replicas: Replicas) -> None:
        self._last = self._steps
        self._pending.append(((self.number, 0, self._steps), self.contents(self._steps), self.names()))
        self._send(replicas)

    def _send(self, replicas: Replicas, *, wait: bool = False) -> None:
        while self._pending and (wait or self._pending[0][1].sums.are_there()):
            replicas.send(*self._pending.popleft())


def _cause(difference: Difference, equal: int | None, begins: bool) -> str:
    """Why ranks of Horovod may differ, see `Comparisons`."""
    if difference.name.startswith("lr "):
        return (
            "a learning rate was set on some ranks only, or by a value of each rank alone; set it alike on all, as "
            "from hvd.allreduce(loss), or call hvd.broadcast_optimizer_state"
        )
    if difference.kind == "number":
        return (
            "it was set, or a step was taken, on some ranks only; do on all ranks what one does, or call "
            "hvd.broadcast_optimizer_state"
        )
    if equal is None:
        return (
            "variables were not broadcast before the training; call hvd.broadcast_parameters, hvd.broadcast_variables "
            "or BroadcastGlobalVariablesCallback (docs/horovod.md#replicas-are-compared)"
        )
    if difference.in_a_word:
        return FAULT
    return (
        "variables, or gradients after they were exchanged, were changed on some ranks only, or learning rates differ; "
        "do on all ranks what one does (docs/horovod.md#replicas-are-compared)"
    )
