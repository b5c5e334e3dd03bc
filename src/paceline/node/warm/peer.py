"""Takes the limits and attributes of the process that asks for a job, as if that process had started this one.

All of it is read from the kernel, by the pid that the socket's credentials name.
"""

from __future__ import annotations

import os
import re
import resource
import signal
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# What exec would pass on, and a process cannot take from another one: it must be the same.
_SAME = re.compile(
    r"^(?:Uid|Gid|Groups|Cap(?:Inh|Prm|Eff|Bnd|Amb)|NoNewPrivs|Seccomp|Seccomp_filters|Mems_allowed):.*$", re.MULTILINE
)
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
_OF_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)  # Python ignores them, and what it starts does not
# The files of a cgroup that limit what is in it, and what they hold where they do not.
_LIMITS = {
    "memory.max": "max", "memory.high": "max", "memory.swap.max": "max", "cpu.max": "max", "pids.max": "max",
    "cpu.cfs_quota_us": "-1", "memory.limit_in_bytes": "9223372036854771712", "io.max": "", "cpu.weight": "100",
    "cpu.shares": "1024",
}  # fmt: skip


class Unfit(Exception):
    """This process cannot be as one that the other process has started; says why."""


def take_after(pid: int) -> None:
    """Take the limits, niceness, cores, umask, cgroups and ignored signals of another process of this user.

    The signal mask, the folder and the descriptors are for the caller to set.
    """
    try:
        status = (_PROC / str(pid) / "status").read_text()
        _check_same(pid, status)
        _enter_cgroups(pid)
        _take_limits(pid)
        _take_priority(pid)
        os.umask(int(_field(status, "Umask"), 8))
        _ignore(set(_numbers(int(_field(status, "SigIgn"), 16))))
    except (OSError, ValueError, AttributeError) as error:
        raise Unfit(f"the limits of process {pid} cannot be taken: {error}") from None


def _field(status: str, name: str) -> str:
    found = re.search(rf"^{name}:\s*(.*)$", status, re.MULTILINE)
    if found is None:
        raise ValueError(f"the kernel does not say its {name}")
    return found[1]


def _numbers(mask: int) -> Iterator[int]:
    return (number for number in range(1, 65) if mask >> (number - 1) & 1)


def _check_same(pid: int, status: str) -> None:
    own = (_PROC / "self/status").read_text()
    for mine, theirs in zip(_SAME.findall(own), _SAME.findall(status)):
        if mine != theirs:
            raise Unfit(f"this command has other rights: {' '.join(theirs.split())}, not {' '.join(mine.split()[1:])}")
    for name in _NAMESPACES:
        if os.stat(_PROC / "self/ns" / name).st_ino != os.stat(_PROC / str(pid) / "ns" / name).st_ino:
            raise Unfit(f"this command is in another namespace ({name})")
    if not os.path.samestat(os.stat("/proc/self/root"), os.stat(f"/proc/{pid}/root")):
        raise Unfit("this command has another root folder")
    labels = [path.read_bytes() if path.exists() else b"" for path in map(_label, ("self", str(pid)))]
    if labels[0] != labels[1]:
        raise Unfit("this command has another security label")


def _label(pid: str) -> Path:
    return _PROC / pid / "attr/apparmor/current"


def _enter_cgroups(pid: int) -> None:
    """Enter the cgroups of a process, or stay where neither cgroup sets a limit that the other one does not."""
    mine, theirs = _cgroups("self"), _cgroups(str(pid))
    for controllers, path in theirs.items():
        own = mine.get(controllers)
        if own == path or own is None:
            continue
        root = _CGROUPS / "unified" if not controllers and (_CGROUPS / "unified").is_dir() else _CGROUPS / controllers
        if controllers.startswith("name="):
            root = _CGROUPS / controllers[5:]
        try:
            (root / path.lstrip("/") / "cgroup.procs").write_text(str(os.getpid()))
        except OSError:
            shared = Path(os.path.commonpath([own, path]))
            for one in (Path(own), Path(path)):
                for level in (one, *one.parents):
                    if level == shared:
                        break
                    if limit := _limit(root / str(level).lstrip("/")):
                        raise Unfit(
                            f"this command is in the cgroup {path}, which the warm process may not enter: {limit}"
                        ) from None


def _cgroups(pid: str) -> dict[str, str]:
    """The cgroup of a process in each hierarchy, by the hierarchy's controllers."""
    lines = (_PROC / pid / "cgroup").read_text().splitlines()
    return {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}


def _limit(folder: Path) -> str:
    """A limit that a cgroup sets, as NAME is VALUE; "" if it sets none. A cgroup that cannot be seen might set one."""
    if not folder.is_dir():
        return f"{folder} cannot be seen"
    for name, none in _LIMITS.items():
        try:
            value = (folder / name).read_text().strip()
        except OSError:
            continue
        if value != none and value.partition(" ")[0] != none:
            return f"{name} is {value}"
    return ""


def _take_limits(pid: int) -> None:
    size = int((_PROC / "self/statm").read_text().split()[0]) * resource.getpagesize()
    for number in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        allowed = resource.prlimit(pid, number)[0]
        if allowed != resource.RLIM_INFINITY and allowed < 2 * size:
            raise Unfit(
                f"the limit of memory of this command is {allowed >> 20} MiB, and the warm process has {size >> 20}"
            )
    for name in dir(resource):
        if name.startswith("RLIMIT_"):
            number = getattr(resource, name)
            wanted = resource.prlimit(pid, number)
            if wanted != resource.getrlimit(number):
                try:
                    resource.setrlimit(number, wanted)
                except (OSError, ValueError):
                    raise Unfit(f"the {name} of this command is higher than the warm process may set") from None


def _take_priority(pid: int) -> None:
    if (cores := os.sched_getaffinity(pid)) != os.sched_getaffinity(0):
        os.sched_setaffinity(0, cores)
    policy = os.sched_getscheduler(pid)
    if policy != os.sched_getscheduler(0):
        os.sched_setscheduler(0, policy, os.sched_getparam(pid))
    niceness = os.getpriority(os.PRIO_PROCESS, pid)
    if niceness != os.getpriority(os.PRIO_PROCESS, 0):
        try:
            os.setpriority(os.PRIO_PROCESS, 0, niceness)
        except PermissionError:
            raise Unfit(f"the niceness of this command is {niceness}, lower than the warm process may set") from None
    adjustment = (_PROC / str(pid) / "oom_score_adj").read_text()
    if adjustment != (_PROC / "self/oom_score_adj").read_text():
        (_PROC / "self/oom_score_adj").write_text(adjustment)


def _ignore(numbers: Collection[int]) -> None:
    """Ignore these signals, and set all others to what they are when Python starts."""
    for number in signal.valid_signals():
        if number in (signal.SIGKILL, signal.SIGSTOP) or number in _OF_PYTHON:
            continue
        if number in numbers:
            signal.signal(number, signal.SIG_IGN)
        elif number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
        elif signal.getsignal(number) is not signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
