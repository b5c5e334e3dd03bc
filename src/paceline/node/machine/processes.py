"""Linux processes: what they are and have used, which descend from a process, and which end with it."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING, NamedTuple

from paceline.contract.machine import boot_id as boot_id  # noqa: PLC0414 - goes with the start time of a process
from paceline.node.signals import HANDLED

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
ROOM = "PACELINE_ROOM"
TICKS: int = os.sysconf("SC_CLK_TCK")
_PAGE: int = os.sysconf("SC_PAGE_SIZE")
_ROOM_BYTES = 96 * 1024  # for the variables of a job; the kernel allows 128 KiB for one variable


def _prctl(option: int, value: int) -> None:
    import ctypes  # not needed by those that only read records

    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def die_with(parent: int) -> None:
    """Have the kernel SIGKILL this process when its parent ends; end at once if `parent` is gone already.

    The kernel watches the thread that started this process, so that thread must be the parent's main one.
    """
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def outlive_parent() -> None:
    """Undo `die_with`."""
    _prctl(PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, so that none is left behind (a subreaper)."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


class Process(NamedTuple):
    """A process at one moment, as /proc/<pid>/stat has it."""

    pid: int
    command: str
    state: str  # a letter of proc(5)
    parent: int
    start_time: int  # in clock ticks since boot; with the pid, it identifies a process
    cpu: float  # seconds of a core that its threads have used
    reaped: float  # the same of the children that it has waited for
    resident: int  # bytes in memory, shared ones included


def look(pid: int) -> Process | None:
    """A process as it is now; None if it is gone."""
    if (fields := _fields(pid)) is None:
        return None
    user, system, user_reaped, system_reaped = map(int, fields[13:17])  # in clock ticks
    return Process(
        pid=pid, command=fields[1], state=fields[2], parent=int(fields[3]), start_time=int(fields[21]),
        cpu=(user + system) / TICKS, reaped=(user_reaped + system_reaped) / TICKS, resident=int(fields[23]) * _PAGE,
    )  # fmt: skip


def _fields(pid: int) -> list[str] | None:
    """The fields of /proc/<pid>/stat (`man 5 proc`: field 1 is index 0), or None if the process is gone."""
    try:
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)  # `open` takes twice the time
    except (FileNotFoundError, ProcessLookupError):  # the latter while it is being reaped
        return None
    try:
        text = os.read(descriptor, 4096)
    except ProcessLookupError:
        return None
    finally:
        os.close(descriptor)
    before, _, rest = text.decode(errors="replace").rpartition(")")  # a command may have spaces and brackets
    return [*before.split(" (", 1), *rest.split()]


class Snapshot:
    """All processes at one moment, each read once."""

    def __init__(self) -> None:
        """Read them."""
        self.processes: dict[int, Process] = {}
        self._children: dict[int, list[int]] = {}
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(PermissionError):  # another user's, where /proc hides them
                if (process := look(int(entry))) is not None:
                    self.processes[process.pid] = process
                    self._children.setdefault(process.parent, []).append(process.pid)

    def tree(self, pid: int) -> dict[int, Process]:
        """A process and all its descendants, zombies included (they took time); empty if the process is gone."""
        found = {pid: self.processes[pid]} if pid in self.processes else {}
        queue = list(found)
        while queue:
            for child in self._children.get(queue.pop(), ()):
                if child not in found:  # numbers are given again, so what is read one by one may be a circle
                    found[child] = self.processes[child]
                    queue.append(child)
        return found


def descendants(root: int) -> list[int]:
    """All living descendants of a process, in sessions of their own included; zombies are left out."""
    return [pid for pid, it in Snapshot().tree(root).items() if pid != root and it.state != "Z"]


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if it is gone. With the pid, it identifies a process."""
    process = look(pid)
    return None if process is None or process.state == "Z" else process.start_time


def parents(pid: int) -> dict[int, int]:
    """The parent of a process, its parent and so on, each with its `start_time`."""
    found: dict[int, int] = {}
    while (process := look(pid)) is not None:
        pid = process.parent
        began = start_time(pid)
        if began is None:
            break
        found[pid] = began
    return found


def is_suspended(pid: int) -> bool:
    """Whether a process was stopped by a signal (SIGSTOP, SIGTSTP) and waits for SIGCONT."""
    process = look(pid)
    return process is not None and process.state == "T"


