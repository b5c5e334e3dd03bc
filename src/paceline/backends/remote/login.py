"""A login that a command did not wait for: a process of its own goes on with it, and keeps it for the next command.

As a program (standard library only), it runs ssh until Python waits there for its first line, then listens on a socket.
Whoever connects first gets ssh's input and output, and the exit status at the end; hanging up ends ssh.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading

LOGIN_SECONDS = 120.0  # that a login may take; sshd gives up after as many
KEPT_SECONDS = 60.0  # that it is kept for the next command
_ANSWER_SECONDS = 1.0  # for the process that keeps it

_going_on: set[int] = set()  # processes of this one's that log in, until their end has been noticed


class Login:
    """A login that is there, for which Python waits: what is used of `subprocess.Popen`."""

    def __init__(self, connection: socket.socket, stdin: int, stdout: int) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._status: int | None = None
        self.stdin, self.stdout = os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb")

    def poll(self) -> int | None:
        """Its exit status; None while it goes on."""
        if self._status is None:
            try:
                said = self._connection.recv(1)
            except BlockingIOError:
                return None
            except OSError:
                said = b""
            self._status = said[0] if said else 255  # as ssh says that a connection broke
        return self._status

    def terminate(self) -> None:
        """End it."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    kill = terminate


def take(path: str) -> Login | None:
    """The login that is kept behind a socket; None if there is none."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_ANSWER_SECONDS)
    try:
        connection.connect(path)
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 2)
        return Login(connection, *descriptors)
    except ConnectionRefusedError:  # what kept it was killed
        with contextlib.suppress(OSError):
            os.unlink(path)
    except (OSError, TypeError):  # TypeError: another one has got it
        pass
    connection.close()
    return None


def go_on(path: str, mark: str, command: list[str]) -> None:
    """Start a process that logs in, and keeps the login behind a socket; unless there is one that does."""
    _forget_ended()
    null = subprocess.DEVNULL
    with contextlib.suppress(OSError):
        process = subprocess.Popen(
            [sys.executable, "-IS", __file__, path, mark, *command], stdin=null, stdout=null, stderr=null,
            start_new_session=True,
        )  # fmt: skip
        process.returncode = 0  # it may outlive this one
        _going_on.add(process.pid)


def _forget_ended() -> None:
    """Let the system forget those that have ended: this process may live long, and see many hosts that are silent."""
    for pid in list(_going_on):
        try:
            has_ended = os.waitpid(pid, os.WNOHANG) != (0, 0)
        except ChildProcessError:  # it is a child of the one of which this one is a fork
            has_ended = True
        if has_ended:
            _going_on.discard(pid)


def _keep(path: str, mark: bytes, command: list[str]) -> None:
    lock = open(f"{path}.lock", "w")  # noqa: SIM115 - for as long as this process logs in
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    signal.signal(signal.SIGALRM, lambda *_: sys.exit())
    signal.setitimer(signal.ITIMER_REAL, LOGIN_SECONDS)
    ssh = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0)
    assert ssh.stdin is not None and ssh.stdout is not None
    try:
        said = b""
        while not said.endswith(mark):
            if not (new := ssh.stdout.read(4096)):
                return
            said += new
        signal.setitimer(signal.ITIMER_REAL, KEPT_SECONDS)
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                listener.bind(path)
                listener.listen()
                client = listener.accept()[0]
        finally:
            for name in (path, lock.name):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name)
        lock.close()
        signal.setitimer(signal.ITIMER_REAL, 0)
        socket.send_fds(client, [b"+"], [ssh.stdin.fileno(), ssh.stdout.fileno()])
        ssh.stdin.close()
        ssh.stdout.close()
        threading.Thread(target=_end_with, args=(client, ssh), daemon=True).start()
        status = ssh.wait()
        client.sendall(bytes([status % 256]))
    finally:
        ssh.kill()


def _end_with(client: socket.socket, ssh: subprocess.Popen[bytes]) -> None:
    client.recv(1)
    ssh.terminate()


if __name__ == "__main__":
    _keep(sys.argv[1], sys.argv[2].encode(), sys.argv[3:])
