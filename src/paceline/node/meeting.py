"""How the agents of a job talk: node 0 hosts the coordinator, the others are its guests.

A connection starts with a challenge in both directions: each side proves that it knows the job's token by the HMAC of
the other's random number (RFC 2104), so that nobody else can join, and nobody else can pose as the host.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import select
import socket
import time
from typing import TYPE_CHECKING

from .channel import MAX_LINE, Channel, ChannelClosed, Message

if TYPE_CHECKING:
    from collections.abc import Callable

    from .coordinator import Coordinator, Outbox
    from .loop import Loop

MAX_STRANGERS = 64
STRANGER_SECONDS = 10.0
STRANGER_BYTES = 4096


def prove(token: bytes, challenge: str, side: str) -> str:
    """The answer of `side` ("host" or "guest") to a challenge."""
    return hmac.new(token, f"{side}:{challenge}".encode(), "sha256").hexdigest()


class Host:
    """Runs the coordinator in this agent, which is its peer 0, and listens for the other agents."""

    def __init__(self, loop: Loop, coordinator: Coordinator, deliver: Callable[[Message], None]) -> None:
        self._loop = loop
        self._coordinator = coordinator
        self._deliver = deliver
        self._listener: socket.socket | None = None
        self._token = b""
        self._peers: dict[int, Channel] = {}
        self._strangers: dict[Channel, tuple[str, float]] = {}  # challenge, when it came
        self._next_peer = 1

    def listen(self, port: int, token: bytes) -> None:
        """Let other agents in.

        Raises:
            OSError: the port cannot be listened on.
        """
        self._token = token
        self._listener = socket.create_server(("", port), backlog=128)
        self._listener.setblocking(False)
        self._loop.watch(self._listener, self._accept)

    def send(self, message: Message) -> None:
        """A message of this agent to the coordinator."""
        self._post(self._coordinator.receive(0, message))

    def flush(self, timeout: float) -> None:
        """Wait until the other agents have been told everything, `timeout` seconds at most."""
        self._loop.run_until(lambda: not any(channel.wants_write for channel in self._peers.values()), timeout)

    def close(self) -> None:
        """Stop listening, drop everybody."""
        for channel in [*self._peers.values(), *self._strangers]:
            self._drop(channel)
        if self._listener is not None:
            self._loop.forget(self._listener)
            self._listener.close()

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # it left before it was let in
        now = time.monotonic()
        for channel, (_, since) in list(self._strangers.items()):
            if now - since > STRANGER_SECONDS or len(self._strangers) >= MAX_STRANGERS:
                self._drop(channel)
        channel = Channel(sock, limit=STRANGER_BYTES)
        challenge = os.urandom(16).hex()
        self._strangers[channel] = (challenge, now)
        self._loop.watch(channel, lambda: self._read_stranger(channel))
        with contextlib.suppress(ChannelClosed):
            channel.send({"challenge": challenge})

    def _read_stranger(self, channel: Channel) -> None:
        challenge = self._strangers[channel][0]
        try:
            messages = channel.receive()
            if not messages:
                return
            proof, theirs = str(messages[0].get("proof")), str(messages[0].get("challenge"))
            if not hmac.compare_digest(proof, prove(self._token, challenge, "guest")):
                raise ChannelClosed("wrong token")
            channel.send({"proof": prove(self._token, theirs, "host")})
        except ChannelClosed:
            self._drop(channel)
            return
        del self._strangers[channel]
        channel.limit = MAX_LINE
        peer = self._next_peer
        self._next_peer += 1
        self._peers[peer] = channel
        self._loop.forget(channel)
        self._loop.watch(channel, lambda: self._read_peer(peer))

    def _read_peer(self, peer: int) -> None:
        try:
            for message in self._peers[peer].receive():
                self._post(self._coordinator.receive(peer, message))
        except ChannelClosed:
            self._drop(self._peers.pop(peer))
            self._post(self._coordinator.lost(peer))

    def _post(self, outbox: Outbox) -> None:
        for peer, message in outbox:
            if peer == 0:
                self._deliver(message)
            elif peer in self._peers:
                with contextlib.suppress(ChannelClosed):  # reading from it tells, and the coordinator hears `lost`
                    self._peers[peer].send(message)

    def _drop(self, channel: Channel) -> None:
        self._strangers.pop(channel, None)
        self._loop.forget(channel)
        channel.close()


class Guest:
    """Connects this agent to the coordinator on another node."""

    def __init__(self, loop: Loop, deliver: Callable[[Message], None], lost: Callable[[], None]) -> None:
        self._loop = loop
        self._deliver = deliver
        self._lost = lost
        self._channel: Channel | None = None
        self.local_address = ""

    def connect(self, address: str, port: int, token: bytes, timeout: float) -> None:
        """One try to meet the host.

        Raises:
            OSError: nobody answers there, or not with the right token.
        """
        deadline = time.monotonic() + timeout
        sock = socket.create_connection((address, port), timeout=timeout)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self.local_address = sock.getsockname()[0]
            channel = Channel(sock)
            theirs = _first(channel, deadline)["challenge"]
            mine = os.urandom(16).hex()
            channel.send({"proof": prove(token, str(theirs), "guest"), "challenge": mine})
            try:
                proof = str(_first(channel, deadline).get("proof"))
            except ChannelClosed:
                raise PermissionError(f"{address}:{port} does not accept this job's token") from None
            if not hmac.compare_digest(proof, prove(token, mine, "host")):
                raise PermissionError(f"{address}:{port} does not know this job's token")
        except BaseException:
            sock.close()
            raise
        self._channel = channel
        self._loop.watch(channel, self._read)

    def send(self, message: Message) -> None:
        """A message of this agent to the coordinator; if the host is gone, `lost` is called from the loop."""
        if self._channel is not None:
            with contextlib.suppress(ChannelClosed):
                self._channel.send(message)

    def close(self) -> None:
        """Leave."""
        if self._channel is not None:
            self._loop.forget(self._channel)
            self._channel.close()
            self._channel = None

    def _read(self) -> None:
        assert self._channel is not None
        try:
            for message in self._channel.receive():
                self._deliver(message)
        except ChannelClosed:
            self.close()
            self._lost()


def _first(channel: Channel, deadline: float) -> Message:
    """The next message, waited for."""
    while True:
        messages = channel.receive()
        if messages:
            return messages[0]
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([channel], [], [], left)[0]:
            raise TimeoutError("no answer")
