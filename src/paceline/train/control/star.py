"""This rank's connections for one purpose: rank 0 has one to each other rank, and each of these one to rank 0."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from typing import TYPE_CHECKING

from paceline.contract.links import Stream

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from paceline.contract.links import Link

    Ready = Sequence[tuple[selectors.SelectorKey, int]]

WAKEUP = -1  # in place of a rank


class Star:
    """Messages that nobody waits to send. One thread at a time reads; any may send, or wake the one that waits.

    Each purpose has a star of its own: what a checkpoint sends may take seconds, and must not delay what ends a hang.

    Attributes:
        wakeup: bytes written here are read too, as if they came from `WAKEUP`.
    """

    def __init__(self, links: Mapping[int, Link], *, accepted: bool) -> None:
        self._streams = {rank: Stream(link, accepted=accepted) for rank, link in links.items()}
        self._open = self._streams.copy()  # those of ranks that are there
        self._sending = threading.RLock()  # a signal handler may send, too
        self._woken, self.wakeup = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for end in (self._woken, self.wakeup):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, WAKEUP)
        for rank, stream in self._streams.items():
            self._selector.register(stream, selectors.EVENT_READ, rank)

    def fileno(self) -> int:
        """The descriptor that is readable when `select` returns at once."""
        return self._selector.fileno()

    def select(self, timeout: float | None) -> Ready:
        """Wait until there is something for `take`; returns nothing if the time is over."""
        return self._selector.select(timeout)

    def take(self, ready: Ready) -> Iterator[tuple[int, bytes | OSError]]:
        """The messages that have arrived completely, with their ranks; an error is the last that comes from a rank."""
        for key, events in ready:
            rank = key.data
            try:
                if events & selectors.EVENT_READ:
                    for data in [self._woken.recv(4096)] if rank == WAKEUP else self._streams[rank].take():
                        yield rank, data
                if events & selectors.EVENT_WRITE:
                    self._flush(rank)
            except BlockingIOError:
                pass  # it was read before
            except OSError as error:
                with self._sending:
                    if self._open.pop(rank, None) is None:  # all are closed by now
                        return
                    self._selector.unregister(key.fileobj)
                yield rank, error

    def send(self, rank: int, message: bytes) -> None:
        """Send a message now, or as soon as the connection takes it. If the rank is gone, `take` says so."""
        if rank in self._open:
            self._flush(rank, message)

    def send_to_all(self, message: bytes) -> None:
        """Send a message to all ranks at the other ends."""
        for rank in [*self._open]:
            self._flush(rank, message)

    def _flush(self, rank: int, message: bytes | None = None) -> None:
        with self._sending:
            stream = self._streams[rank]
            was_waiting = stream.wants_write
            try:
                if message is None:
                    stream.flush()
                else:
                    stream.put(message)
            except OSError:
                return  # `take` says so
            if stream.wants_write != was_waiting and rank in self._open:
                writes = selectors.EVENT_WRITE if stream.wants_write else 0
                self._selector.modify(stream, selectors.EVENT_READ | writes, rank)

    @property
    def has_sent_all(self) -> bool:
        """Whether all connections have taken what was sent."""
        return not any(stream.wants_write for stream in self._open.values())

    def wake(self) -> None:
        """End the wait of the thread that reads."""
        with contextlib.suppress(OSError):  # it is awake, or closed
            self.wakeup.send(b"\0")

    def close(self, seconds: float = 0.0) -> None:
        """Close the connections; if there are seconds for that, after what can be sent of the rest.

        A child of this process, which is no rank, closes its copies at once.
        """
        for stream in self._open.values() if seconds else ():
            with contextlib.suppress(OSError):
                stream.socket.settimeout(seconds)
                stream.flush()
        self._open.clear()
        for stream in self._streams.values():
            stream.close()
        for end in (self._woken, self.wakeup):
            end.close()
        self._selector.close()
