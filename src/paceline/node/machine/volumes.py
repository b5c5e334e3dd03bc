"""Whether the data of a volume is on this machine, and how a job sees it at the path that it wants."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from paceline.node.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paceline.contract.messages import VolumeLook
    from paceline.contract.records import DataRecord

_CLONE_NEWNS = 0x00020000
_CLONE_NEWUSER = 0x10000000
_MS_BIND = 0x1000
_MS_REC = 0x4000
_MS_SLAVE = 0x80000
_PROBE_SECONDS = 10.0  # a network file system may not answer
_PROBE = (
    "import sys; sys.path[:] = eval(sys.argv[1]); from paceline.node.machine.volumes import probe; probe(*sys.argv[2:])"
)


def look(path: str) -> VolumeLook:
    """Try to read a folder or file: why it cannot be read (None: it can), and the bytes of its file system."""
    try:
        if os.path.isdir(path):
            with os.scandir(path) as entries:
                next(entries, None)
        else:
            with open(path, "rb") as file:
                file.read(1)
        space = os.statvfs(path)
        size, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
        return {"problem": None, "size": size, "free": free}
    except OSError as error:
        return {"problem": (error.strerror or str(error)).lower(), "size": None, "free": None}


def is_same(path: str, wanted: str) -> bool:
    """Whether a volume is visible at the path that a job wants."""
    try:
        return os.path.samefile(path, wanted)
    except (OSError, ValueError):
        return False


def find(source: DataRecord, root: str, working_dir: str) -> DataRecord:
    """A volume that a job wants, and whether the job finds it at the path where it wants it."""
    problem = look(source["path"])["problem"]
    if problem is not None:
        raise Refused(f"volume {source['volume']}, {source['path']}: {problem}; correct it in the settings")
    return placed(source, root, working_dir)


def placed(source: DataRecord, root: str, working_dir: str) -> DataRecord:
    """The same for a volume that can be read."""
    path, wanted = source["path"], source["wanted"]
    if is_same(path, wanted):
        return {**source, "visible": True, "mount": False, "problem": None}
    problem = mount_problem(path, wanted, (root, working_dir, sys.prefix, sys.base_prefix))
    return {**source, "visible": problem is None, "mount": problem is None, "problem": problem}


def notes(sources: Iterable[DataRecord]) -> list[str]:
    """Lines about the volumes that are not at the path where a job wants them."""
    return [
        f"volume {it['volume']} cannot be mounted at {it['wanted']}: {it['problem']}; "
        f"the job reads its path, {it['path']}, from {it['variable']}"
        for it in sources
        if not it["visible"]
    ]


# -- mounted for the processes of one job: bind mounts in a mount namespace of their own -------------------------------

# Nothing outside of the job sees them, and they end with the job. Root needs no more than a mount namespace; others
# need a user namespace, which some systems do not allow. Source: mount_namespaces(7), user_namespaces(7).


def mount_problem(path: str, wanted: str, needed: Iterable[str] = ()) -> str | None:
    """Why a folder or file cannot be mounted for a job; None if it can. Another process tries it."""
    wanted = os.path.realpath(wanted)
    for folder in needed:
        if os.path.commonpath([wanted, os.path.realpath(folder)]) == wanted:
            return f"it would hide {folder}"
    if not os.path.lexists(wanted):
        if os.geteuid() != 0:
            return f"{wanted} does not exist"
        if not os.path.isdir(path):
            return f"{wanted} does not exist, and the volume is a file"
    elif os.path.isdir(path) != os.path.isdir(wanted):
        return f"{wanted} is {'a folder' if os.path.isdir(wanted) else 'a file'}, and the volume is not"
    command = [sys.executable, "-c", _PROBE, repr([it for it in sys.path if it]), path, wanted]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PROBE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {_PROBE_SECONDS:g} s"
    if done.returncode == 0:
        return None
    lines = done.stderr.decode(errors="replace").splitlines()
    return lines[-1] if lines else f"the attempt ended with exit code {done.returncode}"


def probe(path: str, wanted: str) -> None:
    """Mount in a process of its own, to see whether that works; makes no folder."""
    there = wanted
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    try:
        enter([(path, there)])
    except OSError as error:
        raise SystemExit((error.strerror or str(error)).lower()) from None


def enter(binds: Sequence[tuple[str, str]]) -> None:
    """Give this process, which must have a single thread, a mount namespace with these bind mounts."""
    if not binds:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.geteuid(), os.getegid()
    try:
        _check(libc.unshare(_CLONE_NEWNS), "unshare")
    except PermissionError:
        _check(libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS), "unshare")
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    # What the system mounts later is seen here, and what is mounted here is seen nowhere else.
    _check(libc.mount(None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_SLAVE), None), "/")
    for path, wanted in binds:
        if not os.path.lexists(wanted):
            os.makedirs(wanted)
        source, target = os.fsencode(path), os.fsencode(wanted)
        _check(libc.mount(source, target, None, ctypes.c_ulong(_MS_REC | _MS_BIND), None), wanted)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
