"""Connections to hosts by the system's ssh, so that the user's configuration, keys, agents and jump hosts apply.

The remote command is constant; everything else goes through its stdin. The first line is the program of `bootstrap.py`,
which receives the archive of paceline's node side if the host does not have it yet.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import math
import os
import shlex
import subprocess
import tempfile
from collections import deque
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
from .engine import call, close, in_thread, run, status_of
from .patience import Patience

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
    from typing import IO

    from paceline.contract.messages import Beside, Request

    Answer = Any  # one of `contract.messages`
    Body = Iterable[bytes]  # what follows a request

CONNECT_SECONDS = 10
_PIECE = _READ = 1 << 16  # bytes that are written, or read, at once
_MOST_UNREAD = 1 << 18  # bytes of answers that nobody has taken; then no more are read
_SLOW = 4  # times as long as its limit an answer may take that keeps coming
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

    def disconnect(self) -> subprocess.Popen[bytes] | None:
        """Have the next command make a connection of its own: what hangs on this side of sshd may hang for ever."""
        if self.is_here:
            return None
        null = subprocess.DEVNULL
        with contextlib.suppress(OSError):
            command = self.command("", "-O", "stop")
            return subprocess.Popen(command, stdin=null, stdout=null, stderr=null, start_new_session=True)
        return None

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

    def ask(self, request: Request, patience: Patience | None = None) -> Answer:
        """See `answer`; for other threads than the engine's, as `listen`."""
        return run(self.answer(request, patience))

    async def answer(self, request: Request, patience: Patience | None = None) -> Answer:
        """Its answer to a request.

        The connection is kept for a while for the next request of this process, which needs no login then; with very
        many hosts only after a request about certain jobs, since a list of all is most often the only one.
        """
        patience = patience or self.patience(request)
        # Of many hosts, each connection keeps an ssh.
        stays = not self.inside and (self.is_kept or "name" in request or bool(request.get("names")))
        while True:
            answers = await self.connect(request, patience=patience, stays=stays)
            try:
                answer = await anext(answers)
            except BaseException as error:
                await answers.aclose()
                if not answers.was_kept or not patience.prompt or type(error) is not Unreachable:
                    raise  # else it may have broken before
            else:
                if not (stays and _kept.put(self, answers)):
                    answers.end()
                return answer

    def patience(self, request: Request) -> Patience:
        """How long it is waited for when this is asked of it."""
        return Patience.of(request["do"], self.limits)

    @contextlib.contextmanager
    def listen(self, request: Request, *, apart: bool = False) -> Iterator[Answers]:
        """Its answers to a request with several answers; the connection is closed when the block ends."""
        answers = run(self.connect(request, apart=apart))
        try:
            yield answers
        finally:
            close(answers.aclose(), answers.loop)

    async def connect(
        self,
        request: Request,
        body: Body | None = None,
        *,
        apart: bool = False,  # Ctrl-C does not end it
        stays: bool = False,  # another request may follow
        patience: Patience | None = None,
    ) -> Answers:
        """A connection with a request on its way; it must be closed."""
        patience = patience or self.patience(request)
        asked: Mapping[str, object] = {**request, "stays": True} if stays else request
        if not (apart or body or self.inside) and (kept := _kept.take(self)):
            kept.request(asked, patience)
            return kept
        opening = asyncio.ensure_future(self._open(apart, patience))
        try:
            answers = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(lambda it: it.exception() or asyncio.ensure_future(it.result().aclose()))
            raise
        try:
            await answers.begin(asked, body)
        except BaseException:
            await answers.aclose()
            raise
        return answers

    async def _open(self, apart: bool, patience: Patience) -> Answers:
        errors = _errors()
        try:  # in a thread, since it takes long if the machine is busy with others that start
            process = await in_thread(self._start, errors, apart, patience.connect)
        except BaseException:
            errors.close()
            raise
        return Answers(self, process, errors, patience)

    def _start(self, errors: IO[bytes], apart: bool, connect: int | None) -> subprocess.Popen[bytes] | login.Login:
        if self.has_login and not self.inside and (kept := login.take(self._kept_login)):
            self.log_in()  # those that follow would not wait for it either
            return kept
        within = [] if connect is None else ["-o", f"ConnectTimeout={connect}"]  # of ssh's options the first one counts
        try:
            process = subprocess.Popen(
                self.command(f"echo {BEGINS}; exec {self._interpreter} -c {shlex.quote(READ)}", "-T", *within),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=apart,
            )  # fmt: skip
        except FileNotFoundError:
            raise UserError("no ssh on PATH; install the OpenSSH client") from None
        except OSError as error:
            raise not_started(error) from None
        archive()  # while it starts
        return process


