"""Watches the jobs of all targets, and sends notices of them, until it is told to end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import re
import shlex
import stat
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from paceline.backends import registry
from paceline.backends.watch import Watch
from paceline.job.errors import UserError, nearest
from paceline.job.paths import jobs_folder, make_private
from paceline.job.settings import load
from paceline.job.settings_files import user_file
from paceline.job.text import counted, printable

from .decider import Decider, Mark
from .delivery import KEPT, Mail, Sender, Webhook, check_address
from .notice import Notice, notice

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from paceline.job.settings import Receiver, Settings

    from .delivery import Way

_LOOK = 5.0  # seconds between two looks at what is known, at most
_PATIENCE = 20.0  # seconds for which a target has not answered when that is said
_FAREWELL = 5.0  # seconds for what waits when it is told to end
_MOST_SECRET = 4096  # bytes of a file with one
_ADDRESS = re.compile(r"[^\s@,;:<>()\[\]\\\"\x00-\x20\x7f]+@[^\s@,;:<>()\[\]\\\"\x00-\x20\x7f]+")


def receivers(only: Collection[str] = ()) -> dict[str, tuple[Receiver, Way]]:
    """The receivers of the settings, all by default, and how each is reached; all that is wrong with them is said."""
    settings = load()
    if not settings.notify:
        raise UserError(
            f"nobody is to get notices; write a table such as [notify.me] with webhook_file or mail into {user_file()} "
            "(docs/notify.md)"
        )
    for name in only:
        if name not in settings.notify:
            raise UserError(f"no receiver {name} in the settings; {nearest(name, settings.notify)}")
    known = {registry.HERE, *settings.targets}
    for name, it in settings.notify.items():
        for target in it.targets or ():
            if target not in known and not registry.needs_no_target(target):
                raise UserError(
                    f"{settings.named('notify', name, 'targets')}: no target {target!r}; {nearest(target, known)}"
                )
    return {name: (it, _way(settings, name, it)) for name, it in settings.notify.items() if not only or name in only}


def _way(settings: Settings, name: str, receiver: Receiver) -> Way:
    try:
        for address in receiver.mail:
            if not _ADDRESS.fullmatch(address) or address.startswith("-"):
                key = settings.named("notify", name, "mail")
                raise UserError(printable(f"{key} {address!r}: not an address; write for example you@example.org"))
        if receiver.mail:
            return Mail(receiver.mail)
        url, key = receiver.webhook or "", "webhook"
        if receiver.webhook_file is not None:
            url, key = _secret(settings, name, "webhook_file", receiver.webhook_file), "webhook_file"
        if problem := check_address(url):
            raise UserError(f"{settings.named('notify', name, key)}: the address {problem}")
        file = receiver.secret_file
        return Webhook(url, receiver.format, _secret(settings, name, "secret_file", file) if file is not None else "")
    except UserError as error:
        text = str(error)
        raise (error if "notify." in text else UserError(f"{settings.named('notify', name)}: {text}")) from None


def _secret(settings: Settings, name: str, key: str, text: str) -> str:
    """The line of a file that only this user can read."""
    where = f"{settings.named('notify', name, key)} {text!r}"
    from_file = settings.file_of("notify", name, key)
    try:
        path = (from_file.parent if from_file else Path()) / Path(text).expanduser()
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise UserError(printable(f"{where}: this is no file; name one with one line"))
            if status.st_mode & 0o077:
                type_this = f"chmod 600 {shlex.quote(str(path))}"
                raise UserError(printable(f"{where}: other users may read it; type: {type_this}"))
            content = os.read(handle, _MOST_SECRET + 1)
        finally:
            os.close(handle)
        found = content.decode().strip()
    except UnicodeDecodeError:
        raise UserError(printable(f"{where}: this is no text")) from None
    except (OSError, RuntimeError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(printable(f"{where}: cannot be read: {why}")) from None
    if not found or len(content) > _MOST_SECRET or len(found.split()) != 1:
        what = "address" if key == "webhook_file" else "secret"
        raise UserError(printable(f"{where}: should hold the {what} in one line, and nothing else"))
    return found


class _Kept(msgspec.Struct):
    """What is kept when the process ends."""

    version: int = 1
    marks: list[Mark] = []
    waiting: dict[str, list[Notice]] = {}


class State:
    """The file with what was told and what waits; one process of a user has it at a time."""

    def __init__(self, warn: Callable[[str], object]) -> None:
        """Read it. Raises `UserError` if another process has it."""
        self._folder = jobs_folder().parent / "notify"
        self._file = self._folder / "state.json"
        self._warn = warn
        self._is_failing = False
        self._written = b""
        self._saving = threading.Lock()
        make_private(self._folder.parent)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UserError(printable(f"cannot write {self._folder}: {error.strerror}; check this folder")) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(self._lock, 20, 0).decode(errors="replace").strip()
            os.close(self._lock)
            raise UserError(f"another paceline notify runs (pid {printable(pid)}), and would tell all twice; end it "
                            "first") from None  # fmt: skip
        except OSError:  # a file system without locks
            pass
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        self.kept = self._read()

    def _read(self) -> _Kept:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=_Kept)
        except FileNotFoundError:
            return _Kept()
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            self._warn(f"{self._file} cannot be read ({getattr(error, 'strerror', None) or 'it is damaged'}); what it "
                       "says was told is not known any more")  # fmt: skip
            return _Kept()

    def save(self, gather: Callable[[], _Kept]) -> None:
        """Write the file anew, if anything has changed."""
        with self._saving:
            content = msgspec.json.encode(gather())
            if content == self._written:
                return
            new = self._file.with_suffix(".new")
            try:
                new.write_bytes(content)
                os.replace(new, self._file)
                self._written, self._is_failing = content, False
            except OSError as error:
                if not self._is_failing:
                    self._warn(
                        f"cannot write {self._file}: {error.strerror}; a restart may tell twice what is told now"
                    )
                self._is_failing = True


class Silence:
    """Says once which targets do not answer, when they have not for a while, and that they answer again."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._said: set[str] = set()

    def lines(self, why: Mapping[str, str], now: float) -> list[str]:
        """What to say now; `why` has those that do not answer."""
        self._since = {name: self._since.get(name, now) for name in why}
        new = {name for name, since in self._since.items() if now - since >= _PATIENCE} - self._said
        back = self._said - why.keys()
        self._said = (self._said | new) - back
        return [*(f"{name}: {why[name]}" for name in sorted(new)), *(f"{name} answers again" for name in sorted(back))]


