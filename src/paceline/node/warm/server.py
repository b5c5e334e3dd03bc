"""A warm server: imports modules once, and forks the agents of jobs from itself.

It has a single thread, and touches no device. A client connects to its socket, and sends one message:

    {"do": "start", "run": …, "env": {…}, "mask": […]}   start the agent of the job in this run directory
        → {"refused": "…"}        it does not fit, and nothing was started
        → {"ready": 4711}         a fork with this pid waits; then the client sends "go", with the descriptors of the
                                  job's lock, log and lifeline: a client that is gone, or lost patience, starts nothing
        → {"status": 256}         at the end: the wait status of the agent
    {"do": "compare", …}          → {"same": true}, if it serves jobs with these variables in this folder
    {"do": "describe"}            → what `paceline warm --list` shows
    {"do": "stop"}                → the same, and the server ends; jobs that it has started go on

It ends when it has started no job for its time, when a file that it has imported changes, and when memory is short.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.contract.local_sockets import peer_of
from paceline.contract.memory import machine_memory
from paceline.node.agent import guard
from paceline.node.machine import processes
from paceline.node.planning.packages import WITH_OPTIMIZERS
from paceline.node.ranks import forkserver, seed
from paceline.node.ranks.launcher import fork_server_environment
from paceline.node.ranks.program import script_folder
from paceline.node.signals import HANDLED
from paceline.node.spec import NodeSpec

from . import folder, peer
from .imports import Imported
from .leave import leave_behind

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from paceline.contract.messages import WarmRecord

    from .messages import Asked, Message

_LOOK = 5.0  # seconds between two looks at the memory and at the files
_LEAST_MEMORY = 0.1  # of the machine's; with less that is available, the server ends
_GO_SECONDS = 20.0  # for the client to send the descriptors
_REFUSED, _STALE = 113, 114  # exit codes of a fork that has started nothing; the second: a file has changed
_ALIKE = 4  # servers that differ in variables alone which only some modules read
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Order:
    """What a fork of the server becomes: the agent of this job."""

    run: str
    env: dict[str, str]
    # lock, log, lifeline: descriptors; None for a job that outlives its client
    lock: int
    log: int
    lifeline: int | None
    changes: dict[str, str | None]  # variables that the imports have changed; None removes one
    client: socket.socket  # gets the wait status of the agent


class WarmServer:
    """Listens, forks, and looks whether it is still of use."""

    def __init__(self, asked: Asked, cold: Collection[str]) -> None:
        """Import nothing yet."""
        self._python = asked["python"]
        self._preload = asked["preload"]
        self._seconds = asked["seconds"]
        self._cwd = asked["cwd"]
        self._folder, self._key = Path(asked["folder"]), asked["key"]
        self._began = self._used = time.monotonic()
        self._jobs = 0
        self._cold = cold
        self._forks: set[int] = set()
        self._ends = False
        self._lock: int | None = None

    def prepare(self) -> str:
        """Take the place, import, and listen; returns why that is not possible, or ""."""
        for number in range(_ALIKE):
            key = f"{self._key}-{number}"
            self._lock = folder.locked(self._folder, key)
            if self._lock is not None:
                break
            if self._is_served(key):
                return "such a process is already kept warm, or starts"
        else:
            return (
                f"{_ALIKE} processes that differ in variables alone are kept warm; end them with paceline warm --stop"
            )
        self._key = key
        try:
            self.imported = Imported(self._preload, self._cold)
        except BaseException as error:
            return f"importing {', '.join(self._preload)} failed: {type(error).__name__}: {error}"
        if why := forkserver.unsafe_to_fork():
            return f"it cannot be forked: {why}"
        processes.forget_variables(self.imported.names)
        gc.collect()
        gc.freeze()
        self._wakeup, self._wakeup_write = os.pipe()
        for end in (self._wakeup, self._wakeup_write):
            os.set_blocking(end, False)
        for number in (*_ENDING, signal.SIGCHLD):
            signal.signal(number, self._on_signal)
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        self._listener = folder.listen(self._folder, self._key)
        self._used = time.monotonic()
        return ""

    def _is_served(self, key: str) -> bool:
        """Whether another server imports the same as this one would; one that does not answer yet may do so."""
        connection = folder.connect(self._folder, key, _GO_SECONDS)
        if connection is None:
            return True
        with connection, contextlib.suppress(OSError):
            folder.send(connection, {"do": "compare", "env": dict(os.environ), "cwd": self._cwd})
            return bool(folder.receive(connection).get("same", True))
        return True

    def _on_signal(self, number: int, frame: object) -> None:
        self._ends = self._ends or number in _ENDING

    def serve(self) -> Order | None:
        """Serve until it is time to end; in a fork that becomes an agent, return the order."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wakeup, selectors.EVENT_READ)
            looked = time.monotonic()
            while not self._ends:
                for key, _ in selector.select(min(_LOOK, self._seconds)):
                    if key.fileobj is self._listener:
                        with contextlib.suppress(OSError):
                            selector.register(self._listener.accept()[0], selectors.EVENT_READ)
                    elif key.fileobj != self._wakeup and isinstance(key.fileobj, socket.socket):
                        selector.unregister(key.fileobj)
                        with key.fileobj as client:
                            order = self._answer(client)
                        if order is not None:
                            return order
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wakeup, 4096)
                self._reap()
                if time.monotonic() - looked >= _LOOK or self._is_idle():
                    looked = time.monotonic()
                    self._ends = self._ends or self._is_idle() or self._is_useless()
        folder.remove(self._folder, self._key)
        return None

    def _is_idle(self) -> bool:
        return not self._forks and time.monotonic() - self._used >= self._seconds

    def _is_useless(self) -> bool:
        memory = machine_memory()
        is_short = memory.total > 0 and memory.available < _LEAST_MEMORY * min(
            memory.total, memory.limit or memory.total
        )
        return is_short or not folder.is_private(self._folder) or bool(self.imported.changed_file())

    def _reap(self) -> None:
        for pid in list(self._forks):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._forks.discard(pid)
                code = os.waitstatus_to_exitcode(status)
                self._jobs -= code in (_REFUSED, _STALE)
                self._ends = self._ends or code == _STALE
                if code not in (_REFUSED, _STALE):
                    self._used = time.monotonic()

    def _answer(self, client: socket.socket) -> Order | None:
        """Do what a client asks for; in a fork that becomes an agent, return the order."""
        pid, uid = peer_of(client)
        message = folder.receive(client) if uid == os.geteuid() else {}
        if message.get("do") == "start":
            return self._fork(client, pid, message)
        with contextlib.suppress(OSError):
            if message.get("do") == "describe":
                folder.send(client, self._describe())
            elif message.get("do") == "compare":
                different = self.imported.other_variable(message["env"]) or self._other_paths(
                    message["env"], message["cwd"]
                )
                folder.send(client, {"same": not different})
            elif message.get("do") == "stop":
                self._ends = True
                folder.remove(self._folder, self._key)
                folder.send(client, self._describe())
        return None

    def _describe(self) -> WarmRecord:
        now = time.monotonic()
        remaining = self._seconds if self._forks else self._seconds - (now - self._used)
        return {
            "key": self._key, "pid": os.getpid(), "preload": self._preload, "python": self._python,
            "age": now - self._began, "ends_in": max(0.0, remaining), "jobs": self._jobs, "memory": _own_memory(),
        }  # fmt: skip

    def _fork(self, client: socket.socket, pid: int, message: Message) -> Order | None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {*HANDLED, signal.SIGCHLD})
        fork = os.fork()
        if fork:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            self._forks.add(fork)
            self._jobs += 1
            return None
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            for descriptor in (self._wakeup, self._wakeup_write, self._lock):
                if descriptor is not None:
                    os.close(descriptor)
            self._listener.close()
            return self._become(client.detach(), pid, message)
        except BaseException as error:
            with contextlib.suppress(OSError):
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(_REFUSED)

    def _become(self, connection: int, pid: int, message: Message) -> Order:
        """In a fork: see whether the job fits, take after the client, and wait for its word."""
        client = socket.socket(fileno=connection)
        client.settimeout(_GO_SECONDS)
        if changed := self.imported.changed_file():
            folder.send(client, {"refused": f"{changed} has changed since it was imported"})
            os._exit(_STALE)
        try:
            spec = NodeSpec.load(Path(message["run"], "spec.json"))
            self._check(spec, message["env"])
            peer.take_after(pid)
        except peer.Unfit as error:
            folder.send(client, {"refused": str(error)})
            os._exit(_REFUSED)
        folder.send(client, {"ready": os.getpid()})
        word, descriptors, _, _ = socket.recv_fds(client, 16, 3)
        if word != b"go":
            os._exit(_REFUSED)
        signal.pthread_sigmask(signal.SIG_SETMASK, message["mask"])
        client.settimeout(None)
        lock, log, *lifeline = descriptors
        lifeline_fd = lifeline[0] if lifeline else None
        changes = {name: it for module in spec.preload for name, it in self.imported.changes.get(module, {}).items()}
        return Order(message["run"], message["env"], lock, log, lifeline_fd, changes, client)

    def _other_paths(self, env: Mapping[str, str], cwd: str) -> str:
        """Why PYTHONPATH leads to other modules now than when this process imported its own, or ""."""
        paths = env.get("PYTHONPATH", "").split(os.pathsep) if env.get("PYTHONPATH") else []
        if not all(map(os.path.isabs, paths)) and cwd != self._cwd:
            return f"PYTHONPATH has a relative path, and the warm process was started in {self._cwd}"
        for path in paths:
            if name := self.imported.shadowed(os.path.join(cwd, path)):
                return f"{path} holds {name}, and the warm process has imported another module of that name"
        return ""

    def _check(self, spec: NodeSpec, env: Mapping[str, str]) -> None:
        """See whether the fork server of a job would have imported the same, in the same way."""
        if spec.setup:
            raise peer.Unfit("the job has setup commands, whose variables the warm process does not have")
        if folder.interpreter(spec.python) != folder.interpreter(self._python):
            raise peer.Unfit(f"the job runs {' '.join(spec.python)}, not {' '.join(self._python)}")
        wanted = spec.preload if spec.start_method == "fork" else ()
        for name in self._preload:
            if name not in wanted and not (name in WITH_OPTIMIZERS and "torch" in wanted):
                raise peer.Unfit(
                    f"the warm process has imported {name}, which the job does not import before its ranks start"
                )
        if different := self.imported.other_variable(fork_server_environment(spec, env)):
            raise peer.Unfit(different)
        if different := self._other_paths(fork_server_environment(spec, env), spec.working_dir):
            raise peer.Unfit(different)
        kind, target = spec.program.kind, spec.program.target
        start = script_folder(os.path.join(spec.working_dir, target)) if kind == "script" else spec.working_dir
        if kind != "command" and (name := self.imported.shadowed(start)):
            raise peer.Unfit(f"{start} holds {name}, and the warm process has imported another module of that name")


