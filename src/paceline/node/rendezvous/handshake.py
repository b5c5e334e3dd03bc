"""How two agents meet: they prove to each other that they know the job's token, before they exchange anything else.

both                    the handshake of `contract/links`
initiator → acceptor    {"joins"}                 whether it wants to join, or only asks
acceptor → initiator    its `AgentStatus`
"""

from __future__ import annotations

import functools
import select
import socket
import threading
import time
from typing import TYPE_CHECKING

from paceline.contract.handshake import OtherVersion, WrongKey, derive_key
from paceline.contract.links import HANDSHAKE, Acceptor, initiate, listen
from paceline.node.eventloop.channel import Channel, ChannelClosed, Message
from paceline.node.machine.network import is_here, is_own_ip

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Literal

    from paceline.node.eventloop.loop import Loop
    from paceline.node.journal.status import NodeEntry

    from .messages import AgentStatus


_LOOKUP = 1.0  # seconds for looking the names of agents up, beside the time for asking them


def _key(token: bytes) -> bytes:
    return derive_key(token, "agents")


class Listener:
    """Accepts connections of other agents of the job: those that know its token."""

    def __init__(
        self, loop: Loop, token: bytes, status: Callable[[], AgentStatus], admit: Callable[[Channel], None]
    ) -> None:
        """Nothing listens before `open`."""
        self.port = 0
        self._loop = loop
        self._token = token
        self._status = status
        self._admit = admit
        self._acceptor: Acceptor | None = None
        self._pending: dict[Channel, float] = {}  # since when; agents that have not yet said whether they join

    def open(self, port: int, address: str = "") -> None:
        """Listen on this port, or on any for 0; at this address alone, if one is given."""
        server = listen(port, address)
        self._acceptor = Acceptor(server, _key(self._token), lambda _: True, 0)
        self.port = int(server.getsockname()[1])
        self._loop.watch(self._acceptor, self._accept)

    def close(self) -> None:
        """Stop listening, and drop the peers that have not joined."""
        for channel in list(self._pending):
            self._drop(channel)
        if self._acceptor is not None:
            self._loop.forget(self._acceptor)
            self._acceptor.close()
            self._acceptor.server.close()
            self._acceptor = None

    def _accept(self) -> None:
        assert self._acceptor is not None
        for channel in [it for it, since in self._pending.items() if self._loop.now() - since > HANDSHAKE]:
            self._drop(channel)
        for _, link in self._acceptor.accept(0):
            channel = Channel(*link, accepted=True)
            self._pending[channel] = self._loop.now()
            self._loop.watch(channel, functools.partial(self._read, channel))

    def _read(self, channel: Channel) -> None:
        try:
            messages = channel.receive()
            if not messages:
                return
            status = self._status()
            channel.send(status)
        except ChannelClosed:
            self._drop(channel)
            return
        if not (messages[0].get("joins") and status["leads"]):
            self._drop(channel)
            return
        self._pending.pop(channel, None)
        self._loop.forget(channel)
        self._admit(channel)

    def _drop(self, channel: Channel) -> None:
        self._pending.pop(channel, None)
        self._loop.forget(channel)
        channel.close()


class Network:
    """How an agent reaches the others of its job: over TCP.

    Attributes:
        host: the name of this machine.
    """

    def __init__(self, loop: Loop, token: bytes) -> None:
        """Nothing listens yet."""
        self.host = socket.gethostname()
        self._loop, self._token = loop, token

    def listener(self, status: Callable[[], AgentStatus], admit: Callable[[Channel], None]) -> Listener:
        """What accepts the others' connections; see `Listener`."""
        return Listener(self._loop, self._token, status, admit)

    def connect(self, address: tuple[str, int], timeout: float) -> tuple[Channel, AgentStatus]:
        """Connect to an agent, to follow it; see `connect`."""
        return connect(*address, self._token, timeout, joins=True)

    def survey(self, agents: Sequence[NodeEntry], timeout: float) -> Survey:
        """Ask several agents at the same time; see `Survey`."""
        return Survey(self._loop, agents, self._token, timeout)

    def is_here(self, address: str) -> bool:
        """Whether an address belongs to this machine."""
        return is_here(address)

    def is_own_ip(self, address: str) -> bool:
        """Whether it is an IP address, and belongs to this machine."""
        return is_own_ip(address)


