"""The control connections of the engine: messages that are never waited for."""

from __future__ import annotations

import contextlib
import json
import selectors
from typing import TYPE_CHECKING, Any

from paceline.contract.links import Messages

if TYPE_CHECKING:
    from paceline.contract.links import Link

_CHUNK = 1 << 16  # bytes read at once; more would be new memory each time


class Peer:
    """A connection to another rank, with what has not been sent yet."""

    def __init__(self, rank: int, link: Link, selector: selectors.BaseSelector, *, accepted: bool) -> None:
        self.rank = rank
        self._messages = Messages(link, accepted=accepted)
        self._socket = link.socket
        self._socket.setblocking(False)
        self._selector = selector
        self._unsent = bytearray()
        self._is_open = True
        self._wanted = selectors.EVENT_READ
        selector.register(self._socket, self._wanted, self)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message now, or as soon as the connection takes it; if the peer is gone, `receive` will say so."""
        if self._is_open:
            self._unsent += self._messages.pack(json.dumps(message, separators=(",", ":")).encode())
            self.flush()

    def flush(self) -> None:
        try:
            sent = self._socket.send(self._unsent) if self._unsent else 0
            del self._unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        if self._is_open and wanted != self._wanted:
            self._wanted = wanted
            self._selector.modify(self._socket, wanted, self)

    def receive(self) -> list[dict[str, Any]]:
        try:
            data = self._socket.recv(_CHUNK)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionError("its connection ended")
        return [json.loads(message) for message in self._messages.feed(data)]

    def close(self) -> None:
        """Close the connection, after what can be sent of the rest."""
        if self._is_open:
            self._is_open = False
            self._selector.unregister(self._socket)
            with contextlib.suppress(OSError):
                self._socket.settimeout(1.0)
                self._socket.sendall(self._unsent)
            self._socket.close()

    def forget(self) -> None:
        """In a child of this process: close its copy of the connection."""
        self._is_open = False
        self._socket.close()
