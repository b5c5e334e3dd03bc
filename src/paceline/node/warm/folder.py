"""The folder of a user's warm servers on this machine: their sockets, and a lock for each."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import stat
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, cast

from paceline.contract.local_sockets import peer_of, reachable
from paceline.node.errors import Refused
from paceline.node.files import list_names

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.contract.messages import WarmRecord

    from .messages import Message, Ready

VARIABLE, HOME = "PACELINE_WARM_DIR", "PACELINE_HOME"
MOST_BYTES = 1 << 20  # of a message: a request holds the variables of a job
_SOCKET, LOG, _LOCK = ".sock", ".log", ".lock"


def folder(home: str | None = None) -> Path:
    """Where the servers of this user and a folder of jobs on this machine listen; it need not exist.

    It is on a local file system, so that machines that share a home folder do not share it.
    """
    home = os.environ.get(HOME) if home is None else home
    if given := os.environ.get(VARIABLE):
        return Path(os.path.abspath(given))
    belongs = f"-{zlib.crc32(os.fsencode(os.path.realpath(home))):08x}" if home else ""
    return Path(f"/tmp/paceline-warm-{os.getuid()}{belongs}")


def is_private(path: Path) -> bool:
    """Whether a folder belongs to this user, and nobody else may enter it; a link to one does not count."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def unusable(path: Path) -> str:
    """Why a folder that exists is not used; "" if it is, or if there is none."""
    if not os.path.lexists(path) or is_private(path):
        return ""
    return f"{path} does not belong to you alone; remove it, or name another folder in {VARIABLE}"


def make(path: Path) -> None:
    """Make the folder."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise Refused(f"cannot make {path}: {error.strerror}; name another folder in {VARIABLE}") from None
    if why := unusable(path):
        raise Refused(why)


def key_of(python: Sequence[str], preload: Sequence[str], env: Mapping[str, str]) -> str:
    """The beginning of the names of servers for an interpreter, modules and variables; a number follows."""
    import hashlib  # not needed by those that only look at jobs

    text = json.dumps([interpreter(python), sorted(preload), sorted(env.items())])
    return f"{len(preload):02}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def interpreter(python: Sequence[str]) -> list[str]:
    """What identifies an interpreter and its options: `python` and `python3` of one environment are the same."""
    return [os.path.dirname(python[0]), os.path.realpath(python[0]), *python[1:]]


def keys(path: Path) -> list[str]:
    """The names of the servers that may listen; those that have imported the most come first."""
    return [name[: -len(_SOCKET)] for name in reversed(list_names(path)) if name.endswith(_SOCKET)]


def listen(path: Path, key: str) -> socket.socket:
    """Listen as this server; its lock is held."""
    with contextlib.suppress(FileNotFoundError):
        (path / f"{key}{_SOCKET}").unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with reachable(path / f"{key}{_SOCKET}") as address:
        listener.bind(address)
    listener.listen(64)
    return listener


def connect(path: Path, key: str, seconds: float) -> socket.socket | None:
    """Connect to a server of this user; None if it is gone, or belongs to somebody else."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(seconds)
    try:
        with reachable(path / f"{key}{_SOCKET}") as address:
            connection.connect(address)
        if peer_of(connection)[1] == os.geteuid():
            return connection
    except ConnectionRefusedError:  # it was killed; or it begins, and holds its lock
        with contextlib.suppress(OSError):
            lock = locked(path, key)
            if lock is not None:
                try:
                    (path / f"{key}{_SOCKET}").unlink()
                finally:
                    os.close(lock)
    except OSError:
        pass
    connection.close()
    return None


def locked(path: Path, key: str) -> int | None:
    """A descriptor that holds the lock of a server; None if another process is that server."""
    file = path / f"{key}{_LOCK}"
    while True:
        lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), os.stat(file)):
                    return lock
        except BlockingIOError:
            os.close(lock)
            return None
        os.close(lock)  # its holder has just removed it


def remove(path: Path, key: str) -> None:
    """Remove the files of a server; the lock, which is held, last."""
    for name in (f"{key}{_SOCKET}", f"{key.rpartition('-')[0]}{LOG}", f"{key}{_LOCK}"):
        with contextlib.suppress(OSError):
            (path / name).unlink()


def send(connection: socket.socket, message: Message | WarmRecord | Ready) -> None:
    """Send a message."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MOST_BYTES)
    connection.sendall(json.dumps(message).encode())


def receive(connection: socket.socket) -> Message:
    """The next message; empty if the other end is gone or does not answer in time."""
    try:
        data = connection.recv(MOST_BYTES)
        message = json.loads(data) if data else {}
    except (OSError, ValueError):
        return {}
    return cast("Message", message) if isinstance(message, dict) else {}