class Survey:
    """Asks several agents at the same time which one coordinates their job.

    Attributes:
        answers: by agent id: what it answers, "refused" if its port refuses connections, "unknown" if its name has no
            address, None if there is no answer.
    """

    def __init__(self, loop: Loop, agents: Sequence[NodeEntry], token: bytes, timeout: float) -> None:
        """Ask these agents."""
        self.answers: dict[str, AgentStatus | Literal["refused", "unknown"] | None] = {}
        self._loop = loop
        self._remaining = len(agents)
        self._is_closed = False
        self._lock = threading.Lock()
        self._read, self._write = socket.socketpair()
        loop.watch(self._read, lambda: loop.forget(self._read))
        loop.after(timeout + _LOOKUP, self.close)  # looking a name up has no limit of its own
        for agent in agents:
            where = (agent["id"], agent["address"], agent["listen"])
            try:
                threading.Thread(target=self._ask, args=(*where, token, timeout), daemon=True).start()
            except RuntimeError:  # there can be no more threads
                self._answered(agent["id"], None)

    @property
    def is_over(self) -> bool:
        """Whether every agent has answered, or its time is over."""
        return self._is_closed or not self._remaining

    def close(self) -> None:
        """Ignore later answers."""
        with self._lock:
            self._is_closed = True
        self._loop.forget(self._read)

    def _ask(self, agent: str, address: str, port: int, token: bytes, timeout: float) -> None:
        answer: AgentStatus | Literal["refused", "unknown"] | None = None
        try:
            channel, answer = connect(address, port, token, timeout, joins=False)
            channel.close()
        except ConnectionRefusedError:
            answer = "refused"
        except socket.gaierror as error:
            answer = None if error.errno == socket.EAI_AGAIN else "unknown"
        except Exception:  # whatever is said there, or wrong with the address, it is no answer
            pass
        self._answered(agent, answer)

    def _answered(self, agent: str, answer: AgentStatus | Literal["refused", "unknown"] | None) -> None:
        with self._lock:
            if not self._is_closed:
                self.answers[agent] = answer
            self._remaining -= 1
            if not self._remaining:
                self._write.close()


def connect(address: str, port: int, token: bytes, timeout: float, *, joins: bool) -> tuple[Channel, AgentStatus]:
    """Connect to an agent; one that does not know the token, or is of another version, is a `PermissionError`."""
    deadline = time.monotonic() + timeout
    sock = _connected(address, port, deadline)
    try:
        channel = Channel(*initiate(sock, _key(token), 0, deadline - time.monotonic()))
        channel.send({"joins": joins})
        status: AgentStatus = _first(channel, deadline)
    except BaseException as error:
        sock.close()
        if isinstance(error, WrongKey):
            do = "start all nodes with the same --rdzv-id and PACELINE_TOKEN"
            raise PermissionError(f"{address}:{port} does not know this job's token; {do}") from None
        if isinstance(error, OtherVersion):
            why = f"{address}:{port} runs another version of paceline; start all nodes with the same"
            raise PermissionError(why) from None
        raise
    return channel, status


def _connected(address: str, port: int, deadline: float) -> socket.socket:
    found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    for number, (family, kind, protocol, _, where) in enumerate(found):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(max(0.001, (deadline - time.monotonic()) / (len(found) - number)))
            sock.connect(where)
        except OSError:
            sock.close()
            if number == len(found) - 1:
                raise
        else:
            return sock
    raise OSError(f"{address} has no address")


def _first(channel: Channel, deadline: float) -> Message:
    """Wait for the next message."""
    poller = select.poll()  # `select` takes no descriptors above 1023
    poller.register(channel, select.POLLIN)
    while True:
        messages = channel.receive()
        if messages:
            return messages[0]
        remaining = deadline - time.monotonic()
        if remaining <= 0 or not poller.poll(1000 * remaining):
            raise TimeoutError("no answer")
