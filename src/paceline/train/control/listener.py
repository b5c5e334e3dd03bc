"""The thread of a rank that receives what other ranks send, and signals, while the main thread is in a collective."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
import time
from typing import TYPE_CHECKING, Protocol

from paceline.contract.handshake import HandshakeError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.contract.links import Messages

    from .relay import Message


class Events(Protocol):
    """What the thread reports; it calls these methods itself."""

    def received(self, rank: int, message: Message) -> None:
        """A message came from a rank."""

    def disconnected(self, rank: int, why: str) -> None:
        """The connection to a rank has ended, or can no longer be trusted."""

    def signalled(self, number: int) -> None:
        """This process got a signal."""

    def next_deadline(self) -> float | None:
        """When `deadline_passed` is to be called, on `time.monotonic`'s clock."""

    def deadline_passed(self) -> None:
        """The time of `next_deadline` has come."""


class Listener:
    """Reads from the links to other ranks until it is stopped.

    Attributes:
        wakeup: a byte written here wakes the thread; the number of a signal reports that signal, 0 reports nothing.
    """

    def __init__(self, events: Events, links: Mapping[int, Messages]) -> None:
        self._events, self._links = events, links
        self._woken, self.wakeup = socket.socketpair()
        for end in (self._woken, self.wakeup):
            end.setblocking(False)
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="paceline-watch", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; must not be called with a lock that its events take."""
        self._is_stopped = True
        self.wake()
        self._thread.join()

    def wake(self) -> None:
        """Make the thread ask for its next deadline again."""
        with contextlib.suppress(OSError):
            self.wakeup.send(b"\0")

    def close(self) -> None:
        """Close the sockets that wake the thread."""
        self._is_stopped = True
        self._woken.close()
        self.wakeup.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ, None)
            for rank, link in self._links.items():
                selector.register(link.socket, selectors.EVENT_READ, rank)
            while not self._is_stopped:
                deadline = self._events.next_deadline()
                ready = selector.select(None if deadline is None else max(0.0, deadline - time.monotonic()))
                if not ready and not self._is_stopped:
                    self._events.deadline_passed()
                for key, _ in ready:
                    if key.data is None:
                        self._read_signals()
                    elif not self._read(key.data):
                        selector.unregister(key.fileobj)

    def _read(self, rank: int) -> bool:
        """Read what came from a rank; returns whether more may come."""
        link = self._links[rank]
        try:
            data = link.socket.recv(65536)
        except OSError:
            data = b""
        try:
            for message in link.feed(data):
                self._events.received(rank, json.loads(message))
        except HandshakeError:
            self._events.disconnected(rank, "what came from it was changed on the way")
            return False
        if not data:
            self._events.disconnected(rank, "it is gone")
        return bool(data)

    def _read_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in self._woken.recv(4096):
                if number:
                    self._events.signalled(number)
