"""Connections to hosts by the system's ssh, so that the user's configuration, keys, agents and jump hosts apply.

The remote command is constant; everything else goes through its stdin. The first line is the program of `bootstrap.py`,
which receives the archive of paceline's node side if the host does not have it yet.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shlex
import subprocess
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.backends.limits import DEFAULT, Limits
from paceline.backends.packing import archive
from paceline.job.errors import UserError
from paceline.job.text import printable

from . import here, login
from .bootstrap import BEGIN, BEGINS, READ
from .crowd import AT_ONCE, need_files, not_started
from .patience import Alarm, Limit, Patience, alarms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import IO

    from paceline.contract.messages import Beside, Request

    Answer = Any  # one of `contract.messages`
    Body = Callable[["Input"], None]  # writes what follows a request

CONNECT_SECONDS = 10
_PIECE = _READ = 1 << 16  # bytes that are written, or read, at once
_MOST_LISTS = 256  # of hosts of jobs
_ENDING = 5.0  # seconds in which ssh ends when it is told to
IDLE_SECONDS = 10.0  # that a connection is kept for the next request of this process
PERSIST_SECONDS = 60  # a connection that nobody uses is kept so long for the next command
_OPTIONS = {
    "BatchMode": "yes",
    "ConnectTimeout": CONNECT_SECONDS,
    "ServerAliveInterval": 5,
    "ServerAliveCountMax": 2,
    "ControlMaster": "auto",
    "ControlPersist": PERSIST_SECONDS,
}


@dataclass(frozen=True)
class Host:
    """A machine that ssh reaches.

    Attributes:
        name: as in the settings, without slots.
        slots: how many devices it counts if it has no accelerators.
        port: of its sshd; None leaves it to ssh's own configuration.
        identity_file: the key to use; None leaves it to ssh.
        python: the interpreter there.
        root: the folder there with the jobs, and with paceline's archive.
        limits: how long it is waited for.
        inside: what runs the interpreter of a container in its place, with what follows; () for none.
        is_kept: whether its connection is kept for the next command, in a process of its own.
    """

    name: str
    slots: int
    port: int | None
    identity_file: str | None
    python: str = field(compare=False)  # it stays the same machine
    root: str
    limits: Limits = DEFAULT
    is_kept: bool = True
    inside: tuple[str, ...] = field(default=(), compare=False)

    @property
    def is_here(self) -> bool:
        """Whether it is this machine, and needs no ssh. With a port, a key or USER@ it does: those are for ssh."""
        return self.port is None and self.identity_file is None and here.is_here(self.name)

    @property
    def reconnect(self) -> float:
        """Seconds to connect to it again after a connection broke; 0 if there is none that could break."""
        return 0.0 if self.is_here else self.limits.reconnect

    def command(self, remote: str, *options: str) -> list[str]:
        """The argument vector that runs a line of a remote shell."""
        if self.is_here:
            return here.command(remote, has_terminal="-t" in options)
        command = ["ssh", *options, "-o", f"ControlPath={_control_folder()}/%C"]
        for name, value in (_OPTIONS if self.is_kept else {**_OPTIONS, "ControlMaster": "no"}).items():
            command += ["-o", f"{name}={value}"]
        if self.port is not None:
            command += ["-p", str(self.port)]
        if self.identity_file is not None:
            command += ["-i", os.path.expanduser(self.identity_file)]
        return [*command, "--", self.name, remote]

    @property
    def _kept_login(self) -> str:
        """The socket behind which a login is kept that an earlier command did not wait for."""
        import hashlib  # not needed by those that stay on this machine

        text = json.dumps([self.name, self.port, self.identity_file, self.python])
        return f"{_control_folder()}/{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    @property
    def has_login(self) -> bool:
        """Whether an earlier command has left a login for the next one."""
        return self.is_kept and not self.is_here and os.path.exists(self._kept_login)

    def log_in(self) -> None:
        """Have a process of its own log in, for the next command: it may take longer than this one waits."""
        if self.is_kept and not self.is_here:
            says = f"import sys; sys.stdout.write({json.dumps(BEGINS)} + chr(10)); sys.stdout.flush(); {READ}"
            apart = "-T", "-o", "ControlMaster=no", "-S", "none"  # what hangs is not to hold up others
            command = self.command(f"exec {quoted(self.python)} -c {shlex.quote(says)}", *apart)
            login.go_on(self._kept_login, f"{BEGINS}\n", command)

    def disconnect(self, seconds: float = _ENDING) -> None:
        """Have the next command make a connection of its own: what hangs on this side of sshd may hang for ever."""
        if self.is_here:
            return
        null = subprocess.DEVNULL
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            command = self.command("", "-O", "stop")
            stopping = subprocess.Popen(command, stdin=null, stdout=null, stderr=null, start_new_session=True)
            stopping.wait(seconds)

    @property
    def _interpreter(self) -> str:
        """The interpreter as a remote shell takes it."""
        return shlex.join([*self.inside, "python3"]) if self.inside else quoted(self.python)

    @property
    def says(self) -> str:
        """What its messages begin with."""
        return f"{self.name}: "

    @property
    def by_hand(self) -> str:
        """The command to log in there."""
        return self._typed()

    def forward(self, port: int) -> str:
        """What a person types to reach a port of it at the same port here."""
        if self.is_here:
            return here.forward(port)
        return self._typed("-N", "-L", f"{port}:127.0.0.1:{port}")

    def _typed(self, *options: str) -> str:
        port = [] if self.port is None else ["-p", str(self.port)]
        key = [] if self.identity_file is None else ["-i", self.identity_file]
        return shlex.join(["ssh", *port, *key, *options, self.name])

    def shell_command(self, request: Beside, terminal: bool) -> list[str]:
        """The argument vector that runs a command where a rank runs, once the archive is there."""
        path = f"{self.root.rstrip('/')}/{archive().name}"
        argument = base64.urlsafe_b64encode(json.dumps({**request, "root": self.root}).encode()).decode()
        return self.command(f"exec {quoted(self.python)} {quoted(path)} shell {argument}", "-t" if terminal else "-T")

    def ask(
        self,
        request: Request,
        body: Body | None = None,
        opened: Callable[[Answers], None] = lambda _: None,
        patience: Patience | None = None,
    ) -> Answer:
        """Its answer to a request; see `listen` for the arguments.

        The connection is kept for a while for the next request of this process, which needs no login then; with very
        many hosts only after a request about certain jobs, since a list of all is most often the only one.
        """
        is_followed = self.is_kept or "name" in request or request.get("names")  # of many hosts, each keeps an ssh
        if body is not None or self.inside or not is_followed:
            with self.listen(request, body, opened, patience=patience) as answers:
                return next(answers)
        staying: Mapping[str, object] = {**request, "stays": True}
        patience = patience or self.patience(request)
        if kept := _kept.take(self):
            answers, closing = kept
            try:
                with closing:
                    answers.request(staying, opened, patience)
                    answer = next(answers)
                    _kept.put(self, answers, closing)
                    return answer
            except Unreachable as error:  # it may have broken before
                if isinstance(error, Silent) or not patience.prompt:
                    raise
        with self._connection(staying, None, opened, apart=False, patience=patience) as (answers, closing):
            answer = next(answers)
            _kept.put(self, answers, closing)
            return answer

    def patience(self, request: Request) -> Patience:
        """How long it is waited for when this is asked of it."""
        return Patience.of(request["do"], self.limits)

    @contextlib.contextmanager
    def listen(
        self,
        request: Request,
        body: Body | None = None,
        opened: Callable[[Answers], None] = lambda _: (
            None
        ),  # before the first answer, so that another thread can stop it
        apart: bool = False,  # Ctrl-C does not end it
        patience: Patience | None = None,
    ) -> Iterator[Answers]:
        """Its answers to a request with several answers; the connection is closed when the block ends."""
        patience = patience or self.patience(request)
        if not (apart or body or self.inside) and (kept := _kept.take(self)):
            answers, closing = kept
            with closing:
                answers.request(request, opened, patience)
                yield answers
            return
        with self._connection(request, body, opened, apart, patience) as (answers, _):
            yield answers

    @contextlib.contextmanager
    def _connection(
        self,
        request: Mapping[str, object],
        body: Body | None,
        opened: Callable[[Answers], None],
        apart: bool,
        patience: Patience,
    ) -> Iterator[tuple[Answers, contextlib.ExitStack]]:
        """A connection with a request on its way, and what closes it when the block ends."""
        with contextlib.ExitStack() as closing:
            errors = closing.enter_context(_errors())
            process = self._start(errors, apart, patience.connect)
            assert process.stdin is not None
            limit = Limit(process)
            answers = Answers(self, process, errors, limit, patience)
            closing.callback(answers.close)
            limit.begin(patience.login)
            opened(answers)
            packed = archive()  # while it starts
            order = {"root": self.root, "name": packed.name}
            with contextlib.suppress(BrokenPipeError):  # the answers say why
                _write(process.stdin, json.dumps(BEGIN), json.dumps(order), json.dumps(request))
                if answers.take()["need"]:
                    limit.begin(patience.copy)
                    _write(process.stdin, str(len(packed.data)))
                    _send(process.stdin, limit, packed.data)
                    limit.begin(None if patience.work is None else patience.copy)
                elif patience.work is None or patience.work > patience.login:
                    limit.begin(patience.work)
                if body is not None:
                    body(Input(process.stdin, limit))
            yield answers, closing

    def _start(self, errors: IO[bytes], apart: bool, connect: int | None) -> subprocess.Popen[bytes] | login.Login:
        if self.has_login and not self.inside and (kept := login.take(self._kept_login)):
            self.log_in()  # those that follow would not wait for it either
            return kept
        within = [] if connect is None else ["-o", f"ConnectTimeout={connect}"]  # of ssh's options the first one counts
        try:
            return subprocess.Popen(
                self.command(f"echo {BEGINS}; exec {self._interpreter} -c {shlex.quote(READ)}", "-T", *within),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=apart,
            )  # fmt: skip
        except FileNotFoundError:
            raise UserError("no ssh on PATH; install the OpenSSH client") from None
        except OSError as error:
            raise not_started(error) from None


class Unreachable(UserError):
    """A host cannot be reached, or the connection broke."""


class Silent(Unreachable):
    """A host does not answer in time."""


class Answers:
    """The answers of a host, line by line."""

    def __init__(
        self,
        host: Host,
        process: subprocess.Popen[bytes] | login.Login,
        errors: IO[bytes],
        limit: Limit,
        patience: Patience,
    ) -> None:
        self._host = host
        self._process = process
        self._errors = errors
        self._limit = limit
        self._patience = patience
        self._buffer = bytearray()
        self._looked = 0  # bytes of it that have no end of a line
        self._head: Answer | None = None  # an answer whose bytes have not all come
        self._is_first = self._is_fresh = True
        # The command there: what comes before is of start-up files.
        self._has_begun = isinstance(process, login.Login)
        self._do_when_silent: Callable[[Silent], None] = lambda _: None
        self._is_left = threading.Event()  # when it was silent: no other command uses the connection
        self._lock = threading.Lock()
        self._reading = 0  # threads
        self._is_closed = False
        limit.on_expiry = self._expire

    def __iter__(self) -> Answers:
        return self

    def __next__(self) -> Answer:
        """The next line, with the bytes that follow it as `data`."""
        if not self._is_fresh:  # the first one has been waited for since the request
            self._limit.begin(self._patience.later)
        self._is_fresh = False
        try:
            return self.take()
        finally:
            self._limit.end()

    def request(self, request: Mapping[str, object], opened: Callable[[Answers], None], patience: Patience) -> None:
        """Send another request, when the one before has been answered."""
        assert self._process.stdin is not None
        self._patience, self._is_first, self._is_fresh = patience, True, True
        self._limit.begin(None if patience.work is None else max(patience.login, patience.work))
        opened(self)
        with contextlib.suppress(BrokenPipeError):  # the answers say why
            _write(self._process.stdin, json.dumps(request))

    @property
    def is_idle(self) -> bool:
        """Whether it is open, and says nothing."""
        ready = select.poll()
        ready.register(self, select.POLLIN)
        return not self._buffer and self._process.poll() is None and not ready.poll(0)

    def take(self) -> Answer:
        """See `__next__`; within the limit that runs."""
        try:
            while (answer := self._whole()) is None:
                self._read()
        except EOFError:
            raise self.why_over() from None
        return answer

    def fileno(self) -> int:
        """What can be read when `arrived` has something new."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def arrived(self) -> Iterator[Answer]:
        """Answers that are there, as `__next__`, not always all of them; waits for no other one."""
        yield from self._all_whole()
        ready = select.poll()
        ready.register(self, select.POLLIN)
        if ready.poll(0):
            self._read()
            yield from self._all_whole()

    def _all_whole(self) -> Iterator[Answer]:
        while (answer := self._whole()) is not None:
            self._limit.begin(self._patience.later)
            yield answer

    def _read(self) -> None:
        """Wait for more."""
        with self._lock:
            if self._is_closed:
                raise EOFError
            self._reading += 1
        try:
            data = os.read(self.fileno(), _READ)
        finally:
            with self._lock:
                self._reading -= 1
                self._close_unread()
        if not data:
            raise EOFError
        self._buffer += data

    def _close_unread(self) -> None:
        """Close what nobody reads: a number that a thread is about to read may else be another connection's by then."""
        assert self._process.stdout is not None
        if self._is_closed and not self._reading:
            self._process.stdout.close()

    def why_over(self) -> Unreachable:
        """Why no more answers come; waits until its process has ended."""
        if not (self._buffer and self._has_begun) and self._head is None and self._limit.is_over:
            return Silent(self._silence())
        return Unreachable(self._failure())

    def _whole(self) -> Answer | None:
        """The next answer; None if not all of it has come."""
        if not self._has_begun:
            mark = f"{BEGINS}\n".encode()
            place = self._buffer.find(mark)
            self._has_begun = place >= 0
            del self._buffer[: place + len(mark) if self._has_begun else -len(mark)]
            if not self._has_begun:
                return None
        if self._head is None:
            end = self._buffer.find(b"\n", self._looked) + 1
            if not end:
                self._looked = len(self._buffer)
                return None
            line, self._looked = bytes(self._buffer[:end]), 0
            del self._buffer[:end]
            self._head = self._parsed(line)
        answer, size = self._head, self._head.get("bytes", 0)
        if len(self._buffer) < size:
            return None
        if answer.pop("bytes", None) is not None:
            answer["data"] = bytes(self._buffer[:size])
            del self._buffer[:size]
        self._head = None
        return answer

    def _parsed(self, line: bytes) -> Answer:
        try:
            answer: Answer = json.loads(line, object_hook=_sharing)
        except ValueError:
            first = printable(line.decode(errors="replace").strip())
            raise UserError(
                f"{self._host.name}: {self._host.python} there prints {first!r} when it begins; let it print nothing"
            ) from None
        if not answer:
            raise Unreachable(self._failure())
        self._is_first = False
        if "input_lost" in answer:
            raise UserError(
                f"{self._host.name}: a start-up file of its shell, such as ~/.bashrc, reads stdin, which is meant for"
                " paceline; let it read only on a terminal: [ -t 0 ] && …"
            )
        if "error" in answer:
            raise UserError(printable(f"{self._host.says}{answer['error']}"))
        return answer

    def _silence(self) -> str:
        """That it has not answered in time, and what to do."""
        hint = f"it may be busy or hang, or a start-up file of its shell wait for input: {self._host.by_hand}"
        if self._patience.prompt and self._limit.seconds == self._host.limits.look:
            later = "; the login goes on for the next command" if self._is_first and self._host.is_kept else ""
            hint += f"; if its login only takes long, set look_timeout below [defaults]{later}"
        return f"cannot reach {self._host.name}: no answer within {self._limit.seconds:g} s; {hint}"

    def send(self) -> Input:
        """What follows when the request has been answered; there is a limit for each piece, as for the archive."""
        assert self._process.stdin is not None
        self._limit.begin(self._patience.copy)
        return Input(self._process.stdin, self._limit)

    def say(self, word: str) -> None:
        """Send a line; if the connection is closed, the answers say so."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):  # ValueError: it is closed
            os.write(self._process.stdin.fileno(), f"{word}\n".encode())

    def finish(self) -> None:
        """Have the host end its work, once it has received all that was said."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self._process.stdin.close()
            self._process.wait(_ENDING)

    def stop(self) -> None:
        """Close the connection."""
        assert self._process.stdin is not None
        self._limit.end()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        if self._limit.is_over:
            self._is_left.wait()
        elif self._process.poll() is None:
            self._process.terminate()
            if self._is_first:
                self._host.disconnect()
        try:
            self._process.wait(_ENDING)
        except subprocess.TimeoutExpired:  # it ignores the signal, as this process may do, from which it has that
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Close the connection, and read no more; a thread that reads ends by itself."""
        self.stop()
        with self._lock:
            self._is_closed = True
            self._close_unread()

    def when_silent(self, do: Callable[[Silent], None]) -> None:
        """Call `do`, in another thread, when the host takes too long."""
        self._do_when_silent = do

    def _expire(self) -> None:
        if self._is_first:
            self._host.disconnect()  # before others go on, perhaps to the end of this process
            self._host.log_in()
        self._is_left.set()
        self._do_when_silent(Silent(self._silence()))

    def abandon(self) -> None:
        """End the connection, and wait for nothing; for another thread than the one that listens."""
        self._process.terminate()
        if self._is_first:
            self._host.disconnect(seconds=0)

    def _failure(self) -> str:
        """Why there are no more answers."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            status = self._process.wait(CONNECT_SECONDS)
        except subprocess.TimeoutExpired:  # it has only closed its output
            self._process.terminate()
            status = self._process.wait()
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        silence = "the connection broke" if status == 255 else f"exit status {status}"
        last = printable(lines[-1].rstrip(".") if lines else silence)
        name = self._host.name
        if status == 255:
            return f"cannot reach {name}: {last}; try: {self._host.by_hand}"
        if not self._has_begun:
            what = f"a start-up file of its shell, such as ~/.bashrc, ends it before the command ({last})"
            return f"{name}: {what}; let it end, or start another shell, only on a terminal: [ -t 0 ] && …"
        if status in (126, 127):
            return f"no Python on {name} ({last}); name one with --ssh-python, or python = in the target's settings"
        if self._is_first:
            python = self._host.python
            other = "name Python 3.9 or newer with --ssh-python, or python = in the target's settings"
            return f"{name}: {python} there does not behave like Python ({last}); {other}"
        return f"{name} did not answer: {last}"


