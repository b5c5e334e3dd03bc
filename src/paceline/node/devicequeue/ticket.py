"""Jobs that ask for devices of this machine take turns, and no daemon is needed for it.

```
lock                                    locked (`man 2 flock`) by whoever changes something
new                                     a ticket that is being written
tickets/waiting.<priority>.<number>     a job that waits; the lower number came first
tickets/holding.<priority>.<number>     a job that has devices, named in the file
```

A ticket is open and locked in the agent of its job, and in whatever was forked for the job. So one that nobody has
locked belongs to a job that is gone, however it ended, and the next who looks removes it. Only its own agent grants a
ticket anything, when it is the first in the line and finds enough devices free; it is woken when the folder changes
(`man 7 inotify`): the kernel closes the files of a dead process, which is such a change.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import re
import socket
import struct
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .policy import Entry, turn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.node.spec import Request

POLL_SECONDS = 1.0  # between two looks where the kernel cannot tell of changes
RETRY_SECONDS = 5.0  # between two tries to write a ticket to a full disk
_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.ENOENT)  # somebody may make room, or was just removing the folder

WAITING, HOLDING = "waiting", "holding"
_NAME = re.compile(rf"({WAITING}|{HOLDING})\.(-?[0-9]+)\.([0-9]+)")
_ANYTHING = ("?",)  # the devices of a holder whose ticket makes no sense

_IN_CLOSE_WRITE, _IN_MOVED_TO, _IN_DELETE = 0x8, 0x80, 0x200
_IN_EXCL_UNLINK = 0x4000000  # a ticket that was removed first is closed without a word
_IN_OVERFLOW, _IN_IGNORED = 0x4000, 0x8000
_IN_CLOEXEC, _IN_NONBLOCK = 0o2000000, 0o4000


# -- who gets what -----------------------------------------------------------------------------------------------------


# -- the folder --------------------------------------------------------------------------------------------------------


class _Name(NamedTuple):
    """The name of a ticket, which says all that the order depends on."""

    state: str
    priority: int
    number: int

    @classmethod
    def parse(cls, name: str) -> _Name | None:
        found = _NAME.fullmatch(name)
        return None if found is None else cls(found[1], int(found[2]), int(found[3]))

    def __str__(self) -> str:
        return f"{self.state}.{self.priority}.{self.number}"

    @property
    def order(self) -> tuple[int, int]:
        return -self.priority, self.number


def folder_of(home: Path) -> Path:
    """Where the queue of this machine is: several machines may share a home, and their devices have the same names."""
    return home / "queue" / socket.gethostname()


def overview(folder: Path) -> list[Entry]:
    """The jobs in the queue: first those that hold devices, then those that wait, both in their order.

    Raises:
        OSError: the folder cannot be read; one that does not exist is empty.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a reader need not be able to write
            stack.enter_context(_locked(folder))
        names = sorted(_names(folder), key=lambda name: (name.state != HOLDING, name.order))
        return [entry for name in names if (entry := _read(folder, name)) is not None]


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Be the only one who changes or reads the queue."""
    path = folder / "lock"
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                is_current = os.path.samestat(os.fstat(lock), os.stat(path))
            except FileNotFoundError:
                is_current = False
            if is_current:  # else somebody removed the folder meanwhile
                yield
                return
        finally:
            os.close(lock)


def _names(folder: Path) -> list[_Name]:
    """The tickets, in no order; other files are nobody's business."""
    try:
        found = os.listdir(folder / "tickets")
    except FileNotFoundError:
        return []
    return [name for name in map(_Name.parse, found) if name is not None]


