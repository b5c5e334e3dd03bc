"""JSON objects, one per line, over a stream socket that never blocks its owner."""

from __future__ import annotations

import contextlib
import errno
import json
import socket
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

Message = dict[str, Any]

MAX_LINE = 16 * 1024 * 1024


class ChannelClosed(ConnectionError):
    """The other side is gone, or sent something that is no message.

    Attributes:
        is_dead: whether the kernel there has closed the connection, because the process has ended.
    """

    def __init__(self, why: str, is_dead: bool = False) -> None:
        super().__init__(why)
        self.is_dead = is_dead


class Channel:
    """Buffers both directions of a socket; the owner calls `receive` when it is readable and `flush` when writable."""

    def __init__(self, sock: socket.socket, limit: int = MAX_LINE) -> None:
        sock.setblocking(False)
        self.socket = sock
        self.limit = limit
        self._incoming = bytearray()
        self._outgoing = bytearray()

    def fileno(self) -> int:
        """The descriptor, so that a selector takes a channel as it is."""
        return self.socket.fileno()

    @property
    def wants_write(self) -> bool:
        """Whether some bytes are still to be sent."""
        return bool(self._outgoing)

    def send(self, message: Mapping[str, object]) -> None:
        """Queue a message and send what the socket takes.

        Raises:
            ChannelClosed: the other side is gone.
        """
        self._outgoing += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes now.

        Raises:
            ChannelClosed: the other side is gone.
        """
        while self._outgoing:
            try:
                sent = self.socket.send(self._outgoing)
            except BlockingIOError:
                return
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            del self._outgoing[:sent]

    def receive(self) -> list[Message]:
        """The messages that have arrived completely.

        Raises:
            ChannelClosed: the other side is gone and no complete message is left, or it sent something else.
        """
        closed = False
        try:
            while True:
                data = self.socket.recv(65536)
                if not data:
                    closed = True
                    break
                self._incoming += data
                if len(self._incoming) > self.limit:
                    raise ChannelClosed(f"a message of more than {self.limit} bytes")
        except BlockingIOError:
            pass
        except OSError as error:
            raise ChannelClosed(str(error), is_dead=error.errno == errno.ECONNRESET) from error
        messages: list[Message] = []
        while (end := self._incoming.find(b"\n")) >= 0:
            line = bytes(self._incoming[:end])
            del self._incoming[: end + 1]
            try:
                message = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ChannelClosed(f"not a message: {line[:40]!r}") from error
            if not isinstance(message, dict):
                raise ChannelClosed(f"not a message: {line[:40]!r}")
            messages.append(message)
        if closed and not messages:
            raise ChannelClosed("the other side closed the connection", is_dead=True)
        return messages

    def part(self, message: Mapping[str, object]) -> None:
        """Send a last message and nothing more. The socket stays open until `close`.

        Closing it now could lose the message, and the other side would take this process for dead.
        """
        with contextlib.suppress(ChannelClosed, OSError):
            self.send(message)
            if not self._outgoing:
                self.socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()
