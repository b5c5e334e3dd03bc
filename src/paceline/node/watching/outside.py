"""What the kernel knows of a rank: whether it works, and what it waits in. The rank does not take part."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import os
import platform
import socket
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from paceline.node.machine import processes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from paceline.contract.stands import Answer

# System calls in which programs wait (arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h).
_CALLS = {
    "x86_64": {
        0: "read", 1: "write", 7: "poll", 23: "select", 35: "nanosleep", 42: "connect", 43: "accept", 44: "sendto",
        45: "recvfrom", 46: "sendmsg", 47: "recvmsg", 61: "wait4", 72: "fcntl", 73: "flock", 74: "fsync",
        75: "fdatasync", 202: "futex", 230: "clock_nanosleep", 232: "epoll_wait", 247: "waitid", 270: "pselect6",
        271: "ppoll", 281: "epoll_pwait", 288: "accept4",
    },
    "aarch64": {
        63: "read", 64: "write", 73: "ppoll", 72: "pselect6", 101: "nanosleep", 203: "connect", 202: "accept",
        206: "sendto", 207: "recvfrom", 211: "sendmsg", 212: "recvmsg", 260: "wait4", 25: "fcntl", 32: "flock",
        82: "fsync", 83: "fdatasync", 98: "futex", 115: "clock_nanosleep", 22: "epoll_pwait", 95: "waitid",
        242: "accept4",
    },
}.get(platform.machine(), {})  # fmt: skip
_WITH_FILE = {"read", "write", "sendto", "recvfrom", "sendmsg", "recvmsg", "flock", "fcntl", "fsync", "fdatasync"}


@dataclass(frozen=True)
class Process:
    """A rank's process at one moment."""

    state: str = ""  # a letter of proc(5); "" if it is gone
    cpu: float = 0.0  # seconds that its main thread has used of a core
    all_cpu: float = 0.0  # seconds that all its threads have used
    moved: int = 0  # bytes that it has read and written, without those on sockets
    # those of them that it has read, and those of the children that it has reaped; reads: in how many calls
    read: int = 0
    reads: int = 0
    queued: float = 0.0  # seconds for which its main thread was ready, and waited for a core
    switches: int = 0  # how often its main thread has waited for something
    # call, file: see `stands.Stand`
    call: str = ""
    file: str = ""


@dataclass(frozen=True)
class Family:
    """The descendants of a rank's process."""

    cpu: float = 0.0  # seconds that they have used of a core
    children: list[tuple[str, str]] = field(default_factory=list)  # see `stands.Stand`
    # bytes of their TCP connections and those of the process, see `Connections`; None if that is not known
    carried: Mapping[int, int] | None = None


def look(pid: int) -> Process:
    """A process as it is now; what may not be read of it is left out."""
    seen = processes.look(pid)
    cpu = queued = 0.0
    with contextlib.suppress(OSError, ValueError, IndexError):
        times = text_of(f"/proc/{pid}/task/{pid}/schedstat").split()
        cpu, queued = int(times[0]) / 1e9, int(times[1]) / 1e9
    read = written = reads = 0
    with contextlib.suppress(OSError, ValueError, KeyError):
        counters = dict(line.split(": ") for line in text_of(f"/proc/{pid}/io").splitlines())
        read, written, reads = int(counters["rchar"]), int(counters["wchar"]), int(counters["syscr"])
    switches = 0
    with contextlib.suppress(OSError, ValueError, KeyError):
        states = dict(line.split(":", 1) for line in text_of(f"/proc/{pid}/status").splitlines())
        switches = int(states["voluntary_ctxt_switches"])
    call, file = _call(pid)
    state, all_cpu = (seen.state, seen.cpu) if seen is not None else ("", 0.0)
    return Process(state, cpu, all_cpu, read + written, read, reads, queued, switches, call, file)


def look_at_children(pid: int, now: Moment) -> Family:
    """The descendants of a process."""
    found = [it for it in now.seen.tree(pid).values() if it.pid != pid and it.state != "Z"]
    states = [(it.state, it.command) for it in found]
    return Family(sum(it.cpu for it in found), states, now.carried([pid, *(it.pid for it in found)]))