def _own_memory() -> int:
    """The bytes that this process alone uses: those that end with it."""
    with contextlib.suppress(OSError, ValueError), open("/proc/self/smaps_rollup") as rollup:
        return sum(int(line.split()[1]) << 10 for line in rollup if line.startswith("Private_"))
    return 0


def _become_agent(order: Order) -> None:
    """In a fork of the server: become the guard of a job, its agent, and its fork server, each in a process."""
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (order.log, 1), (order.log, 2)):
        os.dup2(source, target)
    os.chdir("/")
    processes.set_environment(order.env)

    def report(status: int) -> None:
        with contextlib.suppress(OSError):  # nobody waits for it
            folder.send(order.client, {"status": status})
        if os.getppid() != server:  # it has gone, so the next job needs another one
            leave_behind(order.run)

    server = os.getppid()
    kept = {0, 1, 2, order.lock, order.client.fileno(), *([] if order.lifeline is None else [order.lifeline])}
    processes.close_descriptors(kept)
    guard.begin(order.run, report)
    order.client.close()
    planted = seed.plant()
    if planted is None:
        channel, spec = seed.sprout()
        for name, value in order.changes.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        forkserver.main(channel, spec, is_warm=True)
        return
    from paceline.node.agent.agent import main as agent

    code = agent(order.run, order.lock, -1 if order.lifeline is None else order.lifeline, planted)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)  # finalization of a framework takes half a second, and nothing is left to be done


def main(arguments: Sequence[str], cold: Collection[str]) -> None:
    """Be a warm server; in its forks, an agent or a rank."""
    asked: Asked = json.loads(arguments[0])
    os.chdir("/")
    ready = None if asked["ready"] is None else socket.socket(fileno=asked["ready"])
    processes.set_title(f"paceline: warm {', '.join(asked['preload'])}")
    server = WarmServer(asked, cold)
    why = server.prepare()
    if ready is not None:
        folder.send(ready, {"why": why} if why else {**server._describe(), "why": ""})
        ready.close()
    if why:
        print(why, file=sys.stderr, flush=True)
        os._exit(1)
    order = server.serve()
    if order is None:
        os._exit(0)  # finalization of a framework takes time, and nothing is left to be done
    del server
    _become_agent(order)