def close_descriptors(kept: Collection[int] = (0, 1, 2)) -> None:
    """Close all descriptors of this process but these."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):  # the descriptor of this listing
                os.close(int(name))


def set_title(text: str) -> None:
    """Set what `ps` and `top` show as this process's command line, as far as the space of the original one reaches.

    Source: `man 5 proc`, fields arg_start and arg_end of /proc/<pid>/stat.
    """
    import ctypes  # not needed by those that only read records

    begin, end = _space(48)
    if begin and end - begin > 1:  # 0: this kernel does not say
        # The last byte stays zero: without it the kernel would read on in the environment.
        title = text.encode(errors="replace")[: end - begin - 1]
        ctypes.memmove(begin, title.ljust(end - begin, b"\0"), end - begin)


def _space(field: int) -> tuple[int, int]:
    """The addresses in this process that a field of its stat and the next one have; zeros if the kernel has none."""
    fields = _fields(os.getpid()) or ()
    return (int(fields[field - 1]), int(fields[field])) if len(fields) > field else (0, 0)


def set_environment(env: Mapping[str, str]) -> None:
    """Replace this process's variables, also what /proc/PID/environ shows of them, as far as its space reaches.

    The space is that of the first variable with which the process was started, `ROOM`; see `with_room`. Source: `man 5
    proc`, fields env_start and env_end of /proc/<pid>/stat.
    """
    import ctypes  # not needed by those that only read records

    os.environ.clear()
    os.environ.update(env)
    text = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in env.items())
    begin, end = _space(50)
    room = min(end - begin, len(ROOM) + 1 + _ROOM_BYTES)  # what is behind it, C libraries may still point to
    if begin and room > 0:
        shown = text if len(text) < room else text[: text.rfind(b"\0", 0, room - 1) + 1]
        ctypes.memmove(begin, shown.ljust(room, b"\0"), room)


def forget_variables(kept: Collection[str]) -> None:
    """Remove all other variables of this process, also from what /proc/PID/environ shows; see `set_environment`."""
    import ctypes  # not needed by those that only read records

    for name in [name for name in os.environ if name not in kept]:
        del os.environ[name]
    begin, end = _space(50)
    at = begin
    for pair in ctypes.string_at(begin, end - begin).split(b"\0") if begin else ():
        if os.fsdecode(pair.partition(b"=")[0]) not in kept:
            ctypes.memset(at, 0, len(pair))
        at += len(pair) + 1


def with_room(env: Mapping[str, str]) -> dict[str, str]:
    """An environment for a process that will take others; see `set_environment`."""
    return {ROOM: "0" * _ROOM_BYTES, **env}


def rank_title(target: str, env: Mapping[str, str]) -> str:
    """The title of a rank: `train.py (rank 3 of 8, job digits-x)`."""
    rank, ranks, job = (env.get(f"PACELINE_{name}", "?") for name in ("RANK", "WORLD_SIZE", "JOB"))
    return f"{os.path.basename(target)} (rank {rank} of {ranks}, job {job})"


def environment(pid: int) -> dict[str, str]:
    """The variables that a process was started with; none where they cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            pairs = file.read().partition(b"\0\0")[0].split(b"\0")  # behind that: see `set_environment`
    except OSError:
        return {}
    return dict(os.fsdecode(pair).split("=", 1) for pair in pairs if b"=" in pair)


def open_files(pid: int) -> dict[str, str]:
    """The number of each descriptor of a process, and its file, pipe or socket, as far as that may be seen."""
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # it was closed meanwhile
                found[name] = os.readlink(f"/proc/{pid}/fd/{name}")
    return found


def signal_process(pid: int, number: int, group: bool = False) -> bool:
    """Send a signal to a process, or to its whole process group; returns whether it was sent.

    It is not to one that is gone already, or that this user may not signal (`sudo …`).
    """
    for send in (os.killpg, os.kill) if group else (os.kill,):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(pid, number)
            return True
    return False


def handles(pid: int, number: int) -> bool:
    """Whether a process has a handler of its own for a signal, or waits for it; False if it is gone."""
    return _has(_masks(pid), number)


def _has(masks: Mapping[bytes, int], number: int) -> bool:
    return any(mask >> (number - 1) & 1 for mask in masks.values())


def _masks(pid: int) -> dict[bytes, int]:
    """The signals that a process blocks (`SigBlk`) and handles (`SigCgt`), as bits; none if it is gone."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            fields = (line.split() for line in file if line.startswith((b"SigCgt:", b"SigBlk:")))
            return {name.rstrip(b":"): int(mask, 16) for name, mask in fields}
    except (OSError, ValueError):
        return {}


def pass_on(pid: int, number: int, group: bool = False) -> bool:
    """Send a signal to a child that handles it, with its descendants if it is a group; returns whether one does.

    A child that this process has just forked blocks what agents handle until it has defaults for these, one of which
    would end it then. Another program that waits for signals blocks others than these, or more.
    """
    members = [pid, *(descendants(pid) if group else ())]
    forked = _masks(os.getpid()).get(b"SigBlk", 0) | sum(1 << (it - 1) for it in HANDLED)
    masks = {member: _masks(member) for member in members}
    handling = [it for it in members if _has(masks[it], number) and masks[it].get(b"SigBlk") != forked]
    for member in handling:
        signal_process(member, number)
    return bool(handling)


def kill_descendants(root: int) -> int:
    """SIGKILL every descendant of a process, once; returns to how many. Repeat until 0: a process may have forked."""
    return sum(signal_process(pid, signal.SIGKILL) for pid in descendants(root))
