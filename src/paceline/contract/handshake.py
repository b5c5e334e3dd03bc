"""How two processes prove to each other that they know the same key, without sending it.

    initiator → acceptor    its number (of its rank, say) and a nonce
    acceptor → initiator    a nonce, which begins with the version of this protocol, and a proof
    initiator → acceptor    a proof
    acceptor → initiator    a confirmation

A proof is an HMAC (RFC 2104, SHA-256) over who gives it and everything that both sides have sent before. It is
therefore good for one connection, one direction and one number only: a recorded, reflected or redirected one proves
nothing. The acceptor proves first, so the initiator gives nothing away to a program that happens to listen where the
acceptor should.

An attacker who relays all bytes between two sides that know the key can read them, and what follows: nothing is
encrypted. The session key is known to the two sides only; with `checksums` made of it, every later message proves that
it is what the other side has sent.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

NONCE_SIZE = 32
PROOF_SIZE = 32
CHECKSUM_SIZE = 16
_HELLO = struct.Struct(f"!8sI{NONCE_SIZE}s")  # the protocol, the initiator's number, its nonce
_NUMBER = struct.Struct("!Q")
_NAME = b"paceln"
_PROTOCOL = _NAME + b"04"


class HandshakeError(ConnectionError):
    """The other side does not know the key, or may not connect with its number."""


class WrongKey(HandshakeError):
    """The other side is a process of paceline that does not know the key."""


class OtherVersion(HandshakeError):
    """The other side knows the key, and is of another version of paceline."""


def derive_key(secret: bytes, *context: str) -> bytes:
    """A key of 32 bytes for one purpose; it reveals nothing of the secret, or of keys for other purposes."""
    return prove(secret, "derive", *(part.encode() for part in context))


def prove(key: bytes, side: str, *transcript: bytes) -> bytes:
    """The proof of `side` that it knows the key and has seen these parts of the conversation."""
    parts = (side.encode(), *transcript)
    return hmac.new(key, b"".join(struct.pack("!I", len(part)) + part for part in parts), hashlib.sha256).digest()


def is_proof(given: bytes, key: bytes, side: str, *transcript: bytes) -> bool:
    """Whether a proof is valid, in constant time."""
    return hmac.compare_digest(given, prove(key, side, *transcript))


class Checksums:
    """Keyed checksums (BLAKE2b, RFC 7693) of the messages in one direction of a connection, in their order.

    A message that was changed, left out, repeated, reflected, or taken from another connection has a wrong one.

    Attributes:
        size: bytes of one.
    """

    size = CHECKSUM_SIZE

    def __init__(self, session_key: bytes, side: str) -> None:
        """No message has been sent."""
        self._key = derive_key(session_key, "messages", side)
        self._number = 0

    def of(self, *parts: bytes | bytearray) -> bytes:
        """The `CHECKSUM_SIZE` bytes for the current message, or for its beginning, which is not copied."""
        found = hashlib.blake2b(_NUMBER.pack(self._number), key=self._key, digest_size=CHECKSUM_SIZE)
        for part in parts:
            found.update(part)
        return found.digest()

    def is_right(self, given: bytes | bytearray, *parts: bytes | bytearray) -> bool:
        """Whether a checksum is that of the current message, or of its beginning; in constant time."""
        return hmac.compare_digest(given, self.of(*parts))

    def next(self) -> None:
        """The current message is complete."""
        self._number += 1


class NoChecksums(Checksums):
    """Between two processes of which one has inherited the connection from the other."""

    size = 0

    def __init__(self) -> None:
        """There is no key."""

    def of(self, *parts: bytes | bytearray) -> bytes:
        return b""

    def next(self) -> None: ...


def checksums(session_key: bytes | None, *, accepted: bool) -> tuple[Checksums, Checksums]:
    """Those of the messages that this side sends, and of those that it receives."""
    if session_key is None:
        return NoChecksums(), NoChecksums()
    acceptors, initiators = Checksums(session_key, "acceptor"), Checksums(session_key, "initiator")
    return (acceptors, initiators) if accepted else (initiators, acceptors)


class Acceptance:
    """The acceptor's side of one handshake, without input and output.

    Attributes:
        needs: how many bytes `receive` wants next; 0 when the initiator has proved that it knows the key.
        number: of the initiator; authenticated once `needs` is 0.
        session_key: 32 bytes, once `needs` is 0.
    """

    def __init__(self, key: bytes, accepts: Callable[[int], bool]) -> None:
        """Nothing has been received yet."""
        self.needs = _HELLO.size
        self.number = -1
        self.session_key = b""
        self._key = key
        self._accepts = accepts
        self._transcript: tuple[bytes, ...] = ()

    def receive(self, data: bytes) -> bytes:
        """Take the `needs` bytes that came; returns what is to be sent."""
        if len(data) != self.needs or not self.needs:
            raise HandshakeError(f"{len(data)} bytes instead of {self.needs}")
        if not self._transcript:
            protocol, self.number, _ = _HELLO.unpack(data)
            self._check(protocol.startswith(_NAME), "another protocol")
            ours = _PROTOCOL + secrets.token_bytes(NONCE_SIZE - len(_PROTOCOL))
            self._transcript, self.needs = (data, ours), PROOF_SIZE
            return ours + prove(self._key, "acceptor", *self._transcript)
        self._check(self._transcript[0].startswith(_PROTOCOL), "another version")  # which it has seen in our nonce
        self._check(is_proof(data, self._key, "initiator", *self._transcript), "a wrong proof")
        self.needs = 0
        self.session_key = prove(self._key, "session", *self._transcript)
        return prove(self._key, "confirmation", *self._transcript)

    def _check(self, is_good: bool, what: str) -> None:
        if not is_good:
            raise HandshakeError(what)
        if not self._accepts(self.number):
            raise HandshakeError(f"number {self.number} may not connect")


class Initiation:
    """The initiator's side of one handshake, without input and output.

    Attributes:
        hello: is to be sent first.
        needs: how many bytes `receive` wants next; 0 when the acceptor has proved itself and taken the connection.
        is_proved: whether the acceptor has proved that it knows the key.
        session_key: 32 bytes, once `needs` is 0.
    """

    def __init__(self, key: bytes, number: int) -> None:
        """Nothing has been sent yet."""
        self.hello = _HELLO.pack(_PROTOCOL, number, secrets.token_bytes(NONCE_SIZE))
        self.needs = NONCE_SIZE + PROOF_SIZE
        self.is_proved = False
        self.session_key = b""
        self._key = key
        self._transcript: tuple[bytes, ...] = ()

    def receive(self, data: bytes) -> bytes:
        """Take the `needs` bytes that came; returns what is to be sent."""
        if len(data) != self.needs or not self.needs:
            raise HandshakeError(f"{len(data)} bytes instead of {self.needs}")
        if not self.is_proved:
            if not data.startswith(_NAME):
                raise HandshakeError("another program answers there")
            self._transcript = (self.hello, data[:NONCE_SIZE])
            self._check(data[NONCE_SIZE:], "acceptor")
            if not data.startswith(_PROTOCOL):
                raise OtherVersion("the other side is of another version of paceline")
            self.is_proved, self.needs = True, PROOF_SIZE
            return prove(self._key, "initiator", *self._transcript)
        self._check(data, "confirmation")
        self.needs = 0
        self.session_key = prove(self._key, "session", *self._transcript)
        return b""

    def _check(self, given: bytes, side: str) -> None:
        if not is_proof(given, self._key, side, *self._transcript):
            raise WrongKey("the other side does not know the key")
