"""The ranks of `--framework mpi`: Open MPI's mpirun connects them, the fork server starts them as all others.

Node 0's fork server starts mpirun. To start its daemon on another machine mpirun calls what it takes for ssh: a program
that tells node 0's agent (`stand_in`). The agent has the coordinator pass the command line on to that machine's agent,
whose fork server runs it; so machines need no ssh among themselves. For each rank mpirun and its daemons start a
stand-in, which brings the agent the variables by which MPI_Init finds mpirun's daemon and through it the other ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pwd
import shutil
import signal
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.node import ENTRY
from paceline.node.eventloop.channel import Channel, ChannelClosed, Message
from paceline.node.failure import exit_code
from paceline.node.machine import devices
from paceline.node.machine.network import interface_of, interfaces, is_loopback

from .launcher import Rank, Ranks
from .mpi_proxy import short

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.node.eventloop.loop import Loop
    from paceline.node.rundir.directory import RunDirectory
    from paceline.node.spec import NodeSpec

DAEMON_SECONDS = 5.0  # how long mpirun and its daemons may take to end once all ranks have
CAUSE_WAIT = 1.0  # seconds to wait for the rank that made mpirun end
LOST_DAEMON = 195  # what MPI ends a rank with that has lost mpirun's daemon (PMIX_ERR_LOST_CONNECTION, -61)
# mpirun takes a command apart at spaces alone, so that tabs let a shell do it. Not on its command line: mpirun repeats
# that, quoted badly, to its daemons.
_AS_SSH = (
    'sh -c exec\t"$PACELINE_MPI_PYTHON"\t-IS\t"$PACELINE_MPI_ENTRY"\tmpidaemon\t"$PACELINE_MPI_SOCKET"\t"$0"\t"$@"'
)
_AS_RANK = 'exec "$PACELINE_MPI_PYTHON" -IS "$PACELINE_MPI_ENTRY" mpirank "$PACELINE_MPI_SOCKET"'


class MpiRanks(Ranks):
    """The ranks on this node, and mpirun or its daemon here."""

    def __init__(
        self,
        loop: Loop,
        spec: NodeSpec,
        directory: RunDirectory,
        changed: Callable[[], None],
        send: Callable[[Message], None],
    ) -> None:
        super().__init__(loop, spec, directory, changed)
        self._send = send
        self._socket = str(directory.path / "mpi.sock")
        self._listener: socket.socket | None = None
        self._stand_ins: dict[int, Channel] = {}  # by rank
        self._daemons: set[str] = set()  # mpirun and its daemon, while they run here
        self._pids: list[int] = []  # of those of this attempt
        self._start: Message = {}
        self._namespace = ""  # PMIx's name for this attempt
        self._daemon_failure = ""

    def launch(self, ranks: list[Rank], start: Message) -> None:
        """Have mpirun start these ranks and those of the other nodes; `changed` is called as they start and end."""
        self._listen()
        self._await(ranks)
        self._start, self._namespace = start, ""
        self._daemons, self._pids, self._daemon_failure = set(), [], ""
        addresses = [node["address"] for node in start["nodes"]]
        if len(set(addresses)) < len(addresses):
            self._give_up("the nodes of an MPI job must have addresses of their own; give each its --local-addr")
        elif start["node_rank"] == 0:
            self._spawn("mpirun", _mpirun(start))

    def start_daemon(self, message: Message) -> None:
        """Start mpirun's daemon here, as node 0 asks."""
        if message["attempt"] == self._start.get("attempt") and not self._stopping:
            self._spawn("orted", [_shell(), "-c", message["command"]])

    def stop(self, grace: float, impatient: Callable[[], bool]) -> None:
        """End every rank and all it started, and mpirun."""
        if all(rank.status == 0 for rank in self.current.values()):
            self._loop.run_until(lambda: not self._daemons or impatient(), DAEMON_SECONDS)
        super().stop(grace, impatient)
        if all(failure.symptom for failure in self.failures()):
            self.server_failure = self.server_failure or self._daemon_failure
        for rank in list(self._stand_ins):
            self._drop(self._stand_ins.pop(rank))
        self._remove_leftovers()

    def close(self) -> None:
        """End every process of the job on this node."""
        super().close()
        if self._listener is not None:
            self._loop.forget(self._listener)
            self._listener.close()
            self._listener = None
            Path(self._socket).unlink(missing_ok=True)

    def _spawn(self, name: str, command: list[str]) -> None:
        self._daemons.add(name)
        env = {
            "PACELINE_MPI_PYTHON": self._spec.python[0],
            "PACELINE_MPI_ENTRY": ENTRY,
            "PACELINE_MPI_SOCKET": self._socket,
            "OMPI_MCA_plm_rsh_agent": _AS_SSH,
            **self._interface("oob_tcp"),
        }
        self._order({"do": "spawn", "name": name, "command": command, "env": env})

    def _interface(self, component: str) -> dict[str, str]:
        """Keeps a part of Open MPI to the network where the nodes meet, unless the user has said which."""
        nodes, node_rank = self._start["nodes"], self._start["node_rank"]
        names = [f"OMPI_MCA_{component}_if_{which}" for which in ("include", "exclude")]
        if len(nodes) == 1 or any(name in {**os.environ, **self._spec.env} for name in names):
            return {}
        try:
            address = socket.gethostbyname(nodes[node_rank]["address"])
        except OSError:  # the others may know the name all the same
            return {}
        interface = None if is_loopback(address) else interface_of(address, interfaces())
        return {} if interface is None else {names[0]: interface}

    # -- what mpirun asks ----------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        if self._listener is None:
            self._listener = socket.socket(socket.AF_UNIX)
            Path(self._socket).unlink(missing_ok=True)
            with short(self._socket) as address:
                self._listener.bind(address)
            self._listener.listen(1024)
            self._loop.watch(self._listener, self._accept)

    def _accept(self) -> None:
        assert self._listener is not None
        channel = Channel(self._listener.accept()[0])
        self._loop.watch(channel, lambda: self._read(channel))

    def _read(self, channel: Channel) -> None:
        try:
            for message in channel.receive():
                if message["do"] == "rank":
                    self._start_rank(message, channel)
                else:
                    self._pass_on(message)
        except ChannelClosed:
            self._drop(channel)

    def _drop(self, channel: Channel) -> None:
        self._loop.forget(channel)
        channel.close()

    def _start_rank(self, message: Message, channel: Channel) -> None:
        """Start a rank with what its stand-in has brought."""
        rank = next((r for r in self.current.values() if r.placement.rank == message["rank"]), None)
        if rank is None:
            self._give_up(f"mpirun started rank {message['rank']} on {socket.gethostname()}, where it does not belong")
        elif not self._stopping and rank.placement.rank not in self._stand_ins:
            self._stand_ins[rank.placement.rank] = channel
            self._namespace = message["env"].get("PMIX_NAMESPACE", "")
            rank.env.update(message["env"], **self._interface("btl_tcp"))
            if self._spec.nproc > devices.cores():
                rank.env.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
            self._order_start([rank])

    def _pass_on(self, message: Message) -> None:
        """Have the agent of a machine start mpirun's daemon."""
        hosts = [node["address"] for node in self._start["nodes"]]
        if message["host"] in hosts:
            order = {"attempt": self._start["attempt"], "node_rank": hosts.index(message["host"])}
            self._send({"do": "daemon", "command": message["command"], **order})

    # -- what becomes of it --------------------------------------------------------------------------------------------

    def _rank_ended(self, rank: Rank, status: int, ended: float) -> None:
        super()._rank_ended(rank, status, ended)
        if rank.failure is not None and not rank.failure.has_traceback and exit_code(status) == LOST_DAEMON:
            rank.failure = dataclasses.replace(rank.failure, symptom=True, message="lost its connection to mpirun")
        stand_in = self._stand_ins.get(rank.placement.rank)
        if status == 0 and stand_in is not None:  # of any other end mpirun hears when all ranks have been stopped
            with contextlib.suppress(ChannelClosed):
                stand_in.send({"do": "end"})

    def _hear_of_daemon(self, message: Message) -> None:
        if message["event"] == "spawned":
            self._pids.append(message["pid"])
            return
        self._daemons.discard(message["name"])
        number, attempt = exit_code(message["status"]), self._start["attempt"]
        if self._stopping or number == 0:
            return
        self._daemon_failure = (
            f"{message['name']} ended with exit status {number}; what it said is in {self._dir.agent_log}"
        )
        if os.WIFSIGNALED(message["status"]):
            self._give_up(f"{message['name']} was killed by {signal.Signals(number - 128).name}")
        else:  # probably for what a rank did, say MPI_Abort
            self._loop.after(CAUSE_WAIT, lambda: self._lose_patience(attempt))

    def _lose_patience(self, attempt: int) -> None:
        if self.left and not self._stopping and self._start["attempt"] == attempt:
            self._give_up(self._daemon_failure)

    def _give_up(self, why: str) -> None:
        """End the ranks, which cannot work without mpirun."""
        self._stopping = True
        self._end_server()
        self.server_failure = why
        self._changed()

    def _remove_leftovers(self) -> None:
        """Remove the files of daemons and ranks that had no time to do it themselves."""
        host, user = socket.gethostname(), os.getuid()
        sessions = Path(tempfile.gettempdir(), f"ompi.{host}.{user}")
        for pid in self._pids:
            if not sessions.is_symlink() and not Path(f"/proc/{pid}").exists():  # else it may be another program's now
                shutil.rmtree(sessions / f"pid.{pid}", ignore_errors=True)
        if self._namespace.isdigit():
            for path in Path("/dev/shm").glob(f"vader_segment.{host}.{user}.{int(self._namespace):x}.*"):
                path.unlink(missing_ok=True)


def _mpirun(start: Message) -> list[str]:
    """The command line that starts all ranks, numbered as the coordinator numbers them."""
    nodes = start["nodes"]
    options = {
        "plm": "rsh",
        "plm_rsh_no_tree_spawn": "1",
        "orte_leave_session_attached": "1",  # daemons stay children of the fork server
        "ras": "^alps,gridengine,lsf,slurm,tm",  # the coordinator has given us our nodes
    }
    return [
        "mpirun",
        *(["--allow-run-as-root"] if os.geteuid() == 0 else []),
        "--oversubscribe", "--bind-to", "none", "--map-by", "slot",
        *(word for name, value in options.items() for word in ("--mca", name, value)),
        "--host", ",".join(f"{node['address']}:{node['slots']}" for node in nodes),
        "-np", str(sum(node["slots"] for node in nodes)),
        "sh", "-c", _AS_RANK,
    ]  # fmt: skip


def _shell() -> str:
    """What sshd would run a command with: mpirun writes it for this user's shell."""
    try:
        return pwd.getpwuid(os.getuid()).pw_shell or "/bin/sh"
    except KeyError:
        return "/bin/sh"
