"""Connections among the ranks of one machine: they pass on one file without a name, and wait for each other.

The connections are Unix sockets with abstract names (`local_links`). So nothing is on disk, nothing is left when ranks
are killed, and the ranks may be in several PID and user namespaces: what they need is one network namespace.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
import struct
import tempfile
import threading
from typing import TYPE_CHECKING

from .forks import forget_in_children
from .local_links import SECONDS, LocalListener

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

GATHERS = 2  # calls of `gather`
_MEETING = struct.Struct("<QQ")  # how often, for what
_TIMEVAL = struct.Struct("@ll")
_FOLDER = "/dev/shm"


class NeighboursError(RuntimeError):
    """The ranks of this machine cannot share memory; the message says why."""


class Neighbours:
    """Connections of this rank to others of its machine."""

    def __init__(
        self,
        position: int,
        count: int,
        length: int,  # of the file, in bytes
        gather: Callable[[str], Sequence[str]],  # called `GATHERS` times, also if this fails
        use: Callable[[int], None],  # with the descriptor of the file, which is closed afterwards
        *,
        timeout: float | None,
    ) -> None:
        self._position, self._count, self._timeout = position, count, timeout
        self._sockets: dict[int, socket.socket] = {}  # by position
        self._met = 0
        self._meeting = threading.Lock()  # held while the sockets are used
        self._is_closed = False
        distances = [1 << number for number in range((count - 1).bit_length())]
        self._rounds = [((position + each) % count, (position - each) % count) for each in distances]
        listener, file, problem = None, -1, ""
        try:
            try:
                listener = LocalListener()
                file = _file(length) if position == 0 else -1
            except OSError as error:
                problem = _text(error)
            offers = [json.loads(each) for each in gather(json.dumps([listener and listener.address, problem]))]
            why = [each for _, each in offers]
            if listener is not None and not any(why):
                problem = self._set_up(listener, [each for each, _ in offers], file, use)
            why = [one or other for one, other in zip(why, gather(problem), strict=True)]
        finally:
            if listener is not None:
                listener.close()
            if file >= 0:
                os.close(file)
        failed = [(bool(text.startswith(_AFTER)), other) for other, text in enumerate(why) if text]
        if failed:
            self.close()
            other = min(failed)[1]
            raise NeighboursError(f"local rank {other}: {why[other].removeprefix(_AFTER)}")
        forget_in_children(self)

    # -- connecting ----------------------------------------------------------------------------------------------------

    def _set_up(self, listener: LocalListener, addresses: Sequence[str], file: int, use: Callable[[int], None]) -> str:
        """Connect to the neighbours, pass on the file, and use it. Returns why it fails, or ""."""
        try:
            self._connect(listener, addresses)
            received = self._receive_file() if self._position else file
            try:
                self._send_file(received)
                use(received)
            finally:
                if self._position:
                    os.close(received)
            for one in self._sockets.values():
                one.settimeout(None)
                if self._timeout is not None:
                    time = _TIMEVAL.pack(int(self._timeout), int(self._timeout % 1 * 1e6))
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, time)
        except (OSError, EOFError) as error:
            self.close()  # others may wait for this rank
            listener.close()
            return (_AFTER if isinstance(error, EOFError | ConnectionError) else "") + _text(error)
        return ""

    def _connect(self, listener: LocalListener, addresses: Sequence[str]) -> None:
        """Connect to each neighbour, as its client if its position is lower."""
        neighbours = {other for pair in self._rounds for other in pair}
        lower = {other: addresses[other] for other in neighbours if other < self._position}
        self._sockets = listener.connect(self._position, lower, neighbours - lower.keys())
        for one in self._sockets.values():
            one.settimeout(SECONDS)

    def _receive_file(self) -> int:
        """Get the file from the rank before this one in a binomial tree."""
        parent = self._position - (1 << (self._position.bit_length() - 1))
        data, descriptors, _, _ = socket.recv_fds(self._sockets[parent], 1, 1, socket.MSG_CMSG_CLOEXEC)
        if not data or not descriptors:
            raise EOFError("another rank could not take part")
        return descriptors[0]

    def _send_file(self, file: int) -> None:
        """Pass on the file to the ranks after this one in that tree."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file]))]
        for other in sorted(self._sockets):
            distance = other - self._position
            if distance > self._position and distance.bit_count() == 1:
                self._sockets[other].sendmsg([b"\0"], rights)

    # -- waiting for each other ----------------------------------------------------------------------------------------

    def meet(self, what: int) -> None:
        """Wait until all ranks have called this as often. After log₂ of their number of rounds every rank knows.

        Source: the dissemination barrier of Hensgen, Finkel and Manber, 1988.
        """
        try:
            with self._meeting:
                self._meet(what)
        except (BlockingIOError, TimeoutError):
            raise RuntimeError(f"another rank of this machine did not come within {self._timeout:g} s") from None
        except (ConnectionError, EOFError):
            whose = "this rank has left the exchange" if self._is_closed else "another rank of this machine is gone"
            raise ConnectionError(whose) from None
        finally:
            if self._is_closed:
                self._release()

    def _meet(self, what: int) -> None:
        if self._is_closed:
            raise ConnectionResetError
        self._met += 1
        message = _MEETING.pack(self._met, what)
        for following, previous in self._rounds:
            self._sockets[following].sendall(message)
            if _read(self._sockets[previous], len(message)) != message:
                raise RuntimeError("the ranks of this machine exchange different tensors")

    def close(self) -> None:
        """Leave the others. `meet` fails, now and later, here and there. Any thread may call this."""
        self._is_closed = True
        for one in list(self._sockets.values()):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits here
        self._release()

    def _release(self) -> None:
        """Close the sockets, unless a thread uses them; it then does this itself."""
        if self._meeting.acquire(blocking=False):
            self.forget()
            self._meeting.release()

    def forget(self) -> None:
        """Close the sockets of this process. In a child, which is no rank, that leaves those of the rank open."""
        for one in self._sockets.values():
            one.close()


_AFTER = "\0"  # before the text of a failure that follows from another one


def _file(length: int) -> int:
    """A descriptor of a new file in memory that has no name, and all of its bytes.

    In memory of its own, since /dev/shm is small in many containers; there if memfd_create is forbidden, or if Python
    was built without it.
    """
    try:
        file = os.memfd_create("paceline")
    except (AttributeError, OSError):
        with tempfile.TemporaryFile(dir=_FOLDER) as made:
            file = os.dup(made.fileno())
    try:
        os.posix_fallocate(file, 0, length)
    except BaseException:
        os.close(file)
        raise
    return file


def _read(one: socket.socket, size: int) -> bytes:
    """Read so many bytes."""
    data = one.recv(size, socket.MSG_WAITALL)
    while len(data) < size:  # a time limit, or a large message, may divide it
        more = one.recv(size - len(data), socket.MSG_WAITALL)
        if not more:
            raise EOFError("another rank has ended")
        data += more
    return data


def _text(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)
