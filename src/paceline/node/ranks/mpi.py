"""The ranks of `--framework mpi`: Open MPI's mpirun connects them, the fork server starts them like all others.

Node 0's fork server starts mpirun. To start its daemon on another machine, mpirun runs a program in place of ssh
(`mpi_proxy`), which sends the command line to node 0's agent. The coordinator forwards it to that machine's agent,
whose fork server runs it. So the machines need no ssh between each other. In place of each rank, mpirun and its daemons
start a proxy. It sends the agent the variables by which MPI_Init finds mpirun's daemon, and through it the other ranks.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.contract.local_sockets import reachable
from paceline.node import ENTRY
from paceline.node.eventloop.channel import Channel, ChannelClosed
from paceline.node.failure import exit_code
from paceline.node.machine import devices, processes
from paceline.node.machine.network import interface_of, interfaces, is_loopback

from .launcher import Rank, Ranks
from .mpi_daemon import check, with_folders

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paceline.node.eventloop.loop import Loop
    from paceline.node.journal.status import Attempt
    from paceline.node.rundir.directory import RunDirectory
    from paceline.node.spec import NodeSpec

    from .messages import DaemonRequest, Ended, FromMpirun, RankRequest, Spawned

DAEMON_SECONDS = 5.0  # how long mpirun and its daemons may take to end once all ranks have
CAUSE_WAIT = 10.0  # seconds to wait for the failure of the rank that made mpirun end
LOST_DAEMON = 195  # exit code of a rank that has lost mpirun's daemon (PMIX_ERR_LOST_CONNECTION, -61)
# mpirun splits a command at spaces only; behind tabs, the shell does it. This is no option on mpirun's command line,
# because mpirun passes those to its daemons with wrong quoting.
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
        start_daemon: Callable[[int, int, list[str], dict[str, str]], None],
    ) -> None:
        """Nothing runs yet."""
        super().__init__(loop, spec, directory, changed)
        self._start_daemon_on = start_daemon
        self._socket = str(directory.path / "mpi.sock")
        self._listener: socket.socket | None = None
        self._proxies: dict[int, Channel] = {}  # by rank
        self._programs: set[str] = set()  # "mpirun" and "orted", while they run here
        self._pids: list[int] = []  # of mpirun and its daemon in this attempt
        self._attempt: Attempt | None = None
        self._namespace = ""  # PMIx's name of this attempt
        self._daemon_failure = ""

    def launch(self, ranks: list[Rank], start: Attempt) -> None:
        """Have mpirun start these ranks and those of the other nodes; `changed` is called as they start and end."""
        self._listen()
        self._expect(ranks)
        self._attempt, self._namespace = start, ""
        self._programs, self._pids, self._daemon_failure = set(), [], ""
        addresses = [node["address"] for node in start["nodes"]]
        if len(set(addresses)) < len(addresses):
            self._give_up("the nodes of an MPI job must have addresses of their own; give each its --local-addr")
        elif start["node_rank"] == 0:
            self._spawn("mpirun", _mpirun(start), {})

    def start_daemon(self, attempt: int, command: list[str], folders: dict[str, str]) -> None:
        """Start mpirun's daemon here, unless the attempt that it belongs to is over."""
        if self._attempt is None or self._attempt["attempt"] != attempt or self._stopping:
            return
        try:
            check(command, folders)
        except ValueError as error:
            self._give_up(f"another node wants something else than mpirun's daemon started here: {error}")
            return
        self._spawn("orted", command, with_folders(folders, {**os.environ, **self._spec.env}))

    @property
    def awaited(self) -> float:
        """Seconds to wait for mpirun and its daemon to end: after their ranks, or because how they end may say why."""
        if not self._programs:
            return 0.0
        if all(rank.status == 0 for rank in self.current.values()):
            return DAEMON_SECONDS
        failures = self.failures()
        return CAUSE_WAIT if failures and all(failure["symptom"] for failure in failures) else 0.0

    def clean_up(self) -> None:
        """Forget mpirun, and remove its files."""
        if all(failure["symptom"] for failure in self.failures()):
            self.server_failure = self.server_failure or self._daemon_failure
        for rank in list(self._proxies):
            self._drop(self._proxies.pop(rank))
        self._remove_leftovers()

    def close(self) -> None:
        """End every process of the job on this node."""
        super().close()
        if self._listener is not None:
            self._loop.forget(self._listener)
            self._listener.close()
            self._listener = None
            Path(self._socket).unlink(missing_ok=True)

    def _spawn(self, name: str, command: list[str], more: Mapping[str, str]) -> None:
        self._programs.add(name)
        env = {
            **more,
            "PACELINE_MPI_PYTHON": self._spec.python[0],
            "PACELINE_MPI_ENTRY": ENTRY,
            "PACELINE_MPI_SOCKET": self._socket,
            "OMPI_MCA_plm_rsh_agent": _AS_SSH,
            "OMPI_MCA_plm_rsh_args": "",  # operators set those of ssh
            **self._interface("oob_tcp"),
        }
        self._send({"do": "spawn", "name": name, "command": command, "env": env})

    def _interface(self, component: str) -> dict[str, str]:
        """Variables that bind a part of Open MPI to the nodes' network, unless the user has chosen one."""
        assert self._attempt is not None
        nodes, node_rank = self._attempt["nodes"], self._attempt["node_rank"]
        names = [f"OMPI_MCA_{component}_if_{which}" for which in ("include", "exclude")]
        if len(nodes) == 1 or any(name in {**os.environ, **self._spec.env} for name in names):
            return {}
        try:
            address = socket.gethostbyname(nodes[node_rank]["address"])
        except OSError:  # the name may be known on other nodes only
            return {}
        interface = None if is_loopback(address) else interface_of(address, interfaces())
        return {} if interface is None else {names[0]: interface}

    # -- requests of the programs that mpirun starts -------------------------------------------------------------------

    def _listen(self) -> None:
        if self._listener is None:
            self._listener = socket.socket(socket.AF_UNIX)
            Path(self._socket).unlink(missing_ok=True)
            with reachable(self._socket) as address:
                self._listener.bind(address)
            self._listener.listen(1024)
            self._loop.watch(self._listener, self._accept)

    def _accept(self) -> None:
        assert self._listener is not None
        channel = Channel(self._listener.accept()[0])
        self._loop.watch(channel, lambda: self._read(channel))

    def _read(self, channel: Channel) -> None:
        try:
            messages: list[FromMpirun] = channel.receive()
            for message in messages:
                if message["do"] == "rank":
                    self._start_rank(message, channel)
                else:
                    self._request_daemon(message)
        except ChannelClosed:
            self._drop(channel)

    def _drop(self, channel: Channel) -> None:
        self._loop.forget(channel)
        channel.close()

    def _start_rank(self, message: RankRequest, channel: Channel) -> None:
        """Start a rank with the variables that its proxy has sent."""
        rank = next((r for r in self.current.values() if r.placement.rank == message["rank"]), None)
        if rank is None:
            self._give_up(f"mpirun started rank {message['rank']} on {socket.gethostname()}, which is not its node")
        elif not self._stopping and rank.placement.rank not in self._proxies:
            self._proxies[rank.placement.rank] = channel
            self._namespace = message["env"].get("PMIX_NAMESPACE", "")
            rank.env.update(message["env"], **self._interface("btl_tcp"))
            if self._spec.nproc > devices.cores():
                rank.env.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
            self._send_start([rank])

    def _request_daemon(self, message: DaemonRequest) -> None:
        """Have mpirun's daemon started on a node."""
        assert self._attempt is not None
        hosts = [node["address"] for node in self._attempt["nodes"]]
        if message["host"] in hosts:
            node_rank, attempt = hosts.index(message["host"]), self._attempt["attempt"]
            self._start_daemon_on(node_rank, attempt, message["command"], message["folders"])

    # -- how ranks and programs end ------------------------------------------------------------------------------------

    def _rank_ended(self, rank: Rank, status: int, ended: float) -> None:
        super()._rank_ended(rank, status, ended)
        if rank.failure is not None and not rank.failure["has_traceback"] and exit_code(status) == LOST_DAEMON:
            rank.failure = {**rank.failure, "symptom": True, "message": "lost its connection to mpirun"}
        proxy = self._proxies.get(rank.placement.rank)
        if status == 0 and proxy is not None:  # the proxy of a failed rank ends when all ranks have been stopped
            with contextlib.suppress(ChannelClosed):
                proxy.send({"do": "end"})

    def _program_changed(self, message: Spawned | Ended) -> None:
        assert self._attempt is not None
        if message["event"] == "spawned":
            self._pids.append(message["pid"])
            return
        self._programs.discard(message["name"])
        number, attempt = exit_code(message["status"]), self._attempt["attempt"]
        if self._stopping or number == 0:
            return
        self._daemon_failure = (
            f"{message['name']} ended with exit status {number}; its output is in {self._dir.agent_log}"
        )
        if os.WIFSIGNALED(message["status"]):
            self._give_up(f"{message['name']} was killed by {signal.Signals(number - 128).name}")
        else:  # probably because of a rank, say by MPI_Abort
            self._loop.after(CAUSE_WAIT, lambda: self._check_cause(attempt))

    def _check_cause(self, attempt: int) -> None:
        """Report mpirun as the cause if no rank has failed meanwhile."""
        assert self._attempt is not None
        if self.has_live_ranks and not self._stopping and self._attempt["attempt"] == attempt:
            self._give_up(self._daemon_failure)

    def _give_up(self, why: str) -> None:
        """End the ranks, which cannot work without mpirun."""
        self._stopping = self._stopping or self._loop.now()
        self._end_server()
        self.server_failure = why
        self._changed()

    def _remove_leftovers(self) -> None:
        """Remove the files of daemons and ranks that could not do it themselves."""
        host, user = socket.gethostname(), os.getuid()
        sessions = Path(tempfile.gettempdir(), f"ompi.{host}.{user}")
        for pid in self._pids:
            if not sessions.is_symlink() and processes.start_time(pid) is None:  # else it may be another program's now
                shutil.rmtree(sessions / f"pid.{pid}", ignore_errors=True)
        if self._namespace.isdigit():
            for path in Path("/dev/shm").glob(f"vader_segment.{host}.{user}.{int(self._namespace):x}.*"):
                path.unlink(missing_ok=True)


def _mpirun(start: Attempt) -> list[str]:
    """The command line that starts all ranks, with the coordinator's numbers."""
    nodes = start["nodes"]
    options = {
        "plm": "rsh",
        "plm_rsh_no_tree_spawn": "1",
        "orte_leave_session_attached": "1",  # daemons stay children of the fork server
        "ras": "^alps,gridengine,lsf,slurm,tm",  # the nodes are those of the attempt
        "orte_default_hostfile": "none",  # in a pod of an MPIJob, its operator names one
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
