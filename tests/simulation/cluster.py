"""Machines, their network and their processes in one process, in virtual time.

Only what decides nothing is simulated: clocks, sockets, processes and files. Each process has a stack of its own, and
all take turns on one thread, so what happens depends on the seed alone.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import struct
from collections import deque
from typing import TYPE_CHECKING, Any

from greenlet import greenlet

from paceline.node.eventloop.channel import ChannelClosed, decode, encode
from paceline.node.eventloop.loop import Loop
from paceline.node.rendezvous.links import BEAT

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Collection, Sequence

    from paceline.node.eventloop.channel import Message
    from paceline.node.journal.status import Agreement, NodeEntry
    from paceline.node.rendezvous.messages import AgentStatus

PORT = 29500
_UNACKNOWLEDGED = 1.4  # seconds in which a kernel to which no acknowledgement comes sends a last message
_BACKOFF = 4.0  # seconds after which a kernel sends again what a network that is well again has not delivered
_INFO = struct.Struct("=16xI32x2I")  # of Linux' tcp_info, as `rendezvous.silence` reads it


class Killed(BaseException):
    """The process was killed."""


class Cluster:
    """The time, and what is to happen."""

    def __init__(self, rng: random.Random, latency: float, log: list[str] | None = None) -> None:
        """Nothing has happened; what happens goes to the log."""
        self.now, self.rng, self.latency, self._log = 0.0, rng, latency, log
        self.machines: list[Machine] = []
        self.names: dict[str, Machine] = {}  # and addresses
        self.connections: list[Connection] = []
        self.blocked: set[tuple[Machine, Machine]] = set()  # from the first nothing comes to the second
        self.messages = self.bytes = 0
        self._moments: dict[str, list[tuple[int, Callable[[], None]]]] = {}  # what follows the n-th such moment
        self._seen: dict[str, int] = {}
        self._parsed: tuple[bytes, dict[str, Any]] = b"", {}
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._numbers), call))

    def run(self, until: float, is_over: Callable[[], bool]) -> None:
        queue = self._queue
        while queue and queue[0][0] <= until and not is_over():
            self.now, _, call = heapq.heappop(queue)
            call()

    def parsed(self, line: bytes) -> dict[str, Any]:
        """A message; of the last compressed one, which many receive, a copy that shares its values."""
        if line.startswith(b"{"):
            return decode(line)
        if line is not self._parsed[0]:
            self._parsed = line, decode(line)
        return dict(self._parsed[1])

    def text(self, line: bytes) -> str:
        """How the JSON of a message begins."""
        return line[:100].decode() if line.startswith(b"{") else json.dumps({"do": self.parsed(line)["do"]})

    def at_moment(self, name: str, number: int, call: Callable[[], None]) -> None:
        """Call at the n-th message, record or action of this name."""
        self._moments.setdefault(name, []).append((number, call))

    def moment(self, name: str) -> None:
        """A message is sent, something is recorded or done."""
        if name in self._moments:
            self._seen[name] = seen = self._seen.get(name, 0) + 1
            for number, call in self._moments[name]:
                if number == seen:
                    call()

    @property
    def has_log(self) -> bool:
        return self._log is not None

    def write(self, line: str) -> None:
        """Into the log, if there is one."""
        if self._log is not None:
            self._log.append(f"{self.now:8.2f}  {line}")

    def jitter(self, seconds: float) -> float:
        return self.rng.random() * seconds

    def passes(self, one: Machine, other: Machine) -> bool:
        return one is other or ((one, other) not in self.blocked and not one.is_off and not other.is_off)

    def block(self, pairs: Collection[tuple[Machine, Machine]], seconds: float) -> None:
        """The network does not deliver between these machines for some seconds."""
        new = set(pairs) - self.blocked
        self.blocked |= new
        self.after(seconds, lambda: (self.blocked.difference_update(new), self.paths_change()))
        self.paths_change()

    def paths_change(self) -> None:
        for connection in self.connections:
            for end in connection.ends:
                end.path_changes()


class Machine:
    """A machine with a clock and a disk of its own; one agent of a job runs there at a time."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster, self.name = cluster, name
        self.address = f"10.0.{len(cluster.machines) // 250}.{len(cluster.machines) % 250 + 1}"
        self.clock = cluster.jitter(1e6)  # what its monotonic clock is ahead
        self.wall_ahead = self.clock % 1000 - 500  # seconds by which its clock is wrong
        self.is_off = False  # or cut off, or suspended with its kernel
        self.on_since = 0.0
        self.slowness = 0.0  # seconds that a process may wait until it runs
        self.is_full = False
        self.agreement: Agreement | None = None  # on its disk, see `RunDirectory.note_agreement`
        self.listening: dict[int, Listener] = {}
        self.processes: list[Process] = []
        cluster.machines.append(self)
        cluster.names.update({name: self, self.address: self})

    @property
    def wall(self) -> float:
        """Its clock, in seconds since the epoch, which is set anew now and then."""
        return 1e9 + self.cluster.now + self.wall_ahead

    @property
    def was_off(self) -> bool:
        """Whether it is off, or was."""
        return self.is_off or self.on_since > 0.0

    def turn_off(self, seconds: float, reboots: bool) -> None:
        """Without power, or suspended as a whole; only a process of a machine that does not reboot goes on."""
        self.is_off = True
        processes = self.processes[:]
        for process in processes:
            process.suspend(seconds)
            if reboots:
                process.is_silent = True
                process.kill()
        self.cluster.paths_change()
        self.cluster.after(seconds, lambda: self._turn_on(processes, reboots))

    def _turn_on(self, processes: list[Process], reboots: bool) -> None:
        self.is_off, self.on_since = False, self.cluster.now
        for process in processes if reboots else ():
            process.close_channels()  # its kernel knows nothing of them
        self.cluster.paths_change()


