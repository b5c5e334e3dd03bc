"""What the kernel knows of a rank: whether it works, and what it waits in. The rank does not take part."""

from __future__ import annotations

import contextlib
import os
import platform
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.node.machine import processes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .connections import Connections

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
        times = _read(f"/proc/{pid}/task/{pid}/schedstat").split()
        cpu, queued = int(times[0]) / 1e9, int(times[1]) / 1e9
    read = written = reads = 0
    with contextlib.suppress(OSError, ValueError, KeyError):
        counters = dict(line.split(": ") for line in _read(f"/proc/{pid}/io").splitlines())
        read, written, reads = int(counters["rchar"]), int(counters["wchar"]), int(counters["syscr"])
    switches = 0
    with contextlib.suppress(OSError, ValueError, KeyError):
        states = dict(line.split(":", 1) for line in _read(f"/proc/{pid}/status").splitlines())
        switches = int(states["voluntary_ctxt_switches"])
    call, file = _call(pid)
    state, all_cpu = (seen.state, seen.cpu) if seen is not None else ("", 0.0)
    return Process(state, cpu, all_cpu, read + written, read, reads, queued, switches, call, file)


def look_at_children(pid: int, connections: Connections) -> Family:
    """The descendants of a process; it takes a look at all processes of the machine to find them."""
    found = [it for it in processes.Snapshot().tree(pid).values() if it.pid != pid and it.state != "Z"]
    states = [(it.state, it.command) for it in found]
    return Family(sum(it.cpu for it in found), states, connections.carried([pid, *(it.pid for it in found)]))


def _call(pid: int) -> tuple[str, str]:
    """The system call of the main thread, and its file."""
    try:
        number, *arguments = _read(f"/proc/{pid}/syscall").split()
        call = _CALLS.get(int(number), "")
        file = os.readlink(f"/proc/{pid}/fd/{int(arguments[0], 16)}") if call in _WITH_FILE else ""
    except (OSError, ValueError, IndexError):  # it runs, or this kernel does not say it
        return "", ""
    return call, file


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()
