"""The control connections of the engine: messages that are never waited for."""

from __future__ import annotations

import contextlib
import json
import selectors
from typing import TYPE_CHECKING, Any

from paceline.contract.links import Stream

if TYPE_CHECKING:
    from paceline.contract.links import Link


class Peer(Stream):
    """A connection to another rank; a selector knows what it waits for."""

    def __init__(self, rank: int, link: Link, selector: selectors.BaseSelector, *, accepted: bool) -> None:
        super().__init__(link, accepted=accepted)
        self.rank = rank
        self._selector = selector
        self._is_open = True
        self._wanted = selectors.EVENT_READ
        selector.register(self, self._wanted, self)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message now, or as soon as the connection takes it; if the peer is gone, `receive` will say so."""
        if self._is_open:
            self.put(json.dumps(message, separators=(",", ":")).encode())

    def flush(self) -> None:
        try:
            super().flush()
        except OSError:
            self._unsent.clear()
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.wants_write else 0)
        if self._is_open and wanted != self._wanted:
            self._wanted = wanted
            self._selector.modify(self, wanted, self)

    def receive(self) -> list[dict[str, Any]]:
        return [json.loads(message) for message in self.take()]

    def close(self) -> None:
        """Close the connection, after what can be sent of the rest."""
        if self._is_open:
            self._is_open = False
            self._selector.unregister(self)
            with contextlib.suppress(OSError):
                self.socket.settimeout(1.0)
                self.socket.sendall(self._unsent)
            super().close()

    def forget(self) -> None:
        """In a child of this process: close its copy of the connection."""
        self._is_open = False
        super().close()
