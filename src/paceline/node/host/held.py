"""A job that a client elsewhere follows in the foreground, over one connection after another if they break.

When the connection has broken, the process that has started the job goes on, and listens on a socket in the run
directory. The client connects again and asks for `rejoin`. The process that answers this gives its stdin and stdout to
the first one, which uses them from then on, and ends when they are not used any more.

Answers are numbered from the time that the job is held. The client says "seen N" from time to time, and names the
number when it is back: so each answer reaches it once. Orders are numbered too: the first answer on another connection
says how many have come.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import select
import socket
import sys
import threading
import time
from typing import IO, TYPE_CHECKING

from paceline.contract.local_sockets import peer_of, reachable
from paceline.node.errors import Refused
from paceline.node.files import read_json
from paceline.node.lifeline import CLIENT_LOST
from paceline.node.machine import processes
from paceline.node.machine.containers import CLIENT

from .protocol import encoded

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path
    from typing import NoReturn

    from paceline.contract.messages import JobAnswer, Rejoin
    from paceline.node.rundir.directory import RunDirectory
    from paceline.node.store.home import Home
    from paceline.node.store.lifecycle import AgentProcess


_LONGER = 5.0  # seconds that the client is waited for when it has stopped trying: the first to give up says why
_PIECE = 4096  # bytes that a pipe takes at once when it takes any
_ENDING = 1.0  # seconds from the end of a connection's pipes until its sshd has ended
_PAUSE = 0.02  # seconds between two looks whether it has
_LONGEST = 4096  # bytes of what a returning client says first


class _Connection:
    """One connection of the client."""

    def __init__(self, stdin: IO[bytes], stdout: int, pid: int, keeper: socket.socket | None = None) -> None:
        """Use a connection."""
        self.stdin, self._stdout, self._keeper = stdin, stdout, keeper
        self._session = {pid: processes.start_time(pid), **processes.parents(pid)}
        self.is_used = keeper is None  # whether the client has said something over it
        self._writing = threading.Lock()
        self._woken, self._wake = os.pipe()

    def write(self, data: bytes) -> bool:
        """Write it all; returns whether that was possible."""
        with self._writing:
            poll, rest = select.poll(), memoryview(data)
            poll.register(self._woken, select.POLLIN)
            poll.register(self._stdout, select.POLLOUT)
            while rest:
                if self._woken in dict(poll.poll()):
                    return False
                try:
                    rest = rest[os.write(self._stdout, rest[:_PIECE]) :]
                except OSError:
                    return False
            return True

    def has_broken(self) -> bool:
        """Whether stdin has ended because the connection broke; a client that ends leaves the sshd of it alive."""
        if not self.is_used:  # the sshd may have ended before we knew it
            return True
        until = time.monotonic() + _ENDING
        while time.monotonic() < until:
            if any(processes.start_time(pid) != began for pid, began in self._session.items()):
                return True
            time.sleep(_PAUSE)
        return False

    def close(self) -> None:
        """Use it no more; `write` comes back."""
        os.write(self._wake, b"x")
        with self._writing:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stdout)
            os.close(null)
        if self._keeper is not None:
            self._keeper.close()


class HeldClient:
    """The client of a held job."""

    def __init__(self, run: RunDirectory, agent: AgentProcess, lifeline: socket.socket, seconds: float) -> None:
        """Listen to the client."""
        self._agent, self._lifeline, self._seconds = agent, lifeline, seconds
        self._news = threading.Condition()
        self._unseen: collections.deque[bytes] = collections.deque()  # answers that the client may not have
        self._seen = self._next = 0  # how many it has, the number of the next one to send
        self._orders = 0
        self._connection: _Connection | None = _Connection(sys.stdin.buffer, sys.stdout.fileno(), _client())
        self._timer: threading.Timer | None = None
        self._listener = _listener(run.client_socket) if seconds > 0 else None
        if self._listener is not None:
            self._path, self._inode = run.client_socket, run.client_socket.stat().st_ino
            threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()
        threading.Thread(target=self._send, daemon=True).start()
        self._listen_to(self._connection)

    def serve(self, answers: Iterable[JobAnswer]) -> NoReturn:
        """Send these answers, and end this process when the client has them all."""
        for answer in itertools.chain(answers, [{"end": True}]):
            with self._news:
                self._unseen.append(encoded(answer))
                self._news.notify_all()
                self._news.wait_for(lambda: not self._unsent)
        with self._news:
            self._news.wait_for(lambda: not self._unseen)
        self._end()

    @property
    def _unsent(self) -> int:
        """How many answers have not been sent, or have to be sent again."""
        return self._seen + len(self._unseen) - self._next

    def _send(self) -> None:
        """Send the answers on whichever connection there is, for ever."""
        while True:
            with self._news:
                self._news.wait_for(lambda: self._connection is not None and self._unsent)
                connection, data = self._connection, self._unseen[self._next - self._seen]
            assert connection is not None
            is_sent = connection.write(data)
            with self._news:
                if is_sent and connection is self._connection:
                    self._next += 1
                    self._news.notify_all()
                while not is_sent and connection is self._connection:
                    self._news.wait()

    # -- what the client says ------------------------------------------------------------------------------------------

    def _listen_to(self, connection: _Connection) -> None:
        threading.Thread(target=self._obey, args=(connection,), daemon=True).start()

    def _obey(self, connection: _Connection) -> None:
        with contextlib.suppress(OSError):
            for line in iter(connection.stdin.readline, b""):
                word, _, number = line.decode().strip().rpartition(" ")
                with self._news:
                    if connection is not self._connection:
                        return
                    connection.is_used = True
                    if word == "seen":
                        self._forget(int(number))
                    else:
                        self._orders += 1
                        self._agent.send_signal(int(number))
        self._ended(connection)

    def _forget(self, seen: int) -> None:
        while self._seen < seen:
            self._unseen.popleft()
            self._seen += 1
        self._news.notify_all()

    def _ended(self, connection: _Connection) -> None:
        has_broken = self._seconds > 0 and connection.has_broken()
        with self._news:
            if connection is not self._connection:
                return
            if not has_broken:
                self._end()  # the client is gone
            if self._listener is None:
                self._give_up()
            self._connection = None
            self._timer = threading.Timer(self._seconds + _LONGER, self._give_up)
            self._timer.daemon = True
            self._timer.start()
            self._news.notify_all()
        connection.close()

    def _give_up(self) -> None:
        """End without the client, unless it has just come back."""
        with self._news:
            if self._connection is None or self._listener is None:
                with contextlib.suppress(OSError):  # the agent has ended
                    self._lifeline.send(CLIENT_LOST)
                self._end()

    def _end(self) -> NoReturn:
        """End this process, and with it the agent's lifeline."""
        if self._listener is not None:
            with contextlib.suppress(OSError):  # another process may listen there for a later part of the same job
                if self._path.stat().st_ino == self._inode:
                    self._path.unlink()
        os._exit(0)

    # -- a client that is back -----------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        while True:
            successor, _ = listener.accept()
            with contextlib.suppress(OSError, ValueError):
                self._take_over(successor)

    def _take_over(self, successor: socket.socket) -> None:
        """Use the connection of another process."""
        pid, user = peer_of(successor)
        if user != os.getuid():
            raise ValueError(user)
        received, descriptors, _, _ = socket.recv_fds(successor, _LONGEST, 2)
        stdin, stdout = descriptors
        seen = int(received)
        connection = _Connection(os.fdopen(stdin, "rb"), stdout, pid, successor)
        with self._news:
            before, self._connection = self._connection, None
            if self._timer is not None:
                self._timer.cancel()
            if before is not None:
                before.close()
            connection.write(encoded({"rejoined": self._orders}))
            self._forget(seen)
            self._next = seen
            self._connection = connection
            self._news.notify_all()
        self._listen_to(connection)


