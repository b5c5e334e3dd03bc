"""The agent's side of the fork server: starts ranks through it, and stops them and all that they started."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.contract import CONTRACTS, RANK_KEY, RESUME_CODE, TOKEN, WANTS_INTERRUPT
from paceline.contract.tensorflow import ends_with_first
from paceline.node import ENTRY
from paceline.node.eventloop.channel import Channel, ChannelClosed
from paceline.node.failure import CRASHES, OomWatch, exit_code, rank_failure
from paceline.node.files import is_disk_full
from paceline.node.machine import processes
from paceline.node.rundir.directory import read_error
from paceline.node.spec import device_of

from . import setup
from .joining import UNJOINED
from .placement import environment, place

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from paceline.contract import Placement
    from paceline.contract.records import Cause, Failure
    from paceline.node.eventloop.loop import Loop
    from paceline.node.journal.status import Attempt, RankRecord
    from paceline.node.rundir.directory import RunDirectory
    from paceline.node.spec import NodeSpec

    from .messages import Ended, FromServer, RankOrder, Spawned, ToServer
    from .seed import Child, Seed

SWEEP_GRACE = 2.0  # seconds between SIGTERM and SIGKILL for what the ranks left behind
SERVER_SECONDS = 5.0  # how long the fork server may take for what takes it milliseconds


@dataclass
class Rank:
    """One rank of the current attempt."""

    placement: Placement
    env: dict[str, str]
    out: Path
    err: Path
    error: Path
    device: str = ""  # as the machine numbers it; "" for a rank without one
    pid: int = 0
    status: int | None = None  # wait status once it has ended
    resumes: bool = False  # whether it has saved its state at a stop, and asks to be started again
    failure: Failure | None = None

    @property
    def name(self) -> str:
        """The instance's name within the job: the first rank is the master, the others are workers."""
        rank = self.placement.rank
        return "master-0" if rank == 0 else f"worker-{rank - 1}"

    @property
    def state(self) -> str:
        """Its state, as in status.json."""
        if self.status is None:
            return "RUNNING" if self.pid else "STARTING"
        if self.status == 0:
            return "SUCCEEDED"
        crashed = os.WIFSIGNALED(self.status) and os.WTERMSIG(self.status) in CRASHES  # signals that nobody stops it by
        return "FAILED" if self.failure or crashed else "STOPPED"

    @property
    def wants_interrupt(self) -> bool:
        """Whether the script has asked for SIGINT instead of SIGTERM after Ctrl-C."""
        return self.error.with_suffix(WANTS_INTERRUPT).exists()

    def logs(self) -> dict[Path, bytes]:
        """Its log files, with their names in the time index."""
        rank = self.placement.rank
        return {self.out: b"%do" % rank} if self.err == self.out else {self.out: b"%do" % rank, self.err: b"%de" % rank}

    def describe(self, job: str) -> RankRecord:
        """Its entry in status.json."""
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