class _Kept:
    """Connections whose request has been answered, for the next one of this process: each for one thread at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[tuple[Host, str], list[_Idle]] = {}  # also the interpreter: hosts compare without it
        self._count = 0

    def put(self, host: Host, answers: Answers, closing: contextlib.ExitStack) -> None:
        """Keep a connection for a while, which `closing` would close; if this process may have so many files open."""
        with self._lock, contextlib.suppress(UserError):
            need_files(self._count + 1 + AT_ONCE)
            answers.when_silent(lambda _: None)
            idle = _Idle(answers, closing.pop_all())
            self._idle.setdefault((host, host.python), []).append(idle)
            self._count += 1
            idle.alarm = alarms.add(IDLE_SECONDS, lambda: self._drop(host, idle))

    def take(self, host: Host) -> tuple[Answers, contextlib.ExitStack] | None:
        """A connection that is open, and what closes it."""
        while True:
            with self._lock:
                those = self._idle.get((host, host.python))
                if not those:
                    return None
                idle = those.pop()
                self._count -= 1
            idle.alarm.cancel()
            if idle.answers.is_idle:
                return idle.answers, idle.closing
            idle.closing.close()

    def _drop(self, host: Host, idle: _Idle) -> None:
        with self._lock:
            those = self._idle.get((host, host.python), [])
            if idle not in those:
                return
            those.remove(idle)
            self._count -= 1
        idle.closing.close()

    def close(self) -> None:
        """Close all of them."""
        with self._lock:
            those, self._idle, self._count = [idle for it in self._idle.values() for idle in it], {}, 0
        for idle in those:
            idle.alarm.cancel()
            idle.answers.abandon()
        for idle in those:
            idle.closing.close()

    def forget(self) -> None:
        """Use none of them: they belong to the process of which this one is a fork."""
        self.__init__()  # type: ignore[misc]  # its lock may be held, and nobody releases it here


class _Idle:
    """A connection that is not in use, what closes it, and what does so after a while."""

    def __init__(self, answers: Answers, closing: contextlib.ExitStack) -> None:
        self.answers, self.closing = answers, closing
        self.alarm = Alarm(None)


_kept = _Kept()  # those that are left when this process ends see the end of their input, and end
close_kept = _kept.close
os.register_at_fork(after_in_child=_kept.forget)

_lists_of_hosts: dict[tuple[str, ...], list[str]] = {}


def _sharing(found: Answer) -> Answer:
    """Each of N hosts names all N hosts of a job: these names are kept once."""
    if isinstance(hosts := found.get("hosts"), list):
        if len(_lists_of_hosts) > _MOST_LISTS:
            _lists_of_hosts.clear()
        found["hosts"] = _lists_of_hosts.setdefault(tuple(hosts), hosts)
    return found


def _errors() -> IO[bytes]:
    """A file for what ssh says, which keeps it open as long as it keeps the connection."""
    try:
        return tempfile.TemporaryFile()
    except OSError as error:
        raise not_started(error) from None


def _write(stdin: IO[bytes], *lines: str) -> None:
    stdin.write("".join(f"{line}\n" for line in lines).encode())
    stdin.flush()


def _send(stdin: IO[bytes], limit: Limit, data: bytes) -> int:
    """Write much; a host that takes none of it for as long as the limit is waited for no longer."""
    for start in range(0, len(data), _PIECE):
        limit.again()
        stdin.write(data[start : start + _PIECE])
        stdin.flush()
    limit.again()
    return len(data)


class Input:
    """The input of a host, for what follows a request."""

    def __init__(self, stdin: IO[bytes], limit: Limit) -> None:
        self._stdin, self._limit = stdin, limit

    def write(self, data: bytes) -> int:
        """Write it all; see `_send`."""
        return _send(self._stdin, self._limit, data)


def quoted(path: str) -> str:
    """A path as a remote shell takes it; one that begins with `~/` is in the home there."""
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)


def _control_folder() -> Path:
    """A private folder for the sockets of shared connections; its path must be short."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    folder = Path(runtime, "paceline") if 0 < len(runtime) < 32 else Path(f"/tmp/paceline-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise UserError(f"cannot make {folder}: {error.strerror}; set XDG_RUNTIME_DIR to a folder of yours") from None
    if status.st_uid != os.getuid() or status.st_mode & 0o77 or folder.is_symlink():
        raise UserError(f"{folder} is not private to you; remove it, or set XDG_RUNTIME_DIR to a folder of yours")
    return folder
