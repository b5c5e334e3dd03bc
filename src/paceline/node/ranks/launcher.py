"""The agent's side of the fork server: start ranks through it, hear how they end, stop them and all they started."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.contract import CONTRACTS, RESUME_CODE
from paceline.node import ENTRY
from paceline.node.eventloop.channel import Channel, ChannelClosed, Message
from paceline.node.failure import Failure, OomWatch, exit_code, rank_failure
from paceline.node.machine import processes
from paceline.node.rundir.directory import read_json

from . import placement as placing

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from paceline.contract import Placement
    from paceline.node.eventloop.loop import Loop
    from paceline.node.rundir.directory import RunDirectory
    from paceline.node.spec import NodeSpec

SWEEP_GRACE = 2.0  # seconds between SIGTERM and SIGKILL for what the ranks left behind
SERVER_PATIENCE = 5.0  # seconds for the fork server to do what takes it milliseconds


@dataclass
class Rank:
    """One rank of the current attempt."""

    placement: Placement
    env: dict[str, str]
    out: Path
    err: Path
    error: Path
    pid: int = 0
    status: int | None = None  # wait status once it has ended
    resumes: bool = False  # it was told to stop, has saved its state, and asks to be started again
    failure: Failure | None = None

    @property
    def name(self) -> str:
        """The instance's name within the job: the first rank is its master, the others its workers."""
        rank = self.placement.rank
        return "master-0" if rank == 0 else f"worker-{rank - 1}"

    @property
    def state(self) -> str:
        """Its state as status.json has it."""
        if self.status is None:
            return "RUNNING" if self.pid else "STARTING"
        if self.status == 0:
            return "SUCCEEDED"
        return "FAILED" if self.failure else "STOPPED"

    def logs(self) -> dict[Path, bytes]:
        """Its log files, and their names in the time index."""
        rank = self.placement.rank
        return {self.out: b"%do" % rank} if self.err == self.out else {self.out: b"%do" % rank, self.err: b"%de" % rank}

    def describe(self, job: str) -> dict[str, Any]:
        """Its row in the job's status.json."""
        return {
            "name": f"{job}-{self.name}",
            "rank": self.placement.rank,
            "local_rank": self.placement.local_rank,
            "node": self.placement.node_rank,
            "state": self.state,
            "pid": self.pid,
            "exit_code": None if self.status is None else exit_code(self.status),
            "log": str(self.out),
        }


