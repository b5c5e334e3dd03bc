"""A process that an agent of a warm server has forked before it did anything else, and that becomes its fork server."""

from __future__ import annotations

import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from paceline.node.machine import processes
from paceline.node.signals import HANDLED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_MOST_BYTES = 1 << 20  # of the order, which holds the variables of the fork server
_MOST_DESCRIPTORS = 16
_LOOK = 0.02  # seconds between two looks whether a process has ended


class Child:
    """A forked child of this process, with what is used of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # others that end this process's children have reaped it
                pid, status = self.pid, int(signal.SIGKILL)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended."""
        if self.poll() is None:
            try:  # Linux has it from 5.3 on, and a Python that was built there, which those of conda and uv were not
                watched = os.pidfd_open(self.pid)
            except (OSError, AttributeError):
                return self._looked_at(timeout)
            try:
                poll = select.poll()  # `select` knows no descriptor above 1023
                poll.register(watched, select.POLLIN)
                poll.poll(None if timeout is None else timeout * 1000)
            finally:
                os.close(watched)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def _looked_at(self, timeout: float | None) -> int:
        """The same where nothing tells that a process has ended."""
        until = math.inf if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(_LOOK)
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL it."""
        self.send_signal(signal.SIGKILL)


class Seed(Child):
    """The agent's side: a child that waits for the order to become the fork server."""

    def __init__(self, pid: int, sock: socket.socket) -> None:
        super().__init__(pid)
        self._socket = sock

    def grow(self, env: Mapping[str, str], folder: str, spec: str, channel: socket.socket, kept: Sequence[int]) -> bool:
        """Let it become the fork server; returns whether it lives."""
        order = json.dumps({"env": dict(env), "spec": spec}).encode()
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _MOST_BYTES)
            socket.send_fds(self._socket, [order], [opened, channel.fileno(), *kept])
        except OSError:
            return False
        finally:
            os.close(opened)
            self._socket.close()
        return True


def plant() -> Seed | None:
    """Fork; returns the seed in this process, None in the new one, which ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    pid = os.fork()
    if pid:
        theirs.close()
        return Seed(pid, ours)
    processes.die_with(parent)
    os.setsid()
    ours.close()
    os.dup2(theirs.detach(), 3)
    return None


def sprout() -> tuple[int, str]:
    """In the new process: wait for the order, and take its environment; returns the channel and the path of spec.json.

    The process ends if its agent does.
    """
    processes.close_descriptors({0, 1, 2, 3})
    with socket.socket(fileno=3) as order:
        data, descriptors, _, _ = socket.recv_fds(order, _MOST_BYTES, _MOST_DESCRIPTORS)
    if not data:
        os._exit(0)
    asked = json.loads(data)
    processes.set_environment(asked["env"])
    for number in HANDLED:  # the agent handles these, so what it executes would have them as Python sets them
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.fchdir(descriptors[0])
    os.close(descriptors[0])
    modules: Any = sys.modules
    if "tempfile" in modules:
        modules["tempfile"].tempdir = None  # an import may have asked for this folder, which a variable names
    if "multiprocessing.process" in modules:
        modules["multiprocessing.process"].current_process().authkey = os.urandom(32)
    for name in [it for it in modules if it.partition(".")[0] == "tqdm"]:
        del modules[name]  # it has read its variables, of which one is the width of the terminal
    return descriptors[1], asked["spec"]
