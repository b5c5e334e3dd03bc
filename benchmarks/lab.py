"""Runs commands for the benchmarks, measures them, and removes everything that they leave."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.node.machine import processes

from .sample import Failed, Sample

if TYPE_CHECKING:
    from types import TracebackType

    from fake_kubernetes.cluster import Cluster
    from tests.lab.lab import Lab as Hosts
    from tests.lab.slurm.cluster import Cluster as Slurm

SCRIPTS = Path(__file__).parent / "scripts"
TIMEOUT = 180.0  # seconds that one command may take
HOSTS = 32  # at most
SLURM_NODES = 8
TARGETS = (2, 8, HOSTS)  # paceline's targets: `lab2` has the first two hosts, and so on
TAIL_LINES = 12  # of a failed command's output, kept for the report
# Variables of launchers. If one were set, it would change what is measured.
FOREIGN = ("PACELINE_", "PET_", "TORCHELASTIC_", "TORCHX", "SLURM_")
# All hosts share the cores of this machine, so that commands take longer than with hosts of their own.
PATIENT_LIMITS = {"PACELINE_LOOK_TIMEOUT": "60s", "PACELINE_ACT_TIMEOUT": "60s"}
DEFAULT_LIMITS = dict.fromkeys(PATIENT_LIMITS, "")
FOREIGN_NAMES = frozenset(
    {
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS",
        "PYTHONDONTWRITEBYTECODE",  # pip compiles what it installs
    }
)  # fmt: skip


class Lab:
    """A temporary folder that is the commands' home and working directory; a context manager."""

    def __init__(self) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="paceline-bench-")
        self._hosts: Hosts | None = None
        self._cluster: Cluster | None = None
        self._slurm: Slurm | None = None
        self._daemons: list[int] = []  # of Slurm
        self.folder = Path(self._temporary.name)
        self.env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(FOREIGN) and name not in FOREIGN_NAMES
        }
        self.env.update(PATIENT_LIMITS, PACELINE_TRUST="1", CUDA_VISIBLE_DEVICES="")  # rows of `gpu` show theirs
        for name in ("PACELINE_HOME", "PACELINE_WARM_DIR", "XDG_CONFIG_HOME", "TMPDIR"):
            folder = self.folder / name.lower()
            folder.mkdir(mode=0o700)
            self.env[name] = str(folder)

    def __enter__(self) -> Lab:
        processes.adopt_orphans()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in (self._hosts, self._cluster, self._slurm):
            if one is not None:
                one.stop()
        end_all()
        self._temporary.cleanup()

    def hosts(self) -> Hosts:
        """Machines that ssh reaches, made at the first use; between commands, only their sshd runs."""
        if self._hosts is None:
            from tests.lab import lab

            if why := lab.missing():
                raise Failed(why)
            self._hosts = lab.Lab(HOSTS)
            self._hosts.start()
            self.env.update(
                XDG_RUNTIME_DIR=str(self._hosts.folder), PATH=f"{self._hosts.folder}/bin:{self.env['PATH']}"
            )
            config = Path(self.env["XDG_CONFIG_HOME"], "paceline", "config.toml")
            config.parent.mkdir()
            names = [host.name for host in self._hosts.hosts]
            config.write_text("".join(_target(count, names[:count]) for count in TARGETS))
        return self._hosts

    def cluster(self) -> Cluster:
        """A Kubernetes cluster with two nodes, made at the first use. `started` ends its pods' processes too."""
        if self._cluster is None:
            from fake_kubernetes import cluster, machine

            if why := machine.missing():
                raise Failed(why)
            self._cluster = cluster.Cluster()
            self._cluster.start()
            self.env["KUBECONFIG"] = str(self._cluster.kubeconfig)
        return self._cluster

    def slurm(self) -> Slurm:
        """A Slurm with some nodes, made at the first use, and a target of this name in `slurm_folder`."""
        if self._slurm is None:
            from tests.lab.slurm import cluster

            if why := cluster.missing():
                raise Failed(why)
            self._slurm = cluster.Cluster(SLURM_NODES)
            self._slurm.start()
            self._daemons = processes.descendants(os.getpid())
            self.slurm_folder.mkdir()
            root, python = self.slurm_folder / "root", sys.executable
            text = f'[targets.slurm]\nbackend = "slurm"\nroot = "{root}"\npython = "{python}"\n'
            (self.slurm_folder / "paceline.toml").write_text(text)
        return self._slurm

    @property
    def slurm_folder(self) -> Path:
        """The working directory of commands on the login machine of Slurm."""
        return self.folder / "slurm"

    @property
    def slurm_env(self) -> dict[str, str]:
        """Their variables."""
        return {**self.env, **self.slurm().env}

    @contextlib.contextmanager
    def started(self, command: Sequence[str], pipe: int | None = None, **env: str) -> Iterator[Job]:
        """Run a command; at the end of the block, it and all processes that it started are ended.

        Its stdout goes to `pipe` (a descriptor), or to a file.
        """
        out, err = self.folder / "out", self.folder / "err"
        with open(out, "wb") as stdout, open(err, "wb") as stderr:
            began = time.monotonic()
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=stdout if pipe is None else pipe, stderr=stderr,
                    env={**self.env, **env}, cwd=self.folder, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise Failed(f"cannot start {command[0]}: {error.strerror}") from None
        try:
            job = Job(process, began, out, err)
            with contextlib.closing(job):
                yield job
        finally:
            end_all(
                [*([pid for host in self._hosts.hosts if (pid := host.sshd)] if self._hosts else []), *self._daemons]
            )

    def timed(self, command: Sequence[str]) -> Sample:
        """Run a command to its end."""
        cpu_before = _cpu_of_children()
        with self.started(command) as job:
            seconds = job.finish()
        return Sample(seconds, _cpu_of_children() - cpu_before)

    def forget_silent_hosts(self) -> None:
        """Let the next command wait for every host."""
        Path(self.env["PACELINE_HOME"], "silent.json").unlink(missing_ok=True)

    def answer(self, command: Sequence[str], seconds: float = TIMEOUT, **env: str) -> Any:
        """Run a command to its end, with the name of a file as its last argument; returns the JSON in that file.

        Args:
            seconds: that it may take.
        """
        path = self.folder / "answer.json"
        path.unlink(missing_ok=True)
        with self.started([*command, str(path)], **env) as job:
            job.finish(seconds)
        return json.loads(path.read_text())