def _call(pid: int) -> tuple[str, str]:
    """The system call of the main thread, and its file."""
    try:
        number, *arguments = text_of(f"/proc/{pid}/syscall").split()
        call = _CALLS.get(int(number), "")
        file = os.readlink(f"/proc/{pid}/fd/{int(arguments[0], 16)}") if call in _WITH_FILE else ""
    except (OSError, ValueError, IndexError):  # it runs, or this kernel does not say it
        return "", ""
    return call, file


def text_of(path: str) -> str:
    """A file of the kernel; raises OSError if the process is gone, or may not be looked at."""
    with open(path) as file:
        return file.read()


# -- whether a rank moves: pure state, fed with what is seen of it from time to time -----------------------------------

# What a process does that only waits: it wakes now and then to look whether something has come. A DataLoader does every
# 5 s, for about 0.1 ms.
_LEAST_CPU = 0.001  # of a core, used by the main thread
_LEAST_ALL = 0.01  # of a core, used by all threads, or by all children
_LEAST_TICKS = 0.03  # seconds of that; it is counted in ticks of 0.01 s
_LEAST_MOVED = 4096  # bytes per second
_PAUSE = 5.0  # seconds between two bursts of one transfer, at most; a slow link carries what it carries in bursts
_LEAST_SWITCHES = 1.0  # per second, of a main thread that waits on a socket


class Activity:
    """What one rank has done until now.

    Attributes:
        process: as it was seen last.
        family: the same of its descendants; None while it works itself.
    """

    def __init__(self, now: float) -> None:
        self.process = Process()
        self.family: Family | None = None
        self._seen = self._still_since = self._idle_since = now
        self._numbers: dict[str, int] = {}
        self._carried = now  # when it was seen last that bytes had moved on its connections

    def see(self, process: Process, now: float, children: Callable[[], Family]) -> None:
        """Take in how the process is now; `children` looks at its descendants, if it does not work itself."""
        before, seconds = self.process, now - self._seen
        least = max(_LEAST_ALL * seconds, _LEAST_TICKS)
        works = (
            process.cpu - before.cpu >= _LEAST_CPU * seconds
            or process.all_cpu - before.all_cpu >= least
            or process.moved - before.moved >= _LEAST_MOVED * seconds
        )
        known, self.family = self.family, None if works else children()
        if self.family is not None:
            is_same = known is not None and len(known.children) == len(self.family.children)
            works = known is None or not is_same or self.family.cpu - known.cpu >= least
            if self._carry(known, before, process, seconds):
                # A library that sends its metrics every 15 s does not let a hang go on for ever.
                works = works or now - self._carried <= max(_PAUSE, seconds)
                self._carried = now
        if works and process.state not in ("T", "t", "Z", ""):
            self._idle_since = now
        self.process, self._seen = process, now

    def _carry(self, known: Family | None, before: Process, process: Process, seconds: float) -> bool:
        """Whether the main thread, or a connection, has got on with what is sent and received."""
        if known is None or self.family is None:
            return True
        if known.carried is not None and self.family.carried is not None:
            moved = sum(now - known.carried.get(inode, 0) for inode, now in self.family.carried.items())
            return moved >= _LEAST_MOVED * seconds
        waits_there = process.call == "poll" or process.file.startswith("socket:")
        return waits_there and process.switches - before.switches >= _LEAST_SWITCHES * seconds

    def hear(self, answer: Answer, now: float) -> None:
        """Take in what the rank has answered."""
        if answer["numbers"] != self._numbers:
            self._numbers, self._still_since = answer["numbers"], now

    def still(self, now: float) -> float:
        """Seconds for which it has entered no collective."""
        return now - self._still_since

    def idle(self, now: float) -> float:
        """Seconds for which it has not worked."""
        return now - self._idle_since


# -- what TCP connections have carried, as the kernel counts it (sock_diag(7)): /proc/PID/io has no bytes of sockets ---

