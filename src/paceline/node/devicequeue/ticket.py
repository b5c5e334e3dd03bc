"""The queue of jobs that request devices of this machine; it needs no daemon.

```
lock                                    locked (`man 2 flock`) by the process that changes something
new                                     a ticket that is being written
tickets/waiting.<priority>.<number>     a job that waits; the lower number came first
tickets/holding.<priority>.<number>     a job that has devices, named in the file
```

A ticket is open and locked in the agent of its job, and in whatever was forked for the job. If no process has locked a
ticket, its job is gone, however it ended, and the next process that looks removes it. An agent takes devices itself:
when its ticket is the first in the queue and enough devices are free. It looks again when the folder changes
(`man 7 inotify`). The end of another job is such a change, because the kernel closes the files of a dead process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import socket
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.node.eventloop import inotify

from .policy import Entry, turn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.node.spec import Request

POLL_SECONDS = 1.0  # between two checks if there is no inotify
RETRY_SECONDS = 5.0  # between two attempts to write a ticket to a full disk
_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.ENOENT)  # there may be space later; the folder was just removed

WAITING, HOLDING = "waiting", "holding"
_NAME = re.compile(rf"({WAITING}|{HOLDING})\.(-?[0-9]+)\.([0-9]+)")
_ANYTHING = ("?",)  # the devices of a holder whose ticket cannot be parsed


class _Name(NamedTuple):
    """The name of a ticket: everything that its position in the queue depends on."""

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
    """The folder of this machine's queue. Several machines may share a home, and their devices have the same names."""
    return home / "queue" / socket.gethostname()


def overview(folder: Path) -> list[Entry]:
    """The jobs in the queue: first those that hold devices, then those that wait, both in their order."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a reader may lack permission to write
            stack.enter_context(_locked(folder))
        names = sorted(_names(folder), key=lambda name: (name.state != HOLDING, name.order))
        return [entry for name in names if (entry := _read(folder, name)) is not None]


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of the queue, for a change or a consistent reading."""
    path = folder / "lock"
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                is_current = os.path.samestat(os.fstat(lock), os.stat(path))
            except FileNotFoundError:
                is_current = False
            if is_current:  # else the folder was removed meanwhile
                yield
                return
        finally:
            os.close(lock)


def _names(folder: Path) -> list[_Name]:
    """The tickets, in no order; other files are ignored."""
    try:
        found = os.listdir(folder / "tickets")
    except FileNotFoundError:
        return []
    return [name for name in map(_Name.parse, found) if name is not None]