class Job:
    """A command that was started."""

    def __init__(self, process: subprocess.Popen[bytes], began: float, out: Path, err: Path) -> None:
        self._process = process
        self._began = began
        self._out = out
        self._err = err
        self._exit = os.pidfd_open(process.pid)  # readable once the process has ended

    @property
    def pid(self) -> int:
        """Of the command."""
        return self._process.pid

    def close(self) -> None:
        """Release the descriptor of the process."""
        os.close(self._exit)

    def finish(self, most: float = TIMEOUT) -> float:
        """Wait until the command has succeeded, at most this time; returns the seconds it took."""
        self._wait(self._exit, most=most)
        seconds = time.monotonic() - self._began
        code = self._process.wait()
        if code:
            raise Failed(f"exit code {code}: {self._tail()}")
        return seconds

    def receive(self, messages: socket.socket) -> bytes:
        """The next message; fails if the command ends instead of sending one."""
        self._wait(self._exit, messages.fileno())
        try:
            return messages.recv(4096, socket.MSG_DONTWAIT)
        except BlockingIOError:
            code = self._process.wait()
            raise Failed(f"ended with exit code {code} before the work was done: {self._tail()}") from None

    def _wait(self, *descriptors: int, most: float = TIMEOUT) -> None:
        left = self._began + most - time.monotonic()
        poll = select.poll()
        for descriptor in descriptors:
            poll.register(descriptor, select.POLLIN)
        if left <= 0 or not poll.poll(left * 1000):
            raise Failed(f"took longer than {most:g} s: {self._tail()}")

    def _tail(self) -> str:
        """The last lines of stderr, or of stdout if there are none."""
        for path in (self._err, self._out):
            lines = path.read_text(errors="replace").strip().splitlines()
            if lines:
                return "\n".join(lines[-TAIL_LINES:])
        return "it printed nothing"


def timed(*command: str) -> Callable[[Lab], Sample]:
    """Return a measurement: the time of one command, from start to end."""
    return lambda lab: lab.timed(command)


def installed(name: str) -> str:
    """The path of a command beside this Python, or in the folder in which `pip install --target` has put paceline."""
    beside = Path(processes.__file__).parents[3] / "bin" / name
    return str(beside if beside.exists() else Path(sysconfig.get_path("scripts")) / name)


def free_port() -> int:
    """A port on which no process listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def end_all(spared: Collection[int] = ()) -> None:
    """Kill all descendants of this process except some, orphans included, and reap them to get their CPU time."""
    while pids := [pid for pid in processes.descendants(os.getpid()) if pid not in spared]:
        for pid in pids:
            processes.signal_process(pid, signal.SIGKILL)
        _reap()
    _reap()


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _target(count: int, hosts: list[str]) -> str:
    return f'[targets.lab{count}]\nbackend = "ssh"\nhosts = {hosts}\npython = "{sys.executable}"\n'


def _cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
