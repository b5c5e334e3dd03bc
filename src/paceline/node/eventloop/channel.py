"""JSON objects, one per line, over a stream socket that never blocks its owner."""

from __future__ import annotations

import binascii
import contextlib
import errno
import hmac
import itertools
import json
import socket
import zlib
from collections import deque
from typing import TYPE_CHECKING, Any

from paceline.contract.handshake import CHECKSUM_SIZE, checksums

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.contract.handshake import Checksums

Message = dict[str, Any]

MAX_LINE = 16 * 1024 * 1024
STRANGE_LINE = 4096
_MARK = 2 * CHECKSUM_SIZE  # characters of a checksum, before its message
_PIECES = 64  # that are given to the kernel at once
_LONG = 4096  # bytes of a message that is compressed
_COMPRESSED = b"z"  # what the line of such a message begins with


class ChannelClosed(ConnectionError):
    """The other side is gone, or sent something that is no message.

    Attributes:
        is_dead: whether the kernel there has closed the connection, because the process has ended.
    """

    def __init__(self, why: str, is_dead: bool = False) -> None:
        super().__init__(why)
        self.is_dead = is_dead


class MessageAltered(ChannelClosed):
    """What came is not what the other side has sent; nothing that comes later can be believed."""

    def __init__(self) -> None:
        super().__init__("a message from it was altered on the way")


class Channel:
    """Buffers both directions of a socket; the owner calls `receive` when it is readable and `flush` when writable.

    Between two processes that inherit a socket, messages go as they are. Over a network, both sides call `authenticate`
    as soon as they have a key; from then on each message has a checksum.

    Attributes:
        limit: bytes of a message.
    """

    def __init__(self, sock: socket.socket, *, is_strange: bool = False) -> None:
        """Nothing has been sent."""
        sock.setblocking(False)
        self.socket = sock
        self.limit = STRANGE_LINE if is_strange else MAX_LINE
        self._is_strange = is_strange
        self._incoming = bytearray()
        self._outgoing: deque[bytes | memoryview] = deque()
        self._ours: Checksums | None = None
        self._theirs: Checksums | None = None

    def authenticate(self, session_key: bytes, *, accepted: bool) -> None:
        """Send and expect checksums from the next message on, in both directions."""
        self._ours, self._theirs = checksums(session_key, accepted=accepted)
        self._is_strange = False

    def fileno(self) -> int:
        """The descriptor, so that a selector takes a channel as it is."""
        return self.socket.fileno()

    @property
    def wants_write(self) -> bool:
        """Whether some bytes are still to be sent."""
        return bool(self._outgoing)

    def send(self, message: Mapping[str, object]) -> None:
        """Queue a message and send what the socket takes."""
        self.send_line(encode(message))

    def send_line(self, line: bytes) -> None:
        """`send` a message that `encode` has made a line of, perhaps for several receivers."""
        if self._ours is not None:
            self._outgoing.append(self._ours.of(line).hex().encode())
            self._ours.next()
        self._outgoing += (line, b"\n")
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes now."""
        while self._outgoing:
            try:
                sent = self.socket.sendmsg(itertools.islice(self._outgoing, _PIECES))
            except BlockingIOError:
                return
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            while sent:
                piece = self._outgoing.popleft()
                if sent < len(piece):
                    self._outgoing.appendleft(memoryview(piece)[sent:])
                sent -= min(sent, len(piece))

    def receive(self) -> list[Message]:
        """The messages that have arrived completely."""
        closed = False
        try:
            while not closed and len(self._incoming) <= self.limit:
                data = self.socket.recv(65536)
                self._incoming += data
                closed = not data
        except BlockingIOError:
            pass
        except OSError as error:
            raise ChannelClosed(str(error), is_dead=error.errno == errno.ECONNRESET) from error
        if len(self._incoming) > self.limit:
            raise (
                ChannelClosed(f"a message of more than {self.limit} bytes") if self._theirs is None else MessageAltered
            )
        messages: list[Message] = []
        while (end := self._incoming.find(b"\n")) >= 0:
            line = bytes(self._incoming[:end])
            del self._incoming[: end + 1]
            if self._is_strange and (self._incoming or line.startswith(_COMPRESSED)):
                raise ChannelClosed("it did not wait for an answer, or sent what is compressed")
            messages.append(decode(self._check(line), self.limit))
        if closed and not messages:
            raise ChannelClosed("the other side closed the connection", is_dead=True)
        return messages

    def _check(self, line: bytes) -> bytes:
        """The message of a line, without its checksum."""
        if self._theirs is None:
            return line
        mark, line = line[:_MARK], line[_MARK:]
        if not hmac.compare_digest(mark, self._theirs.of(line).hex().encode()):
            raise MessageAltered
        self._theirs.next()
        return line

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


def encode(message: Mapping[str, object]) -> bytes:
    """The line of a message, without its end: compressed if it is long, as one that names all nodes of a large job."""
    line = json.dumps(message).encode()
    if len(line) < _LONG:
        return line
    return _COMPRESSED + binascii.b2a_base64(zlib.compress(line), newline=False)


def decode(line: bytes, limit: int = MAX_LINE) -> Message:
    """The message of a line."""
    try:
        message = json.loads(_decompressed(line[1:], limit) if line.startswith(_COMPRESSED) else line)
    except (ValueError, RecursionError, zlib.error) as error:
        raise ChannelClosed(f"not a message: {line[:40]!r}") from error
    if not isinstance(message, dict):
        raise ChannelClosed(f"not a message: {line[:40]!r}")
    return message


def _decompressed(encoded: bytes, limit: int) -> bytes:
    decompressor = zlib.decompressobj()
    message = decompressor.decompress(binascii.a2b_base64(encoded), limit)
    if decompressor.unconsumed_tail:
        raise ChannelClosed(f"a message of more than {limit} bytes")
    return message