class Unreachable(UserError):
    """A host cannot be reached, or the connection broke."""


class Silent(Unreachable):
    """A host does not answer in time."""


class Answers:
    """The answers of a host, line by line: `async for` in the engine's thread, `for` in another one.

    Attributes:
        was_kept: whether it has been asked something before.
        loop: that of the engine.
    """

    def __init__(
        self, host: Host, process: subprocess.Popen[bytes] | login.Login, errors: IO[bytes], patience: Patience
    ) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._host, self._process, self._errors, self._patience = host, process, errors, patience
        self._stdin, self._stdout = process.stdin, process.stdout
        self.loop = asyncio.get_running_loop()
        self._buffer, self._outgoing = bytearray(), bytearray()
        self._looked = 0  # bytes of what has come that have no end of a line
        self._head: Answer | None = None  # an answer whose bytes have not all come
        self._taken: deque[Answer | UserError] = deque()  # those that another thread has got at once
        self._is_first = self._is_fresh = True
        # The command there: what comes before is of start-up files.
        self._has_begun = isinstance(process, login.Login)
        self.was_kept = self._is_over = False
        self._changed = asyncio.Event()  # something has come, or has gone
        self._seconds = self._until = math.inf  # that the wait may take that goes on, and its end
        self._began = 0.0  # when it began
        self._is_silent = False  # it took longer
        self._leaving: subprocess.Popen[bytes] | None = None  # when it was silent: no other command uses the connection
        self._closing: asyncio.Task[None] | None = None
        for file in (self._stdin, self._stdout):
            os.set_blocking(file.fileno(), False)
        self._read_on()

    async def begin(self, request: Mapping[str, object], body: Body | None) -> None:
        """Send the first request."""
        patience = self._patience
        self._within(patience.login)
        packed = archive()
        self.say(json.dumps(BEGIN), json.dumps({"root": self._host.root, "name": packed.name}), json.dumps(request))
        if (answer := await self._take()).get("need") is None:
            raise self._printed(json.dumps(answer))
        if answer["need"]:
            self._within(patience.copy)
            data = await in_thread(lambda: packed.data)
            await self._send([f"{len(data)}\n".encode(), data])
            self._within(None if patience.work is None else patience.copy)
        elif patience.work is None or patience.work > patience.login:
            self._within(patience.work)
        await self._send(body or ())

    def request(self, request: Mapping[str, object], patience: Patience) -> None:
        """Send another request, when the one before has been answered."""
        self._patience, self._is_first, self._is_fresh, self.was_kept = patience, True, True, True
        self._within(None if patience.work is None else max(patience.login, patience.work))
        self.say(json.dumps(request))

    @property
    def is_idle(self) -> bool:
        """Whether it is open, and says nothing."""
        return not self._buffer and not self._is_over and self._process.poll() is None

    # -- what it says --------------------------------------------------------------------------------------------------

    def __aiter__(self) -> Answers:
        return self

    async def __anext__(self) -> Answer:
        """The next line, with the bytes that follow it as `data`."""
        if not self._is_fresh:  # the first one has been waited for since the request
            self._within(self._patience.later)
        self._is_fresh = False
        return await self._take()

    def __iter__(self) -> Answers:
        return self

    def __next__(self) -> Answer:
        """As `__anext__`."""
        if not self._taken:
            self._taken.extend(run(self._several(), self.loop))
        answer = self._taken.popleft()
        if isinstance(answer, UserError):
            raise answer
        return answer

    async def _several(self) -> list[Answer | UserError]:
        """The next answer, and those that have come with it."""
        found: list[Answer | UserError] = [await anext(self)]
        try:
            while answer := self._whole():
                found.append(answer)
        except UserError as error:
            found.append(error)
        return found

    async def _take(self) -> Answer:
        """See `__anext__`; within the limit that runs."""
        while not (answer := self._whole()):
            if self._is_over:
                raise await self._why_over()
            if self._has_part:
                self._until = min(self.loop.time() + self._seconds, self._began + _SLOW * self._seconds)
            self._read_on()
            await self._change()
        return answer

    def _within(self, seconds: float | None) -> None:
        """A wait of at most so many seconds begins; None for no limit."""
        self._seconds = math.inf if seconds is None else seconds
        self._began = self.loop.time()
        self._until = self._began + self._seconds

    async def _change(self) -> None:
        """Wait until something has come or gone."""
        self._changed.clear()
        alarm = self.loop.call_at(self._until, self._expire)
        try:
            await self._changed.wait()
        finally:
            alarm.cancel()

    def _read_on(self) -> None:
        self.loop.add_reader(self._stdout, self._read)

    def _read(self) -> None:
        """Read what has come."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._stdout.fileno(), _READ)
            self._buffer += data
            if not data:
                self._read_no_more()
            elif len(self._buffer) > _MOST_UNREAD:
                self.loop.remove_reader(self._stdout)
            self._changed.set()

    def _read_no_more(self) -> None:
        self._is_over = True
        if not self._stdout.closed:
            self.loop.remove_reader(self._stdout)
        self._changed.set()

    async def _why_over(self) -> Unreachable:
        """Why no more answers come; waits until its process has ended."""
        if self._is_silent:
            return Silent(self._silence())
        return Unreachable(await self._failure())

    @property
    def _has_part(self) -> bool:
        """Whether the first bytes of an answer have come; after `_whole` has found none."""
        return self._head is not None or (self._has_begun and bool(self._buffer))

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

    def _printed(self, text: str) -> UserError:
        """What is said of a line that is not paceline's."""
        first = printable(text.strip())
        return UserError(
            f"{self._host.name}: {self._host.python} there prints {first!r} when it begins; let it print nothing"
        )

    def _parsed(self, line: bytes) -> Answer:
        answer: Answer = None
        with contextlib.suppress(ValueError):
            answer = json.loads(line, object_hook=_sharing)
        if not isinstance(answer, dict):
            raise self._printed(line.decode(errors="replace"))
        if not answer:
            self._read_no_more()
            return answer
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
        if self._has_part:
            seconds = round(self._until - self._began, 1)
            what, why = f"its answer did not arrive completely within {seconds:g} s", "it or its network may be slow"
            only = "it is only slow"
        else:
            what = f"no answer within {self._seconds:g} s"
            why = "it may be busy or hang, or a start-up file of its shell wait for input"
            only = "its login only takes long"
        hint = f"{why}: {self._host.by_hand}"
        if self._patience.prompt and self._seconds == self._host.limits.look:
            later = "; the login goes on for the next command" if self._is_first and self._host.is_kept else ""
            hint += f"; if {only}, set look_timeout below [defaults]{later}"
        return f"cannot reach {self._host.name}: {what}; {hint}"

    # -- what it is told -----------------------------------------------------------------------------------------------

    def send(self, pieces: Iterable[bytes]) -> None:
        """Send what follows when the request has been answered; for another thread."""

        async def send() -> None:
            self._within(self._patience.copy)
            await self._send(pieces)

        run(send())

    def tell(self, word: str) -> None:
        """See `say`; for another thread, or a handler of a signal."""
        call(self.say, word)

    def say(self, *lines: str) -> None:
        """Send lines; if the connection is closed, the answers say so."""
        self._outgoing += "".join(f"{line}\n" for line in lines).encode()
        self._write()

    async def _send(self, pieces: Iterable[bytes]) -> None:
        """Write much; a host that takes none of it for as long as the limit is waited for no longer."""
        async for piece in _each(pieces):
            for start in range(0, len(piece), _PIECE):
                self._within(self._seconds)
                self._outgoing += piece[start : start + _PIECE]
                self._write()
                while self._outgoing and not self._is_over:
                    await self._change()
                if self._is_over or self._stdin.closed:  # the answers say why
                    return
        self._within(self._seconds)

    def _write(self) -> None:
        """Write what can be written now, and the rest later."""
        if self._stdin.closed:
            return
        try:
            del self._outgoing[: os.write(self._stdin.fileno(), self._outgoing)]
        except BlockingIOError:
            pass
        except OSError:  # the answers say why
            self._outgoing.clear()
        if self._outgoing:
            self.loop.add_writer(self._stdin, self._write)
        else:
            self.loop.remove_writer(self._stdin)
            self._changed.set()

    def _end_input(self) -> None:
        if not self._stdin.closed:
            self.loop.remove_writer(self._stdin)
            self._stdin.close()

    # -- its end -------------------------------------------------------------------------------------------------------

    async def finish(self) -> None:
        """Have the host end its work, once it has received all that was said."""
        self._end_input()
        await status_of(self._process, _ENDING)

    def end(self) -> None:
        """Begin to close the connection."""
        if self._closing is None:
            self._end_input()
            if not self._is_silent and self._process.poll() is None:
                self._leave()
            self._read_no_more()
            self._stdout.close()
            self._errors.close()
            self._closing = self.loop.create_task(self._close())

    async def aclose(self) -> None:
        """Close the connection; whoever is interrupted meanwhile does not interrupt this."""
        self.end()
        assert self._closing is not None
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._leaving is not None:
            await status_of(self._leaving, _ENDING)
        if await status_of(self._process, _ENDING) is None:  # it ignores the signal, as this process may do
            self._process.kill()
            await status_of(self._process, _ENDING)

    def _leave(self) -> None:
        """End the process; if the host has not answered, before others go on, perhaps to the end of this one."""
        self._process.terminate()
        if self._is_first:
            self._leaving = self._host.disconnect()

    def _expire(self) -> None:
        if self._changed.is_set():
            return
        self._is_silent = True
        self._leave()
        if self._is_first:
            self._host.log_in()
        self._read_no_more()  # a wrapper of ssh may keep the output open when it has ended

    async def _failure(self) -> str:
        """Why there are no more answers."""
        self._end_input()
        status = await status_of(self._process, CONNECT_SECONDS)
        if status is None:  # it has only closed its output
            self._process.terminate()
            status = await status_of(self._process, _ENDING)
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
    """Connections whose request has been answered, for the next one of this process."""

    def __init__(self) -> None:
        # Also by the interpreter: hosts compare without it.
        self._idle: dict[tuple[Host, str], dict[Answers, asyncio.TimerHandle]] = {}

    def put(self, host: Host, answers: Answers) -> bool:
        """Keep a connection for a while, and then close it; if this process may have so many files open."""
        try:
            need_files(sum(map(len, self._idle.values())) + 1 + AT_ONCE)
        except UserError:
            return False
        idle = self._idle.setdefault((host, host.python), {})
        # A function without arguments: in its debug mode asyncio writes them down, and all that they lead to.
        idle[answers] = answers.loop.call_later(IDLE_SECONDS, lambda: self._drop(idle, answers))
        return True

    def _drop(self, idle: dict[Answers, asyncio.TimerHandle], answers: Answers) -> None:
        del idle[answers]
        answers.end()

    def take(self, host: Host) -> Answers | None:
        """A connection that is open."""
        idle = self._idle.get((host, host.python))
        while idle:
            answers, alarm = idle.popitem()
            alarm.cancel()
            if answers.is_idle:
                return answers
            answers.end()
        return None

    def forget(self) -> None:
        """Use none of them: they belong to the process of which this one is a fork."""
        self._idle.clear()


_kept = _Kept()  # those that are left when this process ends see the end of their input, and end
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


async def _each(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    """Pieces, of which those that are not in memory are read in another thread: their disk may be slow."""
    if isinstance(pieces, (list, tuple)):
        for piece in pieces:
            yield piece
        return
    there = iter(pieces)
    while piece := await in_thread(next, there, b""):
        yield piece


def pieces_of(*files: Path) -> Iterator[bytes]:
    """What files have, one after the other."""
    for file in files:
        with open(file, "rb") as source:
            yield from iter(lambda: source.read(_PIECE), b"")


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