class Service:
    """`paceline notify`: `run` until `end` is called, in a handler of signals or by another thread."""

    def __init__(
        self,
        to: dict[str, tuple[Receiver, Way]],
        *,
        tell: Callable[[str], object],
        warn: Callable[[str], object],
        dry_run: bool = False,
    ) -> None:
        """Take the state, unless nothing is to be sent: `tell` prints the notices then."""
        self._tell, self._warn, self._is_dry = tell, warn, dry_run
        self._wakes: queue.SimpleQueue[bool] = queue.SimpleQueue()  # True: the end; signal handlers may put into it
        self._silence = Silence()
        self._state = None if dry_run else State(warn)
        kept = self._state.kept if self._state else _Kept()
        for name, waiting in kept.waiting.items():
            kept.waiting[name] = [it for it in waiting if time.time() - it.time < KEPT]
        self._decider = Decider({name: it for name, (it, _) in to.items()}, time.time(), kept.marks)
        self._others = {name: waiting for name, waiting in kept.waiting.items() if name not in to}
        self._senders: dict[str, Sender] = {}
        self._new: dict[str, list[Notice]] = {}  # notices that no sender has yet
        self._deciding = threading.Lock()
        for name, (_, way) in () if dry_run else to.items():
            self._senders[name] = Sender(
                name, way, kept.waiting.get(name, ()), tell=tell, warn=warn, changed=self._save
            )

    def end(self) -> None:
        """Have `run` return."""
        self._wakes.put(True)

    def run(self) -> None:
        """Watch, and send."""
        for sender in self._senders.values():
            sender.start()
        watch = Watch()
        try:
            with watch.listening(lambda: self._wakes.put(False)):
                while not self._is_ended():
                    self._look(watch)
        finally:
            watch.close()
            self._close()

    def _is_ended(self) -> bool:
        """Wait for news, or a moment."""
        with contextlib.suppress(queue.Empty):
            is_end = self._wakes.get(timeout=_LOOK)
            while not is_end:
                is_end = self._wakes.get_nowait()
            return True
        return False

    def _look(self, watch: Watch) -> None:
        found, now = watch.jobs(), time.time()
        there = {id(it.job): it.there for it in found}
        with self._deciding:
            for name, event, job in self._decider.decide((it.job for it in reversed(found)), now):  # the oldest first
                self._new.setdefault(name, []).append(notice(event, job, there[id(job)].where_of(job.name), now))
        self._save()  # before anything is sent: what is sent is not forgotten
        with self._deciding:
            for name, notices in self._new.items():
                if self._is_dry:
                    for it in notices:
                        self._tell(f"to {printable(name)}:\n{it.text}\n")
                else:
                    self._senders[name].put(notices)
            self._new = {}
        self._save()
        self._say_silence(watch)

    def _say_silence(self, watch: Watch) -> None:
        why = {it["name"]: f"{it['error']}; of its jobs there is no news" for it in watch.targets() if it["error"]}
        if watch.problem:
            why["the settings"] = f"{watch.problem}; only jobs on this machine are watched"
        for line in self._silence.lines(why, time.monotonic()):
            self._warn(line)

    def _save(self) -> None:
        if self._state is not None:
            self._state.save(self._gathered)

    def _gathered(self) -> _Kept:
        with self._deciding:
            marks = msgspec.convert(msgspec.to_builtins(self._decider.marks()), list[Mark])
            waiting = {name: [*it.waiting, *self._new.get(name, ())] for name, it in self._senders.items()}
        return _Kept(1, marks, {**self._others, **{name: it for name, it in waiting.items() if it}})

    def _close(self) -> None:
        for sender in self._senders.values():
            sender.close()
        deadline = time.monotonic() + _FAREWELL
        for sender in self._senders.values():
            sender.join(max(0.0, deadline - time.monotonic()))
        self._save()
        if left := sum(len(it.waiting) for it in self._senders.values()):
            self._warn(f"{counted(left, 'notice')} could not be sent yet; the next paceline notify sends them")