def _read(folder: Path, name: _Name) -> Entry | None:
    """The job of a ticket, or None if it is gone. A file that makes no sense still says that somebody is there."""
    try:
        ticket = os.open(folder / "tickets" / str(name), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with open(ticket, "rb") as file:
        try:
            fcntl.flock(ticket, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        else:
            return None
        try:
            entry = _parse(json.loads(file.read()), name)
        except (ValueError, TypeError, KeyError, RecursionError):
            entry = Entry("?", name.priority, name.number, 0.0, 0, (), False)
    return replace(entry, devices=entry.devices or _ANYTHING) if name.state == HOLDING else entry


def _parse(stored: dict[str, Any], name: _Name) -> Entry:
    need = stored["need"]
    return Entry(
        job=str(stored["job"]), priority=name.priority, number=name.number, since=float(stored["since"]),
        need=need if isinstance(need, int) else tuple(map(str, need)), of=tuple(map(str, stored["of"])),
        share=bool(stored["share"]), devices=tuple(map(str, stored["devices"])),
    )  # fmt: skip


class Watch:
    """Tells that the queue changed, through a descriptor to wait for.

    Attributes:
        fd: the descriptor; -1 before it began, and where the kernel has none to spare.
        works: whether every change is told.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = os.fsencode(folder)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd = -1
        self.works = False
        self._lost = True
        self._watch = -1

    def begin(self) -> None:
        """Watch the folder that has the name now, if that is possible now."""
        if self.fd < 0:
            self.fd = self._libc.inotify_init1(_IN_CLOEXEC | _IN_NONBLOCK)
        mask = _IN_CLOSE_WRITE | _IN_MOVED_TO | _IN_DELETE | _IN_EXCL_UNLINK
        self._lost = False
        self._watch = self._libc.inotify_add_watch(self.fd, self._folder, mask) if self.fd >= 0 else -1
        self.works = self._watch >= 0

    def read(self) -> set[str] | None:
        """The names of files that a process closed when it ended, as far as that is told.

        None before it began, and when news were lost: then it may have been any, and it is time to begin again.
        """
        ended: set[str] = set()
        while self.works and not self._lost:
            try:
                data = os.read(self.fd, 65536)
            except BlockingIOError:
                break
            position = 0
            while position < len(data):
                watch, mask, _, length = struct.unpack_from("iIII", data, position)
                if mask & _IN_OVERFLOW or (mask & _IN_IGNORED and watch == self._watch):
                    self._lost = True  # some news were dropped, or the folder is gone, and not one that was before it
                elif mask & _IN_CLOSE_WRITE:
                    ended.add(data[position + 16 : position + 16 + length].rstrip(b"\0").decode(errors="replace"))
                position += 16 + length
        return None if self._lost else ended

    def close(self) -> None:
        """Release the descriptor."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self.works = False


class Ticket:
    """The place of one job in the queue, and then its devices.

    Attributes:
        watch: tells when it is time to `look` again.
        ahead: how many jobs come first.
        problem: why it cannot go on although it could, or "".
        fd: the descriptor whose lock says that the job lives: whoever inherits it keeps the devices from others.
    """

    def __init__(self, request: Request, job: str) -> None:
        self.request = request
        self.job = job
        self.ahead = 0
        self.problem = ""
        self.fd = -1
        self._folder = Path(request.folder)
        self._tickets = self._folder / "tickets"
        self._name: _Name | None = None
        self.watch = Watch(self._tickets)

    @property
    def patience(self) -> float | None:
        """Seconds until the next look even if nothing happens; None for ever."""
        return RETRY_SECONDS if self.problem else None if self.watch.works else POLL_SECONDS

    def look(self) -> tuple[str, ...] | None:
        """Go on as far as it goes: take a place in the line, and the devices once they are free; None until then.

        Raises:
            OSError: the queue cannot be used, for another reason than a full disk.
        """
        self.problem = ""
        try:
            return self._look()
        except OSError as error:
            if error.errno not in _PASSING:
                raise
            self.problem = os.strerror(error.errno)
            return None

    def release(self) -> None:
        """Leave the line, or give the devices back."""
        self.watch.close()
        if self.fd >= 0:
            if self._name is not None and self._is_there():
                _remove(self._folder, self._name)
            os.close(self.fd)
            self.fd = -1

    def _look(self) -> tuple[str, ...] | None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._tickets.mkdir(mode=0o700, exist_ok=True)
        ended = self.watch.read()
        with _locked(self._folder):
            if ended is None or not self.watch.works:
                self.watch.begin()
            names = self._bury(ended)
            if self._name is None or not self._is_there():  # it is new, or somebody has emptied the folder
                number = 1 + max((name.number for name in names), default=0)
                self._write(_Name(WAITING, self.request.priority, number), ())
            assert self._name is not None
            mine = self._name.order
            self.ahead = sum(name.state == WAITING and name.order < mine for name in names)
            if self.ahead:
                return None
            holders = [entry for n in names if n.state == HOLDING and (entry := _read(self._folder, n)) is not None]
            found = turn([self._entry(self._name, ()), *map(self._known, holders)])
            if found is None:
                return None
            self._write(self._name._replace(state=HOLDING), found[1])
        return found[1]

    def _bury(self, ended: set[str] | None) -> list[_Name]:
        """Remove the tickets of dead jobs: these, or all; and whoever is dead at the head of the line in any case.

        Returns the names of the others.
        """
        names = sorted(_names(self._folder), key=lambda name: (name.state == WAITING, name.order))
        living = []
        in_doubt = True  # as long as nobody is known to live and wait
        for name in names:
            doubtful = name != self._name and (in_doubt or ended is None or str(name) in ended)
            if doubtful and _read(self._folder, name) is None:
                _remove(self._folder, name)
                continue
            in_doubt = in_doubt and name.state == HOLDING
            living.append(name)
        return living

    def _is_there(self) -> bool:
        """Whether the folder still has this ticket, and not another of its name."""
        try:
            return os.path.samestat(os.fstat(self.fd), os.stat(self._tickets / str(self._name)))
        except FileNotFoundError:
            return False

    def _entry(self, name: _Name, devices: tuple[str, ...]) -> Entry:
        request = self.request
        return Entry(
            self.job, name.priority, name.number, time.time(), request.need, request.of, request.share, devices
        )

    def _known(self, holder: Entry) -> Entry:
        """A holder; one whose ticket makes no sense may hold anything."""
        return replace(holder, devices=self.request.of) if holder.devices == _ANYTHING else holder

    def _write(self, name: _Name, devices: tuple[str, ...]) -> None:
        """Replace this ticket by another, which is whole and locked from the first moment on."""
        new = self._folder / "new"
        with contextlib.suppress(FileNotFoundError):
            new.unlink()  # of somebody who was killed just here
        stored = asdict(self._entry(name, devices))
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "wb", closefd=False) as file:
                file.write(json.dumps(stored).encode())
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(new, self._tickets / str(name))
        except BaseException:
            os.close(fd)
            raise
        if self._name is not None and self._is_there():
            _remove(self._folder, self._name)
        if self.fd >= 0:
            os.close(self.fd)
        self._name, self.fd = name, fd


def _remove(folder: Path, name: _Name) -> None:
    with contextlib.suppress(OSError):  # nobody takes it for a living job's
        os.unlink(folder / "tickets" / str(name))
