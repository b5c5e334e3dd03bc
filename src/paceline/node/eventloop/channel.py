"""JSON objects over a stream socket that never blocks its owner."""

from __future__ import annotations

import contextlib
import json
import socket
import zlib
from typing import TYPE_CHECKING, Any

from paceline.contract.handshake import HandshakeError
from paceline.contract.links import Link, Stream

if TYPE_CHECKING:
    from collections.abc import Mapping

Message = Any  # an object: one of the messages of those who use the channel

MAX_MESSAGE = 16 * 1024 * 1024
_LONG = 4096  # bytes of a message that is compressed
_COMPRESSED = b"z"  # what such a message begins with


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


class Channel(Stream):
    """JSON objects over a link, or between two processes that inherit a socket."""

    def __init__(self, sock: socket.socket, key: bytes | None = None, *, accepted: bool = False) -> None:
        """Nothing has been sent; `key` is that of the link."""
        super().__init__(Link(sock, key), accepted=accepted)

    def send(self, message: Mapping[str, object]) -> None:
        """Queue a message and send what the socket takes."""
        self.put(encode(message))

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self) -> list[Message]:
        """The messages that have arrived completely."""
        try:
            return [decode(data) for data in self.take()]
        except HandshakeError:
            raise MessageAltered from None
        except ChannelClosed:
            raise
        except OSError as error:
            raise ChannelClosed(str(error), is_dead=isinstance(error, ConnectionResetError)) from error

    def part(self, message: Mapping[str, object]) -> None:
        """Send a last message and nothing more. The socket stays open until `close`.

        Closing it now could lose the message, and the other side would take this process for dead.
        """
        with contextlib.suppress(ChannelClosed, OSError):
            self.send(message)
            if not self.wants_write:
                self.socket.shutdown(socket.SHUT_WR)


def encode(message: Mapping[str, object]) -> bytes:
    """The bytes of a message: compressed if it is long, as one that names all nodes of a large job."""
    data = json.dumps(message).encode()
    return data if len(data) < _LONG else _COMPRESSED + zlib.compress(data)


def decode(data: bytes, limit: int = MAX_MESSAGE) -> Message:
    """The message of these bytes."""
    try:
        message = json.loads(_decompressed(data[1:], limit) if data.startswith(_COMPRESSED) else data)
    except (ValueError, RecursionError, zlib.error) as error:
        raise ChannelClosed(f"not a message: {data[:40]!r}") from error
    if not isinstance(message, dict):
        raise ChannelClosed(f"not a message: {data[:40]!r}")
    return message


def _decompressed(data: bytes, limit: int) -> bytes:
    decompressor = zlib.decompressobj()
    message = decompressor.decompress(data, limit)
    if decompressor.unconsumed_tail:
        raise ChannelClosed(f"a message of more than {limit} bytes")
    return message