def rejoin(home: Home, request: Rejoin) -> Iterator[JobAnswer]:
    """Give this connection to the process that a client has lost its own to; the answers come from there."""
    run = home.run(request["name"])
    job_id = (read_json(run.spec) or {}).get("job_id")
    with socket.socket(socket.AF_UNIX) as waiting:
        try:
            if job_id != request["job_id"]:
                raise FileNotFoundError
            with reachable(run.client_socket) as path:
                waiting.connect(path)
            socket.send_fds(waiting, [str(request["seen"]).encode()], [sys.stdin.fileno(), sys.stdout.fileno()])
        except OSError:
            raise Refused(f"job {request['name']} does not wait for this command any more") from None
        with contextlib.suppress(OSError):
            waiting.recv(1)  # until the other process uses them no more
    yield from ()


def _client() -> int:
    """The process below this connection's sshd: this one, or what has started the container that it is in."""
    return int(os.environ.get(CLIENT, os.getpid()))


def _listener(path: Path) -> socket.socket | None:
    """Listen on a socket in a folder of this user alone; None where the disk has no room, or cannot have one."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        path.unlink(missing_ok=True)
        with reachable(path) as short:
            listener.bind(short)
        path.chmod(0o600)
        listener.listen()
    except OSError:
        listener.close()
        return None
    return listener
