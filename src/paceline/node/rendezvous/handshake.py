"""How an agent and a peer prove to each other that they know the job's token."""

from __future__ import annotations

import hmac
import select
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from paceline.contract import handshake
from paceline.node.eventloop.channel import MAX_LINE, Channel, ChannelClosed, Message

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.node.eventloop.loop import Loop


MAX_STRANGERS = 64


STRANGER_SECONDS = 10.0


STRANGER_BYTES = 4096


def prove(token: bytes, side: str, guests: object, hosts: object) -> str:
    """The proof of `side` ("host" or "guest") after both have sent their challenges."""
    return handshake.prove(token, side, *(str(each).encode(errors="replace") for each in (guests, hosts))).hex()


def is_proof(said: object, token: bytes, side: str, guests: object, hosts: object) -> bool:
    """Whether whoever said this knows the token."""
    return hmac.compare_digest(str(said).encode(errors="replace"), prove(token, side, guests, hosts).encode())


class Door:
    """Where the other agents of the job knock: lets those in who know its token."""

    def __init__(
        self, loop: Loop, token: bytes, status: Callable[[], Message], admit: Callable[[Channel], None]
    ) -> None:
        """Nobody can knock before `open`.

        Args:
            loop: of this agent.
            token: of the job.
            status: what visitors are told; those that want to join come in where it says "leads".
            admit: takes the connection of one that comes in.
        """
        self.port = 0
        self._loop = loop
        self._token = token
        self._status = status
        self._admit = admit
        self._listener: socket.socket | None = None
        self._strangers: dict[Channel, tuple[str, str | None, float]] = {}  # our challenge, theirs, when it came

    def open(self, port: int, address: str = "") -> None:
        """Let other agents in at this port, or at any for 0, of one address of this machine or of all.

        Raises:
            OSError: the port cannot be listened on.
        """
        self._listener = socket.create_server((address, port), backlog=128)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._loop.watch(self._listener, self._accept)

    def close(self) -> None:
        """Let nobody in any more."""
        for channel in list(self._strangers):
            self._drop(channel)
        if self._listener is not None:
            self._loop.forget(self._listener)
            self._listener.close()
            self._listener = None

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # it left before it was let in
        now = time.monotonic()
        for channel, (_, _, since) in list(self._strangers.items()):
            if now - since > STRANGER_SECONDS or len(self._strangers) >= MAX_STRANGERS:
                self._drop(channel)
        channel = Channel(sock, limit=STRANGER_BYTES)
        self._strangers[channel] = (handshake.nonce().hex(), None, now)
        self._loop.watch(channel, lambda: self._read(channel))

    def _read(self, channel: Channel) -> None:
        ours, theirs, since = self._strangers[channel]
        try:
            messages = channel.receive()
            if not messages:
                return
            if theirs is None:
                theirs = str(messages[0].get("challenge"))
                self._strangers[channel] = (ours, theirs, since)
                channel.send({"challenge": ours, "proof": prove(self._token, "host", theirs, ours)})
                return
            if not is_proof(messages[0].get("proof"), self._token, "guest", theirs, ours):
                raise ChannelClosed("wrong token")
            status = self._status()
            channel.send(status)
        except ChannelClosed:
            self._drop(channel)
            return
        if not (messages[0].get("joins") and status["leads"]):
            self._drop(channel)
            return
        del self._strangers[channel]
        self._loop.forget(channel)
        channel.limit = MAX_LINE
        self._admit(channel)

    def _drop(self, channel: Channel) -> None:
        self._strangers.pop(channel, None)
        self._loop.forget(channel)
        channel.close()


class Survey:
    """Asks several agents at once who coordinates their job.

    Attributes:
        answers: what they say, by a name that the caller chose; "refused" where there is none any more, and None where
            nobody answers.
    """

    def __init__(self, loop: Loop, places: Sequence[tuple[str, str, int]], token: bytes, timeout: float) -> None:
        """Ask those at these (name, address, port)."""
        self.answers: dict[str, Any] = {}
        self._loop = loop
        self._left = len(places)
        self._lock = threading.Lock()
        self._read, self._write = socket.socketpair()
        loop.watch(self._read, lambda: loop.forget(self._read))
        for name, address, port in places:
            threading.Thread(target=self._ask, args=(name, address, port, token, timeout), daemon=True).start()

    @property
    def is_over(self) -> bool:
        """Whether all have answered, or did not in time."""
        return not self._left

    def close(self) -> None:
        """Listen no more."""
        self._loop.forget(self._read)

    def _ask(self, name: str, address: str, port: int, token: bytes, timeout: float) -> None:
        answer: Any = None
        try:
            channel, answer = knock(address, port, token, timeout, joins=False)
            channel.close()
        except ConnectionRefusedError:
            answer = "refused"
        except OSError:
            pass
        with self._lock:
            self.answers[name] = answer
            self._left -= 1
            if not self._left:
                self._write.close()


def knock(address: str, port: int, token: bytes, timeout: float, *, joins: bool) -> tuple[Channel, Message]:
    """Connect to an agent; returns the connection, and what it says of itself.

    Raises:
        OSError: nobody answers there.
        PermissionError: it does not know the token.
    """
    deadline = time.monotonic() + timeout
    sock = socket.create_connection((address, port), timeout=timeout)
    try:
        channel = Channel(sock)
        mine = handshake.nonce().hex()
        channel.send({"challenge": mine})
        answer = _first(channel, deadline)
        theirs = answer.get("challenge")
        if not is_proof(answer.get("proof"), token, "host", mine, theirs):
            raise PermissionError(f"{address}:{port} does not know this job's token")
        channel.send({"proof": prove(token, "guest", mine, theirs), "joins": joins})
        status = _first(channel, deadline)
    except BaseException:
        sock.close()
        raise
    return channel, status


def _first(channel: Channel, deadline: float) -> Message:
    """The next message, waited for."""
    while True:
        messages = channel.receive()
        if messages:
            return messages[0]
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([channel], [], [], left)[0]:
            raise TimeoutError("no answer")