# include/uapi/linux/netlink.h, sock_diag.h, inet_diag.h, tcp.h
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP = 4, 20, 0x301
_ERROR, _DONE = 2, 3
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBI48x")
_ENDS = struct.Struct("!4xHH16s16s")
_INODE, _ATTRIBUTES = 68, 72
_INFO = 2  # the attribute with a struct tcp_info
_LISTENING = 10
_STATES = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 8 | 1 << _LISTENING  # established, either side closed, listening
_COUNTERS = struct.Struct("=120xQQ")  # bytes acknowledged by the other side, and received
_MAPPED = bytes(10) + b"\xff\xff"  # an IPv4 address as one of IPv6


class _Connection(NamedTuple):
    inode: int
    local: tuple[bytes, int]
    remote: tuple[bytes, int]
    carried: int


class Moment:
    """The processes and connections of this machine at one moment, looked at when they are first asked for.

    Connections between ranks do not count, nor those that others have made to a rank: bytes there are no work of it.
    """

    def __init__(self, ranks: Iterable[int], nodes: Iterable[str] = ()) -> None:
        """Look at nothing yet."""
        self._ranks, self._nodes = ranks, nodes

    @functools.cached_property
    def seen(self) -> processes.Snapshot:
        """All processes."""
        return processes.Snapshot()

    @functools.cached_property
    def _connections(self) -> dict[int, int] | None:
        with contextlib.suppress(OSError, struct.error):
            return self._that_count([*_dump(socket.AF_INET), *_dump(socket.AF_INET6)])
        return None

    def carried(self, pids: Iterable[int]) -> Mapping[int, int] | None:
        """Bytes that the connections of processes have carried, by inode; None if the kernel does not say it."""
        found = self._connections
        return found and {inode: found[inode] for inode in _inodes(pids) if inode in found}

    def _that_count(self, found: list[_Connection]) -> dict[int, int]:
        served = {it.local[1] for it in found if not it.remote[1]}
        made = {(it.local, it.remote): it for it in found if it.remote[1]}
        family = {*self._ranks}.union(*map(processes.parents, self._ranks))
        own, nodes = _inodes(family), set(map(_packed, self._nodes))
        return {
            it.inode: it.carried
            for it in made.values()
            if it.local[1] not in served
            and it.remote[0] not in nodes
            and not ((other := made.get((it.remote, it.local))) and other.inode in own)
        }


def _dump(family: int) -> list[_Connection]:
    """All connections of a family of addresses; raises OSError if the kernel does not know how."""
    found: list[_Connection] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as asked:
        asked.settimeout(1.0)
        request = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << _INFO - 1, 0, _STATES)
        asked.send(_HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 1, 0) + request)
        while True:
            data = asked.recv(1 << 17)
            while data:
                length, kind, *_ = _HEADER.unpack_from(data)
                if kind == _DONE:
                    return found
                if kind == _ERROR:
                    raise OSError("sock_diag")
                found += _parsed(data[_HEADER.size : length])
                data = data[length + 3 & ~3 :]


def _parsed(message: bytes) -> list[_Connection]:
    near, far, local, remote = _ENDS.unpack_from(message)
    size, mapped = (4, b"") if message[0] == socket.AF_INET else (16, _MAPPED)
    ends = [
        (it[12:] if mapped and it.startswith(mapped) else it[:size], port)
        for it, port in ((local, near), (remote, far))
    ]
    inode = int.from_bytes(message[_INODE:_ATTRIBUTES], "little")
    at, carried = _ATTRIBUTES, 0
    while at + 4 <= len(message):
        length, kind = struct.unpack_from("=HH", message, at)
        if kind == _INFO and length >= 4 + _COUNTERS.size:
            carried = sum(_COUNTERS.unpack_from(message, at + 4))
        at += max(length + 3 & ~3, 4)
    return [_Connection(inode, ends[0], ends[1], carried)]


def _packed(address: str) -> bytes:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address.partition("%")[0]).packed
    return b""


def _inodes(pids: Iterable[int]) -> set[int]:
    """The sockets that processes have open, as far as that may be seen."""
    files = (it for pid in pids for it in processes.open_files(pid).values())
    return {int(it[8:-1]) for it in files if it.startswith("socket:[")}