def fork_server_environment(spec: NodeSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of a job's fork server, from those of its agent."""
    kept_away = {*CONTRACTS[spec.framework].unsets, TOKEN, RANK_KEY}
    return {**{name: value for name, value in environ.items() if name not in kept_away}, **spec.env}


class Ranks:
    """The ranks on this node, and the fork server that starts them.

    Attributes:
        current: the ranks of the current attempt, by local rank.
        server_failure: why the fork server ended on its own, or "".
        server_cause: the cause of that.
        is_swept: whether nothing is left of what `sweep` was to end.
    """

    def __init__(
        self,
        loop: Loop,
        spec: NodeSpec,
        directory: RunDirectory,
        changed: Callable[[], None],
        seed: Seed | None = None,
    ) -> None:
        """Start nothing yet."""
        self.current: dict[int, Rank] = {}
        self.server_failure = ""
        self.server_cause: Cause = "agent"
        self._loop = loop
        self._spec = spec
        self._dir = directory
        self._changed = changed
        self._is_ready = False
        self._is_importing = False
        self._stopping = 0.0  # since when the agent stops the ranks (monotonic); 0 if it does not
        self.is_swept = False
        self._has_explained = self._is_unjoined = False
        self._oom = OomWatch()
        self._kept: tuple[int, ...] = ()  # descriptors that stay open as long as a process of the job is left
        self._seed = seed
        self._server: subprocess.Popen[bytes] | Child | None = None
        self._channel: Channel | None = None
        self._watched: int | None = None  # the process of a fork server with a setup

    @property
    def is_ready(self) -> bool:
        """Whether the fork server has imported the framework, so that ranks can start at once."""
        return self._is_ready

    @property
    def has_server(self) -> bool:
        """Whether there is a fork server."""
        return self._channel is not None

    @property
    def have_started(self) -> bool:
        """Whether every rank of the current attempt has started."""
        return all(rank.pid for rank in self.current.values())

    @property
    def has_live_ranks(self) -> bool:
        """Whether a rank has not ended."""
        return any(rank.status is None for rank in self.current.values())

    @property
    def is_over(self) -> bool:
        """Whether the first rank has succeeded, if the job ends with it."""
        first = next((rank for rank in self.current.values() if rank.placement.rank == 0), None)
        is_tensorflow = self._spec.framework == "tensorflow"
        return first is not None and first.status == 0 and is_tensorflow and ends_with_first(self._spec.env)

    @property
    def resumes(self) -> bool:
        """Whether a rank has saved its state and asks to be started again."""
        return any(rank.resumes for rank in self.current.values())

    def failures(self) -> list[Failure]:
        """The ranks that failed, in no order; their ages are as of now, so they can be compared."""
        now = self._loop.now()
        failures = [rank.failure for rank in self.current.values() if rank.failure]
        return [{**failure, "age": now - failure["ended"]} for failure in failures]

    def use(self, spec: NodeSpec, kept: tuple[int, ...]) -> None:
        """Before the fork server starts: set the spec, and the descriptors that the server and its forks inherit."""
        self._spec = spec
        self._kept = kept

    def place(self, start: Attempt, key: str | None) -> list[Rank]:
        """The ranks to start in an attempt; independent processes that have succeeded do not start again."""
        are_independent = self._spec.framework == "indexed"
        succeeded = {local for local, rank in self.current.items() if are_independent and rank.status == 0}
        return [self._place(start, local, key) for local in range(self._spec.nproc) if local not in succeeded]

    def _place(self, start: Attempt, local_rank: int, key: str | None) -> Rank:
        """A rank with its placement, its variables, and its files."""
        spec, files = self._spec, self._dir
        placement = place(spec, start, local_rank)
        out = files.log(placement.attempt, placement.rank)
        err = files.log(placement.attempt, placement.rank, "err") if local_rank in spec.split_streams else out
        for path in (out, err):
            path.touch(0o600)
        error = files.error(placement.attempt, placement.rank)
        env = environment(spec, placement, files)
        if key is not None:
            env[RANK_KEY] = key
        return Rank(placement, env, out, err, error, device_of(spec.devices, local_rank))

    def _start_server(self) -> None:
        """Start the fork server, without waiting for it."""
        ours, theirs = socket.socketpair()
        env = fork_server_environment(self._spec, os.environ)
        seed, self._seed = self._seed, None
        with theirs:
            if (
                seed is not None
                and not self._spec.setup
                and seed.grow(env, self._spec.working_dir, str(self._dir.spec), theirs, self._kept)
            ):
                self._server, imported = seed, {*sys.modules}  # the seed has what this process has
            else:
                self._server, imported = self._exec_server(env, theirs), set[str]()
        packages = dict.fromkeys(it.split(".")[0] for it in self._spec.preload)
        if self._spec.start_method == "fork" and (missing := [it for it in packages if it not in imported]):
            self._is_importing = True
            self._dir.append({"event": "importing", "what": missing})
        self._channel = Channel(ours)
        self._loop.watch(self._channel, self._receive)
        if self._spec.setup:  # what it leaves behind keeps the other end of the channel open
            with contextlib.suppress(OSError, AttributeError):
                self._watched = os.pidfd_open(self._server.pid)
                self._loop.watch(self._watched, self._server_lost)

    def _exec_server(self, env: dict[str, str], channel: socket.socket) -> subprocess.Popen[bytes]:
        """A fork server that is a new process."""
        spec = self._spec
        # The program at the end is for users, and for pkill: a forked rank keeps this command line.
        shown = [*(["-m"] if spec.program.kind == "module" else []), spec.program.target, *spec.program.args]
        command = [*spec.python, ENTRY, "forkserver", str(channel.fileno()), str(self._dir.spec), *shown]
        if spec.setup:
            command = setup.command_with(spec.setup, command, spec.working_dir, self._dir.path / setup.REPORT)
        with open(self._dir.agent_log, "ab") as log:
            return subprocess.Popen(
                command, env=env, cwd=spec.working_dir, pass_fds=[channel.fileno(), *self._kept],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                # What a setup leaves behind becomes the fork server's, which ends it when the agent is gone.
                preexec_fn=processes.adopt_orphans if spec.setup else None,  # noqa: PLW1509 - the agent has one thread
            )  # fmt: skip

    def warm_up(self) -> None:
        """Start the fork server, unless it runs; it imports the framework while the agent continues."""
        if self._channel is None:
            self.server_failure = ""
            self._start_server()

    def launch(self, ranks: list[Rank], start: Attempt) -> None:
        """Start these ranks of an attempt; `changed` is called as they start and end."""
        self._expect(ranks)
        self._send_start(ranks)

    def _expect(self, ranks: list[Rank]) -> None:
        """Make these ranks the current ones, before they start."""
        self._stopping = 0.0
        self.warm_up()
        self.current.update((rank.placement.local_rank, rank) for rank in ranks)

    def _send_start(self, ranks: list[Rank]) -> None:
        orders: list[RankOrder] = [
            {"local_rank": r.placement.local_rank, "env": r.env, "out": str(r.out), "err": str(r.err),
             "error": str(r.error)} for r in ranks
        ]  # fmt: skip
        self._send({"do": "start", "ranks": orders})

    def start_daemon(self, attempt: int, command: list[str], folders: dict[str, str]) -> None:
        """Start mpirun's daemon here, unless the attempt that it belongs to is over; only MPI jobs have one."""

    def signal(self, number: int) -> None:
        """Send a signal to every rank."""
        self._send({"do": "signal", "signal": number, "ranks": list(self.current)})

    def pass_on(self, number: int) -> None:
        """Send a signal to every rank that handles it."""
        self._send({"do": "pass on", "signal": number})

    def save(self) -> None:
        """Ask every rank to save its state and end: SIGUSR2."""
        self._stopping = self._stopping or self._loop.now()
        self._wake_server()
        if self.has_live_ranks and self._is_ready:
            self.signal(signal.SIGUSR2)
            self.signal(signal.SIGCONT)

    @property
    def awaited(self) -> float:
        """Seconds to wait before `terminate` for programs beside the ranks that are ending; 0 for none."""
        return 0.0

    def terminate(self, by: int = 0) -> None:
        """Ask every rank to end: SIGTERM; after SIGINT (`by`), ranks that want it get that instead."""
        self._stopping = self._stopping or self._loop.now()
        if not self._is_ready:
            self._end_server()  # still importing, so there is no rank yet
            return
        self._wake_server()
        if self.has_live_ranks:
            wanting = [local for local, rank in self.current.items() if rank.wants_interrupt]
            interrupted = wanting if by == signal.SIGINT else []
            self._send({"do": "signal", "signal": signal.SIGINT, "ranks": interrupted})
            others = [local for local in self.current if local not in interrupted]
            self._send({"do": "signal", "signal": signal.SIGTERM, "ranks": others})
            self.signal(signal.SIGCONT)  # a suspended rank handles no other signal

    def kill(self) -> None:
        """End every rank: SIGKILL."""
        self.signal(signal.SIGKILL)

    def sweep(self, grace: float) -> None:
        """End what the ranks have left behind: SIGTERM, `grace` seconds, SIGKILL; see `is_swept`."""
        self.is_swept = False
        self._send({"do": "sweep", "grace": grace})

    def end_server(self) -> None:
        """End a fork server that does nothing, and with it every process of the job on this node."""
        self._end_server(at_once=True)

    def clean_up(self) -> None:
        """All ranks of the attempt have ended: forget what else belongs to it."""

    def close(self) -> None:
        """End the fork server, and with it every process of the job on this node."""
        self._stopping = self._stopping or self._loop.now()
        self._end_server()

    def _wake_server(self) -> None:
        """Continue the fork server if it is suspended (SIGSTOP): it is needed to end its ranks."""
        if self._server is not None and processes.is_suspended(self._server.pid):
            self._dir.append({"event": "continued", "what": "fork server", "pid": self._server.pid})
            self._server.send_signal(signal.SIGCONT)

    def _send(self, message: ToServer) -> None:
        if self._channel is not None:
            with contextlib.suppress(ChannelClosed):  # the next `receive` raises it too, and handles it
                self._channel.send(message)

    def _receive(self) -> None:
        assert self._channel is not None
        try:
            messages: list[FromServer] = self._channel.receive()
        except ChannelClosed:
            self._server_lost()
            return
        for message in messages:
            if message["event"] == "ready":
                self._is_ready = True
                if self._is_importing:
                    self._is_importing = False
                    self._dir.append({"event": "imported", "seconds": round(message["seconds"], 1)})
                self._explain_exec(message["why"] or self._spec.why_exec)
            elif message["event"] == "started":
                self.current[message["local_rank"]].pid = message["pid"]
            elif message["event"] == "exited":
                self._rank_ended(self.current[message["local_rank"]], message["status"], message["time"])
            elif message["event"] == "swept":
                self.is_swept = True
            else:
                self._program_changed(message)
        self._changed()

    def _explain_exec(self, why: str) -> None:
        """Record, once, why each rank imports the framework itself."""
        if why and not self._has_explained:
            self._has_explained = True
            self._dir.append({"event": "exec", "why": why})

    def _program_changed(self, message: Spawned | Ended) -> None:
        """A program beside the ranks has started or ended; there is none unless mpirun starts the ranks."""

    def _rank_ended(self, rank: Rank, status: int, ended: float) -> None:
        rank.status = status
        if status == 0 and rank.error.with_suffix(UNJOINED).exists():
            each = f"each of the {rank.placement.world_size} ranks"
            self.note_unjoined(f"the script never asked which rank it is, so {each} did all of the work")
        record = read_error(rank.error)
        if exit_code(status) == RESUME_CODE and record is not None and record["type"] == "Preempted":
            rank.resumes = True
            return
        ended_by_itself = (status != 0 and ended < self._stopping) or (
            record is not None and (record["type"] != "ExitCode" or record["time"] < self._stopping)
        )
        # A rank that the agent stops has not failed, unless it was about to end before; a full disk keeps no record.
        if record is None and status != 0 and self._stopping and is_disk_full(rank.error.parent):
            status = 1 << 8
        elif not ended_by_itself and (status == 0 or self._stopping):
            return
        rank.failure = rank_failure(
            rank=rank.placement.rank, node=rank.placement.node_rank, host=socket.gethostname(), pid=rank.pid,
            status=status, ended=ended, log=rank.err, error=rank.error,
            oom=status == signal.SIGKILL and self._oom.killed(rank.pid),
        )  # fmt: skip

    def note_unjoined(self, why: str) -> None:
        """Record, once, that the ranks do not work together, unless each gets its local rank as an argument."""
        if self._is_unjoined or self._spec.local_rank_flag:
            return
        self._is_unjoined = True
        what = (
            "join them with paceline.init() or torch.distributed.init_process_group(), "
            "or add --framework indexed if they are meant to be independent"
        )
        self._dir.append({"event": "unjoined", "why": f"{why}; {what}"})

    def _server_lost(self) -> None:
        """The fork server ended on its own; the kernel has ended its ranks with it."""
        importing = not self._is_ready
        assert self._server is not None
        pid = self._server.pid
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._server.wait(SERVER_SECONDS)  # it closed the connection, so it is about to end
        self._end_server()
        code = self._server.wait()
        why = setup.failure(self._dir.path / setup.REPORT, socket.gethostname(), self._dir.agent_log, code)
        if why is not None:
            self.server_cause, self.server_failure = "setup", why
            self._changed()
            return
        self.server_cause = "out of memory" if code == -signal.SIGKILL and self._oom.killed(pid) else "agent"
        why = self.server_cause if self.server_cause == "out of memory" else f"exit status {code}"
        doing = f" while it imported {', '.join(self._spec.preload)}" if importing and self._spec.preload else ""
        self.server_failure = (
            f"the process that the ranks are forked from ended{doing}: {why}; its output is in {self._dir.agent_log}"
        )
        self._changed()

    def _end_server(self, at_once: bool = False) -> None:
        if self._watched is not None:
            self._loop.forget(self._watched)
            os.close(self._watched)
            self._watched = None
        if self._channel is not None:
            self._loop.forget(self._channel)
            self._channel.close()  # the server then ends all ranks, and itself
            self._channel = None
        if self._server is not None:
            if not self._is_ready or at_once:
                self._server.kill()
            try:
                self._server.wait(SERVER_SECONDS)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
        while processes.kill_descendants(os.getpid()):  # orphans become the agent's children when the server is gone
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, 0)
        self._is_ready = False
        for rank in self.current.values():
            if rank.status is None:
                rank.status = int(signal.SIGKILL)
