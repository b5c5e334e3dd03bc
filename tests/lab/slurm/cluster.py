"""A real Slurm on one machine: slurmctld, a slurmd a node and munged, and a place for its users.

The controller, each node and `login` have a network namespace, a host name and an /etc/hosts of their own, which knows
all of them; they share the machine's files. Nothing of the machine's own Slurm or munge is used or changed: addresses
and ports are inside of namespaces, and all files are in the cluster's folder. Namespaces and folder are named as those
of the ssh lab, so that whatever a killed one has left is ended and removed as theirs is.

Times of Slurm 22.05 that no setting here shortens:
- A time limit is whole minutes (`--time=0:05` becomes 1 minute), and slurmctld looks only every 30 s whose limit has
  passed: with `--time=1` a job is told to end after 60 to 90 s. `pass_limit` saves the minute.
- What has to give way to an urgent job keeps its nodes for 6 to 16 s with a `grace` of 3. At its start SIGCONT and
  SIGTERM go to the tasks of srun alone; the batch script gets SIGTERM at its end, and SIGKILL after KillWait.
- That a node is lost slurmctld finds out in half a minute; `down` tells it at once.
- Without munged's socket users' commands fail after 2 s; with a socket and nobody behind it they try for 49 s.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import stat
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from tests.conftest import eventually
from tests.lab import lab

from . import programs
from .accounting import NO_ACCOUNTING, Accounting
from .config import CONFIG
from .machine import NETWORK, Login, Machine

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_CLIENTS = ("sbatch", "squeue", "scancel", "sinfo", "scontrol", "sacct", "srun", "salloc")
_PATIENCE = {"patient": 60, "impatient": 2, "daemons": 10}  # seconds that they wait for an answer
_PAUSE = 0.1  # seconds between two looks that start a command
_count = itertools.count()

_WRAPPER = """\
#!/bin/sh
real={real}
call="${{SLURMD_NODENAME:-login}} {name} $*"
case $call in
*'
'*) call=$(printf %s "$call" | tr '\\n' ' ') ;;
esac
printf '%s\\n' "$call" >> {calls}
"""


def missing() -> str:
    """What keeps this machine from being a cluster, or ""."""
    return programs.missing("munged", "slurmctld", "slurmd", *_CLIENTS) or lab.missing()


class Cluster:
    """A Slurm with some nodes, each of which has 8 CPUs and 2 GPUs unless told otherwise.

    Its partitions are main, urgent, which takes nodes away from main, and short, where a minute is the limit.

    Attributes:
        nodes: the names of the nodes.
        login: where users are.
        env: what users have in their environment.
        folder: its files: `slurmctld.log`, `n0.log` …
    """

    def __init__(
        self, nodes: int = 3, *, cpus: int = 8, gpus: int = 2, grace: int = 3, expire: int = 5, accounts: bool = False
    ) -> None:
        """Nothing is made yet.

        `grace` is how many seconds a job keeps its nodes that is to give way, `expire` for how many seconds a job that
        was put back into the queue does not start. With `accounts` it has accounting, see `accounting.py`.
        """
        self.prefix = f"pl{os.getpid()}s{next(_count)}"
        self.hub = f"{self.prefix}-hub"
        self.folder = Path(tempfile.mkdtemp(prefix=f"{self.prefix}-"))
        self.nodes = [f"n{number}" for number in range(nodes)]
        self.login = Login(self, "login", 2)
        self._controller = Machine(self, "ctl", 1)
        self._accounting = Accounting(self.folder, self._controller, f"{NETWORK}.1") if accounts else None
        self._node = {name: Machine(self, name, 10 + number) for number, name in enumerate(self.nodes)}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._settings = {"cpus": cpus, "gpus": gpus, "grace": grace, "expire": expire}
        self.env = {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
        }

    def start(self) -> None:
        """Make it; comes back when all nodes are idle."""
        lab.remove_leftovers()
        self._write()
        lab.add_hub(self.hub, f"{NETWORK}.254/24")
        for machine in self._machines():
            machine.start()
        self.start_munged()
        if self._accounting is not None:
            self._accounting.start(self._launch, self.slurm)
        for name in self.nodes:
            self._start_slurmd(name)
        self.start_slurmctld()
        self._wait_until_idle()
        if self._accounting is not None:
            eventually(self._is_registered, "slurmdbd tells slurmctld what changes", _PAUSE)

    def _is_registered(self) -> bool:
        shown = self.slurm("sacctmgr", "--noheader", "--parsable2", "show", "cluster", "format=controlport")
        return shown.strip() not in ("", "0")

    def stop(self) -> None:
        """End everything, and remove it."""
        for namespace in (*(machine.namespace for machine in self._machines()), self.hub):
            lab.remove_namespace(namespace)
        for process in self._daemons.values():
            process.wait()
        lab.remove_folder(self.folder)

    def _machines(self) -> list[Machine]:
        return [self._controller, self.login, *self._node.values()]

    def _write(self) -> None:
        """Write all files that are read."""
        nodes = "\n".join(f"NodeName={name} NodeAddr={machine.address}" for name, machine in self._node.items())
        accounting = NO_ACCOUNTING if self._accounting is None else self._accounting.settings
        for name, patience in _PATIENCE.items():
            text = CONFIG.format(
                folder=self.folder, network=NETWORK, nodes=nodes, accounting=accounting, plugins=programs.plugins(),
                patience=patience, **self._settings,
            )  # fmt: skip
            (self.folder / f"{name}.conf").write_text(text)
        self._let_users_be("patient")
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        gpus = [self.folder / f"gpu{number}" for number in range(self._settings["gpus"])]
        for path in gpus:  # slurmd insists on devices, and opens none
            os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        (self.folder / "gres.conf").write_text("".join(f"Name=gpu Type=a100 File={path}\n" for path in gpus))
        lines = [f"{machine.address} {machine.name}\n" for machine in self._machines()]
        (self.folder / "hosts").write_text("".join(["127.0.0.1 localhost\n", *lines]))
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        for name in ("bin", "state", *(f"spool-{name}" for name in self.nodes)):
            (self.folder / name).mkdir()
        for name in _CLIENTS:
            self._wrap(name)

    def _let_users_be(self, how: str) -> None:
        """From now on users' commands are patient with a busy slurmctld, or impatient with one that is not there."""
        new = self.folder / "slurm.conf.new"
        new.symlink_to(f"{how}.conf")
        new.replace(self.folder / "slurm.conf")

    # -- users' commands -----------------------------------------------------------------------------------------------

    def slurm(self, *argv: str) -> str:
        """What a command of Slurm prints; it is not counted, and is always patient."""
        command = self.login.command([programs.path(argv[0]), *argv[1:]])
        env = {**os.environ, **self.env, "SLURM_CONF": str(self.folder / "patient.conf")}
        done = subprocess.run(command, env=env, cwd=self.folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{shlex.join(argv)}: exit {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def _wrap(self, name: str, script: str = 'exec "$real" "$@"') -> None:
        """Put a script before a command, which writes down how it was called."""
        path = self.folder / "bin" / name
        new = path.with_suffix(".new")
        new.write_text(
            _WRAPPER.format(name=name, real=programs.path(name), calls=self.folder / "calls") + f"{script}\n"
        )
        new.chmod(0o755)
        new.replace(path)  # a shell that reads the old one goes on with that

    def break_command(self, name: str, script: str) -> None:
        """Let users' calls of a command run a shell script instead, until `repair`; it has the real one as "$real"."""
        self._wrap(name, script)

    @property
    def calls(self) -> list[str]:
        """How users have called Slurm since the last `repair`, one line a call, without jobs' own calls."""
        return [line.removeprefix("login ") for line in self._calls() if line.startswith("login ")]

    @property
    def calls_of_jobs(self) -> list[str]:
        """How jobs have called Slurm since the last `repair`, each with its node's name in front."""
        return [line for line in self._calls() if not line.startswith("login ")]

    def _calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def forget_calls(self) -> None:
        """Count calls from now on."""
        (self.folder / "calls").unlink(missing_ok=True)

    # -- daemons -------------------------------------------------------------------------------------------------------

    def _launch(self, name: str, command: Sequence[str]) -> None:
        """Start a daemon."""
        with open(self.folder / f"{name}.err", "ab") as log:
            self._daemons[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder, start_new_session=True,
                env={"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin", "SLURM_CONF": str(self.folder / "daemons.conf")},
            )  # fmt: skip

    def _is_dead(self, name: str) -> bool:
        return name not in self._daemons or self._daemons[name].poll() is not None

    def _kill(self, name: str) -> None:
        process = self._daemons[name]
        process.kill()
        process.wait()

    def start_munged(self) -> None:
        """Start it; comes back when it answers."""
        folder = self.folder
        names = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munged.pid", "seed-file": "munge.seed"}
        options = [f"--{option}={folder / name}" for option, name in names.items()]
        command = [programs.path("munged"), "--foreground", "--force", *options]
        self._launch("munged", ["nsenter", f"--net=/run/netns/{self.hub}", *command])
        probe = ["munge", f"--socket={folder}/munge.socket", "--no-input"]
        answers = lambda: subprocess.run(probe, capture_output=True, check=False).returncode == 0  # noqa: E731
        eventually(answers, "munged answers", _PAUSE)

    def kill_munged(self) -> None:
        """End it: nobody can prove who he is, neither users nor daemons."""
        self._daemons["munged"].terminate()
        self._daemons["munged"].wait()

    def start_slurmctld(self) -> None:
        """Start it; comes back when it is up."""
        self._launch("slurmctld", self._controller.command([programs.path("slurmctld"), "-D"]))
        eventually(self._is_up, "slurmctld is up", _PAUSE)
        self._let_users_be("patient")

    def _is_up(self) -> bool:
        with contextlib.suppress(RuntimeError):
            return "is UP" in self.slurm("scontrol", "ping")
        return False

    def kill_slurmctld(self) -> None:
        """End it. Users' commands then try for 2 s."""
        self._let_users_be("impatient")
        self._daemons["slurmctld"].terminate()
        self._daemons["slurmctld"].wait()

    def _start_slurmd(self, node: str) -> None:
        self._launch(node, self._node[node].command([*programs.slurmd(), "-D", "-N", node]))

    def kill_slurmd(self, node: str, with_job: bool) -> None:
        """Kill it; with its job the machine is lost: off the network first, so that no peer detects the end."""
        if with_job:
            machine = self._node[node]
            machine.cut()
            while pids := machine.processes():
                lab.kill(pids)
        self._kill(node)

    def forget_neighbours(self) -> None:
        """After a cut: let all machines find each other anew."""
        lab.forget_neighbours(self.hub, [machine.namespace for machine in self._machines()])

    def processes(self, node: str) -> list[int]:
        """What runs on a node beside its slurmd."""
        return [pid for pid in self._node[node].processes() if pid != self._daemons[node].pid]

    def daemon(self, node: str) -> int:
        """The slurmd of a node, which sees what jobs there see."""
        return self._daemons[node].pid

    def machine(self, node: str) -> Machine:
        """A node as a place to run commands, or to cut off."""
        return self._node[node]

    @contextlib.contextmanager
    def hidden(self, node: str, folder: Path) -> Iterator[None]:
        """Let a node see another folder there, as if it were not on a shared disk."""
        inside = ["nsenter", "--mount", f"--target={self._daemons[node].pid}"]
        subprocess.run([*inside, "mount", "-t", "tmpfs", "none", str(folder)], check=True)
        try:
            yield
        finally:
            subprocess.run([*inside, "umount", "--lazy", str(folder)], check=False)  # it may be another slurmd

    @contextlib.contextmanager
    def unnamed(self, name: str) -> Iterator[None]:
        """Let no machine know the address of a name."""
        hosts = self.folder / "hosts"
        text = hosts.read_text()
        hosts.write_text("".join(line for line in text.splitlines(keepends=True) if line.split()[1] != name))
        try:
            yield
        finally:
            hosts.write_text(text)

    @contextlib.contextmanager
    def blocked(self, source: str, target: str) -> Iterator[None]:
        """Let a node start no connections to high ports of another one; Slurm's daemons listen on lower ones."""
        there, ports = self._node[target].address, "32768:65535"
        rule = ["OUTPUT", "-p", "tcp", "--syn", "-d", there, "--dport", ports, "-j", "REJECT"]
        inside = ["nsenter", f"--net=/run/netns/{self._node[source].namespace}", "iptables"]
        subprocess.run([*inside, "--append", *rule], check=True)
        try:
            yield
        finally:
            subprocess.run([*inside, "--delete", *rule], check=True)

    # -- nodes' states -------------------------------------------------------------------------------------------------

    def states(self) -> dict[str, str]:
        """The state of each node, as sinfo has it."""
        lines = self.slurm("sinfo", "--noheader", "--Node", "--partition=main", "--format=%N %T").splitlines()
        return dict(line.split() for line in lines)

    def drain(self, node: str) -> None:
        """Give it no more jobs."""
        self.slurm("scontrol", "update", f"nodename={node}", "state=drain", "reason=test")

    def down(self, node: str) -> None:
        """Say that it is lost, as an administrator does; slurmctld needs half a minute to find out."""
        self.slurm("scontrol", "update", f"nodename={node}", "state=down", "reason=test")

    def _resume(self, node: str) -> None:
        self.slurm("scontrol", "update", f"nodename={node}", "state=resume")

    def repair(self) -> None:
        """Start what is dead, cancel all jobs, and wait until all nodes are idle."""
        for name in _CLIENTS:
            self._wrap(name)
        if self._is_dead("munged"):
            self.start_munged()
        if self._is_dead("slurmctld"):
            self.start_slurmctld()
        eventually(self._is_up, "slurmctld is up", _PAUSE)
        for machine in self._node.values():
            machine.heal()
        dead = [name for name in self.nodes if self._is_dead(name)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(self._start_slurmd, dead))
        self._wait_until_idle()
        self.forget_calls()

    def _cancel_all(self) -> None:
        lines = [line.split() for line in self.slurm("squeue", "--noheader", "--format=%A %T").splitlines()]
        jobs = {job for job, state in lines if state != "COMPLETING"}
        with contextlib.suppress(RuntimeError):  # one has just ended
            if jobs:
                self.slurm("scancel", *jobs)

    def _wait_until_idle(self) -> None:
        def are_idle() -> bool:
            self._cancel_all()  # again: a job that is completing may come back into the queue
            states = self.states()
            for node, state in states.items():
                if state.startswith(("drain", "down")) and not state.endswith("*"):
                    with contextlib.suppress(RuntimeError):  # it changed meanwhile
                        self._resume(node)
            return set(states.values()) == {"idle"} and not self.slurm("squeue", "--noheader")

        eventually(are_idle, "all nodes are idle", _PAUSE)