class Ranks:
    """The ranks on this node, and the fork server that they come from."""

    def __init__(self, loop: Loop, spec: NodeSpec, directory: RunDirectory, changed: Callable[[], None]) -> None:
        self.current: dict[int, Rank] = {}  # local rank → rank
        self.imported: Message | None = None  # what the fork server said once it was ready
        self.server_failure = ""
        self._loop = loop
        self._spec = spec
        self._dir = directory
        self._changed = changed
        self._stopping = False
        self._swept = False
        self._oom = OomWatch()
        self._kept: tuple[int, ...] = ()  # descriptors that stay open as long as a process of the job is left
        self._server: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None

    @property
    def left(self) -> bool:
        """Whether a rank has not ended."""
        return any(rank.status is None for rank in self.current.values())

    @property
    def resumes(self) -> bool:
        """Whether a rank has saved its state and asks to be started again."""
        return any(rank.resumes for rank in self.current.values())

    def failures(self) -> list[Failure]:
        """The ranks that failed, in no order; their ages are of one moment, so they can be compared."""
        now = time.monotonic()
        failures = [rank.failure for rank in self.current.values() if rank.failure]
        return [dataclasses.replace(failure, age=now - failure.ended) for failure in failures]

    def use(self, spec: NodeSpec, kept: tuple[int, ...]) -> None:
        """Before the fork server starts: the spec as it is now, and descriptors that the server and its forks keep."""
        self._spec = spec
        self._kept = kept

    def place(self, start: Message) -> list[Rank]:
        """The ranks of an attempt; independent processes that have succeeded stay so when others start again."""
        is_apart = self._spec.framework == "indexed"
        through = {local for local, rank in self.current.items() if is_apart and rank.status == 0}
        return [self._place(start, local) for local in range(self._spec.nproc) if local not in through]

    def _place(self, start: Message, local_rank: int) -> Rank:
        """Where a rank stands, what it sees, and where it writes."""
        spec, files = self._spec, self._dir
        placement = placing.place(spec, start, local_rank)
        out = files.log(placement.attempt, placement.rank)
        err = files.log(placement.attempt, placement.rank, "err") if local_rank in spec.split_streams else out
        for path in (out, err):
            path.touch(0o600)
        error = files.error(placement.attempt, placement.rank)
        return Rank(placement, placing.environment(spec, placement, files), out, err, error)

    def start_server(self) -> None:
        """Start the fork server; it imports the framework while the agent goes on."""
        spec = self._spec
        ours, theirs = socket.socketpair()
        kept_away = CONTRACTS[spec.framework].unsets
        env = {**{k: v for k, v in os.environ.items() if k not in kept_away}, **spec.env}
        # The program at the end is for people and pkill: a forked rank keeps this command line.
        shown = [*(["-m"] if spec.program.kind == "module" else []), spec.program.target, *spec.program.args]
        command = [*spec.python, ENTRY, "forkserver", str(theirs.fileno()), str(self._dir.spec), *shown]
        with theirs, open(self._dir.agent_log, "ab") as log:
            self._server = subprocess.Popen(
                command, env=env, cwd=spec.working_dir, pass_fds=[theirs.fileno(), *self._kept],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self._channel = Channel(ours)
        self._loop.watch(self._channel, self._hear)

    def warm_up(self) -> None:
        """Start the fork server, unless there is one."""
        if self._channel is None:
            self.server_failure = ""
            self.start_server()

    def launch(self, ranks: list[Rank], start: Message) -> None:
        """Start these ranks, as the coordinator said in `start`; `changed` is called as they start and end."""
        self._await(ranks)
        self._order_start(ranks)

    def _await(self, ranks: list[Rank]) -> None:
        """Be ready for these ranks to start."""
        self._stopping = False
        self.warm_up()
        self.current.update((rank.placement.local_rank, rank) for rank in ranks)

    def _order_start(self, ranks: list[Rank]) -> None:
        orders = [
            {"local_rank": r.placement.local_rank, "env": r.env, "out": str(r.out), "err": str(r.err),
             "error": str(r.error)} for r in ranks
        ]  # fmt: skip
        self._order({"do": "start", "ranks": orders})

    def signal(self, number: int) -> None:
        """Pass a signal on to every rank."""
        self._order({"do": "signal", "signal": number, "ranks": list(self.current)})

    def save(self, patience: float, impatient: Callable[[], bool]) -> None:
        """Let every rank save its state and end: SIGUSR2, and `patience` seconds or until `impatient()`."""
        self._stopping = True
        if self.left and self.imported is not None:
            self.signal(signal.SIGUSR2)
            self._loop.run_until(lambda: not self.left or impatient(), patience)

    def stop(self, grace: float, impatient: Callable[[], bool]) -> None:
        """End every rank and all it started: SIGTERM, `grace` seconds or until `impatient()`, SIGKILL."""
        self._stopping = True
        if self.imported is None:
            self._end_server()  # still importing, so there is no rank yet
            return
        if self.left:
            self.signal(signal.SIGTERM)
            self._loop.run_until(lambda: not self.left or impatient(), grace)
        if self.left:
            self.signal(signal.SIGKILL)
            self._loop.run_until(lambda: not self.left, SERVER_PATIENCE)
        self._swept = False
        self._order({"do": "sweep", "grace": 0.0 if impatient() else SWEEP_GRACE})
        self._loop.run_until(lambda: self._swept or self._channel is None, SWEEP_GRACE + SERVER_PATIENCE)
        if self.left or not self._swept:
            self._end_server()

    def close(self) -> None:
        """End the fork server, and with it every process of the job on this node."""
        self._stopping = True
        self._end_server()

    def _order(self, message: Message) -> None:
        if self._channel is not None:
            with contextlib.suppress(ChannelClosed):  # reading tells, and then it is handled
                self._channel.send(message)

    def _hear(self) -> None:
        assert self._channel is not None
        try:
            messages = self._channel.receive()
        except ChannelClosed:
            self._server_lost()
            return
        for message in messages:
            if message["event"] == "ready":
                self.imported = message
            elif message["event"] == "started":
                self.current[message["local_rank"]].pid = message["pid"]
            elif message["event"] == "exited":
                self._rank_ended(self.current[message["local_rank"]], message["status"], message["time"])
            elif message["event"] == "swept":
                self._swept = True
            else:
                self._hear_of_daemon(message)
        self._changed()

    def _hear_of_daemon(self, message: Message) -> None:
        """News of a program beside the ranks; there is none unless mpirun starts them."""

    def _rank_ended(self, rank: Rank, status: int, ended: float) -> None:
        rank.status = status
        record = read_json(rank.error)
        if exit_code(status) == RESUME_CODE and record is not None and record["type"] == "Preempted":
            rank.resumes = True
            return
        # A rank that we stop is no failure, unless an exception had ended it before.
        if record is not None or (status != 0 and not self._stopping):
            rank.failure = rank_failure(
                rank=rank.placement.rank, node=rank.placement.node_rank, host=socket.gethostname(), pid=rank.pid,
                status=status, ended=ended, log=rank.err, error=rank.error,
                oom=status == signal.SIGKILL and self._oom.killed(rank.pid),
            )  # fmt: skip

    def _server_lost(self) -> None:
        """The fork server ended without being asked to; the kernel has ended its ranks with it."""
        importing = self.imported is None
        assert self._server is not None
        pid = self._server.pid
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._server.wait(SERVER_PATIENCE)  # it closed the connection, so it is on its way out
        self._end_server()
        code = self._server.returncode
        why = "out of memory" if code == -signal.SIGKILL and self._oom.killed(pid) else f"exit status {code}"
        doing = f" while it imported {', '.join(self._spec.preload)}" if importing and self._spec.preload else ""
        self.server_failure = (
            f"the process that the ranks are forked from ended{doing}: {why}; what it said is in {self._dir.agent_log}"
        )
        self._changed()

    def _end_server(self) -> None:
        if self._channel is not None:
            self._loop.forget(self._channel)
            self._channel.close()  # it takes this as the order to end everything
            self._channel = None
        if self._server is not None:
            if self.imported is None:
                self._server.kill()
            try:
                self._server.wait(SERVER_PATIENCE)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
        while processes.kill_descendants(os.getpid()):  # orphans come to the agent when the server is gone
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, 0)
        self.imported = None
        for rank in self.current.values():
            if rank.status is None:
                rank.status = int(signal.SIGKILL)
