"""What a job has on this machine, for a client that takes it to other machines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.node.store import moving

from .protocol import end_with_stdin, send

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.contract.messages import Carry, Inventories, OfJob, Pieces
    from paceline.node.store.home import Home

_PIECE = 1 << 20  # bytes in an answer


def inventory(home: Home, request: OfJob) -> Iterator[Inventories]:
    """See `moving.inventory`; the first line comes before its checkpoint is read."""
    end_with_stdin()
    run = home.run(request["name"])
    yield {"begin": True}
    with run.kept():
        found = moving.inventory(run)
    yield {"inventory": found}
    yield {"end": True}


def carry(home: Home, request: Carry) -> Iterator[Pieces]:
    """Its code or its checkpoint, as `what` says: an archive (tar) in pieces."""
    end_with_stdin()
    run = home.run(request["name"])
    out = _Pieces()
    moving.write(run, request["what"], request["ids"], out, fresh=request["fresh"])
    out.flush()
    yield {"end": True}


class _Pieces:
    """Sends what is written to it, in pieces."""

    def __init__(self) -> None:
        self._waiting = bytearray()

    def write(self, data: bytes) -> int:
        """Take the bytes."""
        self._waiting += data
        if len(self._waiting) >= _PIECE:
            self.flush()
        return len(data)

    def flush(self) -> None:
        """Send what is left."""
        if self._waiting:
            send({"data": bytes(self._waiting)})
            self._waiting.clear()