def _read(folder: Path, name: _Name) -> Entry | None:
    """The job of a ticket, or None if it is gone. A file that is locked but cannot be parsed still counts as a job."""
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
    """Reports changes of the queue, through a descriptor to wait for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._inotify: inotify.Inotify | None = None
        self._lost = True  # events were dropped, or none were asked for yet
        self._watch = -1

    @property
    def fd(self) -> int:
        """The descriptor; -1 before `begin`, and where the kernel has none to spare."""
        return -1 if self._inotify is None else self._inotify.fd

    @property
    def works(self) -> bool:
        """Whether every change is reported."""
        return self._watch >= 0

    def begin(self) -> None:
        """Watch the folder that has the name now, if that is possible now."""
        if self.fd < 0:
            self._inotify = inotify.Inotify()
        assert self._inotify is not None
        self._lost = False
        self._watch = self._inotify.add(
            self._folder, inotify.CLOSE_WRITE | inotify.MOVED_TO | inotify.DELETE | inotify.EXCL_UNLINK
        )

    def read(self) -> set[str] | None:
        """The names of files that a process has closed since the last call, as it does when it ends.

        None before `begin`, and when events were lost: any file may have been closed, and `begin` is due again.
        """
        closed: set[str] = set()
        while self.works and self._inotify is not None and not self._lost and (data := self._inotify.read()):
            for event in inotify.unpack(data):
                if event.mask & inotify.OVERFLOW or (event.mask & inotify.IGNORED and event.watch == self._watch):
                    self._lost = True  # the kernel dropped events, or this folder is gone (not an earlier one)
                elif event.mask & inotify.CLOSE_WRITE:
                    closed.add(event.name)
        return None if self._lost else closed

    def close(self) -> None:
        """Release the descriptor."""
        if self._inotify is not None:
            self._inotify.close()
        self._watch = -1


class Ticket:
    """One job's position in the queue, and then its devices.

    Attributes:
        watch: reports changes, after which it is time to `look` again.
        ahead: how many jobs come first.
        problem: why the queue cannot be used for now, or "".
        place: jobs with a greater one have come later; None before it has one.
        fd: the descriptor whose lock shows that the job is alive; a process that inherits it keeps the devices taken.
    """

    def __init__(self, request: Request, job: str, place: int | None = None) -> None:
        """Nothing is queued yet; `place` is the one that the job had before, None if it is new."""
        self.request = request
        self.job = job
        self.place = place
        self.ahead = 0
        self.problem = ""
        self.fd = -1
        self._folder = Path(request.folder)
        self._tickets = self._folder / "tickets"
        self._name: _Name | None = None
        self.watch = Watch(self._tickets)

    @property
    def patience(self) -> float | None:
        """Seconds after which to look again even if nothing has changed; None: not before a change."""
        return RETRY_SECONDS if self.problem else None if self.watch.works else POLL_SECONDS

    def look(self) -> tuple[str, ...] | None:
        """Join the queue if this ticket is not in it; return the devices if it is its turn, else None."""
        self.problem = ""
        try:
            return self._look()
        except OSError as error:
            if error.errno not in _PASSING:
                raise
            self.problem = os.strerror(error.errno)
            return None

    def release(self) -> None:
        """Leave the queue, or give the devices back."""
        self.watch.close()
        if self.fd >= 0:
            if self._name is not None and self._is_there():
                _remove(self._folder, self._name)
            os.close(self.fd)
            self.fd = -1

    def _look(self) -> tuple[str, ...] | None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._tickets.mkdir(mode=0o700, exist_ok=True)
        closed = self.watch.read()
        with _locked(self._folder):
            if closed is None or not self.watch.works:
                self.watch.begin()
            names = self._remove_dead(closed)
            if self._name is None or not self._is_there():  # it is new, or the folder was emptied
                taken = {name.number for name in names}
                if self.place is None or self.place in taken:
                    now = time.time_ns() // 1_000_000  # so a job that is away keeps its place before those that come
                    self.place = max(1 + max(taken, default=0), now)
                self._write(_Name(WAITING, self.request.priority, self.place), ())
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

    def _remove_dead(self, closed: set[str] | None) -> list[_Name]:
        """Remove the tickets of dead jobs; returns the names of the others.

        Tickets that were `closed` are checked (None: all), and in any case those at the head of the queue, up to the
        first waiting job that is alive: the turn of this ticket depends on them.
        """
        names = sorted(_names(self._folder), key=lambda name: (name.state == WAITING, name.order))
        living = []
        at_head = True
        for name in names:
            in_doubt = name != self._name and (at_head or closed is None or str(name) in closed)
            if in_doubt and _read(self._folder, name) is None:
                _remove(self._folder, name)
                continue
            at_head = at_head and name.state == HOLDING
            living.append(name)
        return living

    def _is_there(self) -> bool:
        """Whether the folder still has this very file, not another of the same name."""
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
        """A holder; one whose ticket cannot be parsed may hold any device."""
        return replace(holder, devices=self.request.of) if holder.devices == _ANYTHING else holder

    def _write(self, name: _Name, devices: tuple[str, ...]) -> None:
        """Replace this ticket by another file, which is complete and locked before it gets its name."""
        new = self._folder / "new"
        with contextlib.suppress(FileNotFoundError):
            new.unlink()  # left by an agent that was killed just here
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
    with contextlib.suppress(OSError):  # it has no lock, so it counts for nothing
        os.unlink(folder / "tickets" / str(name))