class Process:
    """An agent's process, from its start to its end.

    Attributes:
        exit_code: None as long as it runs; -9 if it was killed.
        block: seconds for which it waits in a system call and handles nothing.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine, self.cluster = machine, machine.cluster
        self.loop = SimulatedLoop(self)
        self.exit_code: int | None = None
        self.ended_at = float("inf")
        self.is_silent = False  # its machine went with it
        self.suspended_until = 0.0
        self.channels: list[Channel] = []
        self.at_end: list[Callable[[], None]] = []
        self._is_blocked = self._is_in_call = False
        self.port = 40000  # that is free
        self._stack: greenlet
        machine.processes.append(self)

    def start(self, function: Callable[[], int]) -> None:
        def main() -> None:
            with contextlib.suppress(Killed):
                self.end(function())

        self._stack = greenlet(main)
        self._stack.switch()

    @property
    def is_suspended(self) -> bool:
        return self.cluster.now < self.suspended_until

    @property
    def unread(self) -> list[str]:
        """What each message does that has come to it, on a connection that it still reads."""
        watched = [channel for channel in self.channels if id(channel) in self.loop._watched]
        return [line.split(b'"', 4)[3].decode() for channel in watched for line in channel.inbox]

    def suspend(self, seconds: float) -> None:
        self.suspended_until = max(self.suspended_until, self.cluster.now + seconds)
        self.cluster.after(seconds, self.loop.wake)

    def kill(self) -> None:
        """SIGKILL: the kernel closes what it had."""
        if self.exit_code is None:
            self.end(-9)
            self._stack.throw(Killed)

    def end(self, code: int) -> None:
        """It has ended."""
        self.exit_code, self.ended_at = code, self.cluster.now
        for call in self.at_end:
            call()
        self.machine.listening = {port: it for port, it in self.machine.listening.items() if it.process is not self}
        self.machine.processes.remove(self)
        if not self.is_silent:
            self.close_channels()

    def close_channels(self) -> None:
        for channel in self.channels:
            channel.close()

    # -- called by the process itself ----------------------------------------------------------------------------------

    def pause(self) -> None:
        """Until something happens that it waits for."""
        self._stack.parent.switch()

    def wait_in_call(self, is_over: Callable[[], bool], seconds: float) -> None:
        """Wait in a system call: nothing else is handled meanwhile."""
        deadline = self.cluster.now + seconds
        self._is_in_call = True
        self.cluster.after(seconds, self.loop.wake)
        while not is_over() and self.cluster.now < deadline:
            self.pause()
        self._is_in_call = False

    # -- called by the cluster -----------------------------------------------------------------------------------------

    def go_on(self) -> None:
        """Let it handle what has happened, if it can."""
        if self.exit_code is not None or self.is_suspended:
            return
        if self._is_in_call:
            self._stack.switch()
            return
        try:
            is_ready = self.loop.advance()
        except Exception as error:
            self._stack.throw(error)
        else:
            if is_ready:
                self._stack.switch()


class SimulatedLoop(Loop):
    """The agent's loop, whose waiting lets virtual time pass."""

    def __init__(self, process: Process) -> None:
        self._process, self._cluster = process, process.machine.cluster
        self._timers, self._numbers = [], itertools.count()
        self._watched: dict[int, tuple[Any, Callable[[], None]]] = {}
        self._readable: dict[int, None] = {}
        self._signals: list[int] = []
        self._wakes_at = float("inf")
        self._waits_for: tuple[Callable[[], bool], float | None] | None = None
        self._holds: bool | None = None
        self._has_waited = False

    def now(self) -> float:
        return self._cluster.now + self._process.machine.clock

    def watch(self, source: Any, callback: Callable[[], None]) -> None:
        self._watched[id(source)] = source, callback
        source.loop = self
        if source.is_readable:
            self.is_readable(source)

    def forget(self, source: Any) -> None:
        self._watched.pop(id(source), None)
        self._readable.pop(id(source), None)

    def catch(self, signals: Collection[int], callback: Callable[[int], None]) -> None:
        self._on_signal = callback

    def is_readable(self, source: Any) -> None:
        if id(source) in self._watched:
            self._readable[id(source)] = None
            self.wake()

    def signal(self, number: int) -> None:
        self._signals.append(number)
        self.wake()

    def wake(self, seconds: float = 0.0) -> None:
        """Let the process run so many seconds from now, or before."""
        at = self._cluster.now + seconds
        if at < self._wakes_at:
            self._wakes_at = at
            slowness = self._process.machine.slowness
            self._cluster.after(seconds + (self._cluster.jitter(slowness) if slowness else 0.0), lambda: self._wake(at))

    def _wake(self, at: float) -> None:
        if at == self._wakes_at:  # else it has been woken before
            self._wakes_at = float("inf")
            self._process.go_on()

    def run_until(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
        assert self._waits_for is None, "what is handled while the agent waits must not wait itself"
        self._waits_for = condition, None if timeout is None else self.now() + timeout
        try:
            if not self.advance():
                self._process.pause()
        finally:
            self._waits_for = None
        assert self._holds is not None
        return self._holds

    def advance(self) -> bool:
        """Handle what there is; returns whether `run_until` is to return."""
        if self._waits_for is None:
            return False
        self._has_waited = False
        while not self._has_waited:
            self._holds = self._turn(*self._waits_for)
            if self._holds is not None:
                return True
        return False

    def _wait(self, timeout: float | None) -> None:
        if not self._signals and not self._readable and timeout != 0.0:
            self._has_waited = True
            if timeout is not None:
                self.wake(timeout + 1e-9)  # never before the deadline
        signals, self._signals = sorted(self._signals), []
        for number in signals:
            self._on_signal(number)
        for key in list(self._readable):
            if key in self._readable:
                del self._readable[key]
                source, callback = self._watched[key]
                callback()
                if source.is_readable:
                    self.is_readable(source)


class Socket:
    """What is asked of a connection's socket."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def getsockname(self) -> tuple[str, int]:
        return self._channel.process.machine.address, 0

    def getsockopt(self, *_: int) -> bytes:
        since = self._channel.silent_since
        milliseconds = 200 if since is None else int(1000 * (self._channel.process.cluster.now - since))
        return _INFO.pack(1448, milliseconds, milliseconds)


class Connection:
    """A TCP connection: what is sent arrives, in order, when the network delivers again."""

    def __init__(self, one: Process, other: Process) -> None:
        self.ends = Channel(one), Channel(other)
        self.ends[0].other, self.ends[1].other = self.ends[1], self.ends[0]
        one.cluster.connections.append(self)


class Channel:
    """One end of a connection, as `eventloop.channel.Channel` is to its owner.

    Attributes:
        silent_since: since when no packet comes from the other kernel.
        inbox: what has come, and is not read.
    """

    limit = 0
    wants_write = False
    other: Channel

    def __init__(self, process: Process) -> None:
        self.process, self.socket = process, Socket(self)
        self.loop: SimulatedLoop | None = None
        self.silent_since: float | None = None
        self._is_stalled = False
        self._held: list[bytes | None] = []
        self.inbox: list[bytes] = []
        self._is_open, self._is_ended = True, False
        self._last = 0.0
        process.channels.append(self)

    @property
    def is_readable(self) -> bool:
        return bool(self.inbox) or self._is_ended

    def fileno(self) -> int:
        return 1 if self._is_open else -1

    def put(self, line: bytes) -> None:
        if not self._is_open or self._is_ended:
            raise ChannelClosed("gone")
        if line is not BEAT:
            cluster = self.process.cluster
            cluster.messages, cluster.bytes = cluster.messages + 1, cluster.bytes + len(line)
            text = cluster.text(line)
            cluster.moment(text.split('"', 4)[3])
            cluster.write(f"{self.process.machine.name} → {self.other.process.machine.name}  {text}")
        self._transmit(line)

    def _transmit(self, message: bytes | None) -> None:
        cluster, other = self.process.cluster, self.other
        self._last = at = max(self._last, cluster.now + cluster.jitter(cluster.latency))
        cluster.after(at - cluster.now, lambda: other._arrive(message))

    def _arrive(self, message: bytes | None) -> None:
        if self._is_stalled:
            self._held.append(message)
        elif self._is_open:
            if message is None:
                self._is_ended = True
            else:
                self.inbox.append(message)
            if self.loop is not None:
                self.loop.is_readable(self)

    @property
    def passes(self) -> bool:
        """Whether the network delivers to this end, and acknowledgements to the other."""
        here, there = self.process.machine, self.other.process.machine
        return self.process.cluster.passes(there, here) and self.process.cluster.passes(here, there)

    def path_changes(self) -> None:
        """What comes to this end is held back as long as the network does not deliver it, or no acknowledgement."""
        cluster = self.process.cluster
        if self.passes:
            if self._is_stalled:
                cluster.after(cluster.jitter(_BACKOFF), self._flow)
        elif self._is_stalled:
            self._listen()
        elif not cluster.passes(self.other.process.machine, self.process.machine):
            self._stall()
        else:
            cluster.after(_UNACKNOWLEDGED, self._stall)

    def _stall(self) -> None:
        if not self._is_stalled and not self.passes:
            self._is_stalled = True
            self._listen()
            self.other._listen()

    def _listen(self) -> None:
        """Whether packets come: what the other end sends, or acknowledgements of what it receives."""
        if not self._is_stalled or (self.passes and not self.other._is_stalled):
            self.silent_since = None
        elif self.silent_since is None:
            self.silent_since = self.process.cluster.now

    def _flow(self) -> None:
        if self.passes:
            self._is_stalled = False
            self._listen()
            self.other._listen()
            held, self._held = self._held, []
            for message in held:
                self._arrive(message)

    def receive(self) -> list[Message]:
        if self.inbox:
            lines, self.inbox = self.inbox, []
            return [self.process.cluster.parsed(line) for line in lines]
        if self._is_ended or not self._is_open:
            raise ChannelClosed("the other side closed the connection", is_dead=True)
        return []

    def part(self, message: Any) -> None:
        if self._is_open and not self._is_ended:
            self.put(encode(message))

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._transmit(None)


class Request:
    """A connection that asks for the other side's status, and whether it is let in."""

    def __init__(self, process: Process, address: tuple[str, int], joins: bool, answered: Callable[[], None]) -> None:
        self.process, self.joins, self._answered = process, joins, answered
        self.channel: Channel | None = None
        self.answer: AgentStatus | OSError | None = None
        cluster, self.machine = process.cluster, process.machine
        self._target, self._port = cluster.names.get(address[0]), address[1]
        cluster.after(cluster.jitter(cluster.latency), self._arrive)

    def _arrive(self) -> None:
        cluster, target = self.process.cluster, self._target
        if target is None or not (cluster.passes(self.machine, target) and cluster.passes(target, self.machine)):
            return  # nobody answers
        listener = target.listening.get(self._port)
        if listener is None:
            self.settle(ConnectionRefusedError("refused"))
        else:
            listener.requests.append(self)
            if listener.loop is not None:
                listener.loop.is_readable(listener)

    def settle(self, answer: AgentStatus | OSError) -> None:
        """The answer is on its way."""
        cluster, target = self.process.cluster, self._target
        assert target is not None

        def arrive() -> None:
            if cluster.passes(target, self.machine):
                self.answer = answer
                self._answered()

        cluster.after(cluster.jitter(cluster.latency), arrive)


class Listener:
    """As `rendezvous.handshake.Listener`, for processes that know the token."""

    def __init__(self, process: Process, status: Callable[[], AgentStatus], admit: Callable[[Channel], None]) -> None:
        self.port = 0
        self.requests: deque[Request] = deque()
        self.loop: SimulatedLoop | None = None
        self.process, self._status, self._admit = process, status, admit

    @property
    def is_readable(self) -> bool:
        return bool(self.requests)

    def open(self, port: int, address: str = "") -> None:
        listening = self.process.machine.listening
        if port in listening:
            raise OSError(98, "Address already in use")
        self.port = port or self.process.port
        listening[self.port] = self
        self.process.loop.watch(self, self._read)

    def close(self) -> None:
        self.process.loop.forget(self)
        if self.process.machine.listening.get(self.port) is self:
            del self.process.machine.listening[self.port]

    def _read(self) -> None:
        while self.requests:
            request, status = self.requests.popleft(), self._status()
            if request.process.exit_code is None:
                if request.joins and status["leads"]:
                    theirs, ours = Connection(request.process, self.process).ends
                    request.channel = theirs
                    self._admit(ours)
                request.settle(json.loads(json.dumps(status)))


class Survey:
    """As `rendezvous.handshake.Survey`."""

    def __init__(self, process: Process, agents: Sequence[NodeEntry], seconds: float) -> None:
        self.answers: dict[str, Any] = {}
        self._loop, self._agents, self._remaining = process.loop, agents, len(agents)
        for agent in agents:
            self._ask(process, agent)
        process.cluster.after(seconds, self._end)

    def _ask(self, process: Process, agent: NodeEntry) -> None:
        def answered() -> None:
            if agent["id"] not in self.answers and self._remaining > 0:
                is_status = isinstance(request.answer, dict)
                self.answers[agent["id"]] = request.answer if is_status else "refused"
                self._remaining -= 1
                self._loop.wake()

        request = Request(process, (agent["address"], agent["listen"]), False, answered)

    def _end(self) -> None:
        for agent in self._agents if self._remaining > 0 else ():
            self.answers.setdefault(agent["id"], None)
        self._remaining = 0
        self._loop.wake()

    @property
    def is_over(self) -> bool:
        return self._remaining <= 0

    def close(self) -> None:
        self._remaining = 0


class Network:
    """As `rendezvous.handshake.Network`."""

    def __init__(self, process: Process) -> None:
        self._process, self.host = process, process.machine.name

    def listener(self, status: Callable[[], AgentStatus], admit: Callable[[Channel], None]) -> Listener:
        return Listener(self._process, status, admit)

    def connect(self, address: tuple[str, int], timeout: float) -> tuple[Channel, AgentStatus]:
        process = self._process
        request = Request(process, address, True, process.loop.wake)
        process.wait_in_call(lambda: request.answer is not None, timeout)
        if isinstance(request.answer, dict):
            return request.channel or Connection(process, process).ends[0], request.answer
        if request.channel is not None:
            request.channel.close()
        raise request.answer or TimeoutError("no answer")

    def survey(self, agents: Sequence[NodeEntry], timeout: float) -> Survey:
        return Survey(self._process, agents, timeout)

    def is_here(self, address: str) -> bool:
        return address == self._process.machine.address

    def is_own_ip(self, address: str) -> bool:
        return address == self._process.machine.address
