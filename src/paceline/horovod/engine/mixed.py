"""A grouped reduction of tensors of several types: one collective per type, so that every bit is kept."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from .entries import Entry
from .execution import Execution
from .negotiation import ADASUM, REDUCTIONS

if TYPE_CHECKING:
    from collections.abc import Callable

    from .buffers import Buffers
    from .execution import Members
    from .negotiation import Response


def execute(
    batch: list[Response],
    entries: list[Entry],
    members: Members,
    buffers: Buffers,
    done: Callable[[str], None],
    mark: Callable[[str], None] | None,
) -> None:
    """Start a batch; the arguments are those of `Execution`."""
    request = batch[0].request
    kinds = dict.fromkeys(kind for kind, _ in request.tensors)
    if request.kind not in REDUCTIONS or request.op == ADASUM or len(kinds) == 1:
        Execution(batch, entries, members, buffers, done, mark).start()
        return
    (entry,), (response,) = entries, batch
    places = [[index for index, (kind, _) in enumerate(request.tensors) if kind == one] for one in kinds]
    parts = [_part(entry, chosen) for chosen in places]
    ends: list[str] = []
    lock = threading.Lock()

    def end(error: str) -> None:
        """Put the results together when all parts have ended; called from the threads in which they end."""
        with lock:
            ends.append(error)
            if len(ends) < len(parts):
                return
        why = next(filter(None, ends), "")
        if entry.targets is None and not why:
            made = [
                pair
                for part, at in zip(parts, places, strict=True)
                for pair in zip(at, part.outputs or (), strict=True)
            ]
            entry.outputs = [output for _, output in sorted(made, key=lambda pair: pair[0])]
        done(why)

    for part in parts:
        try:
            Execution([response._replace(request=part.request)], [part], members, buffers, end, None).start()
        except Exception as error:
            end(str(error) or type(error).__name__)


def _part(entry: Entry, places: list[int]) -> Entry:
    """The part of a grouped operation that has one type."""
    request = entry.request._replace(tensors=tuple(entry.request.tensors[place] for place in places))
    targets = None if entry.targets is None else [entry.targets[place] for place in places]
    inputs = [entry.inputs[place] for place in places]
    return Entry(request, inputs, targets, grouped=True, ready=entry.ready)
