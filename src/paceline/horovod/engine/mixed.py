"""A grouped reduction of tensors of several types: one collective per type, so that every bit is kept."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from .entries import Entry
from .execution import Execution
from .fusion import Batch, Buffers
from .negotiation import ADASUM, REDUCTIONS

if TYPE_CHECKING:
    from collections.abc import Callable

    from .execution import Members


def execute(
    batch: Batch,
    entries: list[Entry],
    members: Members,
    buffers: Buffers,
    done: Callable[[str], None],
    mark: Callable[[str], None] | None,
) -> None:
    """Start a batch; the arguments are those of `Execution`."""
    request = batch.responses[0].request
    kinds = dict.fromkeys(kind for kind, _ in request.tensors)
    if request.kind not in REDUCTIONS or request.op == ADASUM or len(kinds) == 1:
        Execution(batch, entries, members, buffers, done, mark).start()
        return
    (entry,), (response,) = entries, batch.responses
    places = [[index for index, (kind, _) in enumerate(request.tensors) if kind == one] for one in kinds]
    parts = [_part(entry, chosen) for chosen in places]
    finish = _Countdown(entry, parts, places, done)
    for part in parts:
        alone = Batch([response._replace(request=part.request)])
        try:
            Execution(alone, [part], members, buffers, finish, None).start()
        except Exception as error:
            finish(str(error) or type(error).__name__)


def _part(entry: Entry, places: list[int]) -> Entry:
    """The part of a grouped operation that has one type."""
    request = entry.request._replace(tensors=tuple(entry.request.tensors[place] for place in places))
    targets = None if entry.targets is None else [entry.targets[place] for place in places]
    part = Entry(request, [entry.inputs[place] for place in places], targets, grouped=True)
    part.ready = entry.ready
    return part


class _Countdown:
    """Puts the results together when all parts have ended; called from the threads in which they end."""

    def __init__(self, entry: Entry, parts: list[Entry], places: list[list[int]], done: Callable[[str], None]) -> None:
        self._entry, self._parts, self._places, self._done = entry, parts, places, done
        self._lock = threading.Lock()
        self._left = len(parts)
        self._error = ""

    def __call__(self, error: str) -> None:
        with self._lock:
            self._left -= 1
            self._error = self._error or error
            if self._left:
                return
        if self._entry.targets is None and not self._error:
            results = {
                place: output
                for part, places in zip(self._parts, self._places, strict=True)
                for place, output in zip(places, part.outputs or (), strict=True)
            }
            self._entry.outputs = [results[place] for place in sorted(results)]
        self._done(self._error)
