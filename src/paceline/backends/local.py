"""This machine: an agent is a child process, or a process of its own when the job is detached."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.contract import CONTRACTS, thread_count
from paceline.job.errors import UserError
from paceline.job.home import jobs_folder
from paceline.job.job import FINAL, Job
from paceline.job.script import Imports, imports_of, module_file
from paceline.node import ENTRY, devices, placing
from paceline.node.follow import GrowingFile, Lines, RankLog, Waker
from paceline.node.ports import is_listening
from paceline.node.run_directory import RunDirectory
from paceline.node.spec import NodeSpec, Program

from .local_logs import read_logs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.job.spec import JobSpec

    from .base import LogLines, LogQuery

# The package of each framework, and what the fork server imports for it.
PACKAGES = {"torch": "torch", "horovod": "horovod", "paddle": "paddle", "tensorflow": "tensorflow", "jax": "jax"}
PRELOAD = {
    "torch": ("torch", "torch.distributed"),
    "paddle": ("paddle",),
    "tensorflow": ("tensorflow",),
    "jax": ("jax",),
}
# Importing these touches no GPU; the others may initialise one, which a forked process cannot use.
SAFE_WITH_DEVICES = ("torch",)


def complete(spec: JobSpec) -> JobSpec:
    """Fill in what the script itself and this machine say, and refuse what cannot work; starts nothing.

    Raises:
        UserError: the job cannot run here.
    """
    folder = Path(spec.working_dir)
    imports = _imports(spec, folder)
    framework = spec.framework or imports.framework or "torch"
    package = PACKAGES.get(framework)
    needed = package is not None and (spec.framework or package in imports.required) and spec.kind != "command"
    if needed and package is not None and importlib.util.find_spec(package) is None:
        raise UserError(
            f"{package} is not installed for {sys.executable}; install it there, or run paceline with another Python"
        )
    for module in spec.preload:
        if importlib.util.find_spec(module.partition(".")[0]) is None and module_file(module, folder) is None:
            raise UserError(f"--preload {module}: no such module is installed for {sys.executable}; check the name")
    spec = spec.model_copy(update={"framework": framework})
    changes: dict[str, Any] = {"ranks": _count_ranks(spec)}
    if spec.kind == "command":
        changes["start_method"] = "exec"
    elif spec.start_method == "fork":
        if package in imports.every:
            changes["preload"] = PRELOAD.get(framework, ()) + spec.preload
            changes["env"] = {**spec.env, **imports.variables}
            if imports.sets_more:  # the framework is to see them when it is imported, and only the script knows them
                changes["start_method"] = "exec"
        if package is not None and framework not in SAFE_WITH_DEVICES and devices.accelerators():
            changes["start_method"] = "exec"
    _check_meeting(spec)
    return spec.model_copy(update=changes)


def _imports(spec: JobSpec, folder: Path) -> Imports:
    if spec.kind == "script":
        file = folder / spec.target
        return imports_of(file, file.parent)
    if spec.kind == "module":
        found = module_file(spec.target, folder)
        return imports_of(found, folder) if found else Imports()
    return Imports()


def _count_ranks(spec: JobSpec) -> int:
    """How many ranks `auto`, `gpu`, `cpu` or a number are on this machine."""
    present = devices.accelerators()
    if spec.devices is not None or spec.ranks == "gpu":
        unknown = [d for d in spec.devices or () if d not in present and (d.isdigit() or not present)]
        if unknown:
            has = f"devices {', '.join(present)}" if present else "no GPU"
            raise UserError(f"device {', '.join(unknown)} does not exist: this machine has {has}; correct --devices")
    usable = present if spec.devices is None else spec.devices
    if spec.ranks == "gpu":
        if not usable:
            raise UserError("-n gpu, but this machine has no GPU that a process may use; take -n cpu or a number")
        return len(usable)
    if spec.ranks == "auto":
        return len(usable) or devices.cores()
    if spec.ranks == "cpu":
        return devices.cores()
    if spec.ranks < 1:
        raise UserError(f"-n {spec.ranks} starts no rank; take 1 or more")
    if spec.devices and spec.ranks > len(spec.devices) and spec.framework != "indexed":
        raise UserError(
            f"-n {spec.ranks} is more than the {len(spec.devices)} devices of --devices {','.join(spec.devices)}; "
            "name more devices, start fewer ranks, or share devices with --framework indexed"
        )
    return spec.ranks


def _check_meeting(spec: JobSpec) -> None:
    if spec.nodes > 1 and not spec.main_address:
        raise UserError(
            f"--nnodes {spec.nodes} needs to know where the nodes meet; give --master-addr with node 0's address"
        )
    if spec.node_rank is not None and spec.node_rank >= spec.nodes:
        raise UserError(
            f"--node-rank {spec.node_rank} with --nnodes {spec.nodes}; nodes are numbered 0 … {spec.nodes - 1}"
        )
    listens_here = spec.nodes == 1 or spec.node_rank == 0
    if listens_here and spec.main_port is not None and is_listening(spec.main_port):
        raise UserError(f"port {spec.main_port} is in use on this machine; choose another --master-port, or none")


def place(spec: JobSpec, split_streams: tuple[int, ...] = ()) -> NodeSpec:
    """This node's part of a completed job; `split_streams` are the local ranks whose stderr is kept apart."""
    ranks = int(spec.ranks)
    env = dict(spec.env)
    if "OMP_NUM_THREADS" not in {**os.environ, **env}:
        env["OMP_NUM_THREADS"] = str(thread_count(devices.cores(), ranks))
    if spec.devices is not None:
        env.update(devices.visibility(spec.devices))
    job_id = uuid.uuid4().hex
    env["PACELINE_JOB_ID"] = job_id
    return NodeSpec(
        job=spec.name,
        job_id=job_id,
        program=Program(spec.kind, spec.target, spec.args),
        framework=spec.framework,
        nproc=ranks,
        python=python_command(),
        working_dir=spec.working_dir,
        env=env,
        preload=spec.preload,
        start_method=spec.start_method,
        devices=spec.devices if spec.devices is not None else devices.accelerators(),
        node_rank=spec.node_rank,
        nodes=spec.nodes,
        main_address=spec.main_address,
        main_port=spec.main_port if spec.nodes == 1 else spec.main_port or 29500,
        local_address=spec.local_address,
        join_timeout=spec.join_timeout,
        max_restarts=spec.max_restarts,
        grace=spec.grace,
        split_streams=split_streams,
        pass_index=spec.pass_index,
        role=spec.role,
        run_id=spec.run_id,
        detached=spec.detached,
    )


def python_command() -> tuple[str, ...]:
    """This interpreter with the options it was started with (-X, -W, -u, -O, …), so that the ranks get them too."""
    options = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
    if sys.stdout is not None and getattr(sys.stdout, "write_through", False):
        options.append("-u")
    return (sys.executable, *options)


@dataclass(frozen=True)
class Output:
    """Bytes that a rank wrote."""

    attempt: int
    rank: int
    local_rank: int
    stream: str
    data: bytes


@dataclass(frozen=True)
class Event:
    """A line of events.jsonl: what happened, and its details."""

    name: str
    details: dict[str, Any]


class LocalRun:
    """A job on this machine whose agent was just started."""

    def __init__(self, spec: NodeSpec, log_dir: str | None) -> None:
        """Make the run directory and start the agent.

        Raises:
            UserError: the run directory cannot be made.
        """
        self.spec = spec
        self.directory = _make_directory(spec.job, log_dir)
        self.directory.spec.write_text(spec.to_json())
        self.directory.spec.chmod(0o600)
        ours, theirs = socket.socketpair()
        command = [
            *spec.python,
            ENTRY,
            "agent",
            str(self.directory.path),
            "-1" if spec.detached else str(theirs.fileno()),
        ]
        with theirs, open(self.directory.agent_log, "ab") as log, open(self.directory.lock, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.process = subprocess.Popen(
                command, pass_fds=[theirs.fileno(), lock.fileno()], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, cwd="/", env={**_terminal_size(), **os.environ},
            )  # fmt: skip
        self._lifeline = ours

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """Ask the agent to stop the job; asked twice, it stops it at once."""
        if self.process.poll() is None:
            self.process.send_signal(number)

    def updates(self) -> Iterator[Output | Event]:
        """What ranks write and what happens, as it comes, until the agent is gone.

        All output of an attempt comes before the event that tells how the attempt ended.
        """
        waker = Waker()
        events, lines = GrowingFile(self.directory.events), Lines()
        waker.watch(events.path)
        logs: dict[Path, _Log] = {}
        grown: set[Path] | None = None  # the files to look at; None for all
        alive = True
        while True:
            more: set[Path] = set()  # files that may hold more than was read
            for path, log in logs.items():
                if (grown is None or path in grown) and (data := log.file.read()):
                    if log.file.more:
                        more.add(path)
                    yield replace(log.output, data=data)
            for line in lines.add(events.read()):
                details = json.loads(line)
                name = details.pop("event")
                if name in ("restarting", "finished"):
                    yield from _drain(logs)
                elif name == "started":
                    logs = _open_logs(details)
                    for path in logs:
                        waker.watch(path)
                    more.update(logs)
                yield Event(name, details)
            if more:
                news = waker.grown()  # one that writes all the time does not keep the others waiting
                grown = None if news is None else more | news
            elif alive:
                grown, closed = waker.wait(self._lifeline.fileno())
                if closed:
                    alive, grown = False, None  # one more look at everything
            else:
                break
        yield from _drain(logs)
        self.process.wait()
        self._lifeline.close()
        waker.close()
        events.close()

    def is_disk_full(self) -> bool:
        """Whether the run directory has no space left for another file."""
        space = os.statvfs(self.directory.path)
        return space.f_bavail * space.f_frsize < 65536

    def status(self) -> dict[str, Any]:
        """What the agent last said of the job."""
        return self.directory.read_status() or {}


@dataclass(frozen=True)
class _Log:
    """A followed log file, and an `Output` that says whose it is."""

    file: GrowingFile
    output: Output


def _open_logs(started: dict[str, Any]) -> dict[Path, _Log]:
    logs: dict[Path, _Log] = {}
    for entry in started["logs"]:
        out, err, error = Path(entry["out"]), Path(entry["err"]), Path(entry["error"])
        what = Output(started["attempt"], entry["rank"], entry["local_rank"], "out", b"")
        if err != out:
            logs[out] = _Log(GrowingFile(out), what)
        logs[err] = _Log(RankLog(err, error), replace(what, stream="both" if err == out else "err"))
    return logs


def _drain(logs: dict[Path, _Log]) -> Iterator[Output]:
    """What is left in the logs of an attempt that is over; they are closed."""
    for log in logs.values():
        while data := log.file.read():
            yield replace(log.output, data=data)
        log.file.close()
    logs.clear()


def _terminal_size() -> dict[str, str]:
    """The size of the terminal that shows rank 0, so that its progress bars fit though it writes to a file."""
    if not sys.stdout.isatty():
        return {}
    size = os.get_terminal_size(sys.stdout.fileno())
    columns = str(size.columns or 80)  # 0 when the terminal does not know
    # tqdm has a variable of its own; the last two make rich draw although it writes to a file.
    return {
        "COLUMNS": columns,
        "LINES": str(size.lines or 24),
        "TQDM_NCOLS": columns,
        "TTY_COMPATIBLE": "1",
        "TTY_INTERACTIVE": "1",
    }


def _make_directory(job: str, log_dir: str | None) -> RunDirectory:
    path = Path(log_dir).absolute() / job if log_dir else jobs_folder() / job
    directory = RunDirectory(path)
    try:
        directory.create()
    except FileExistsError as error:
        if Path(error.filename) != path:
            raise UserError(f"cannot write to {path.parent}: it is no folder; choose another --log-dir") from None
        raise UserError(f"a job named {job} has its files in {path}; choose another --name") from None
    except OSError as error:
        where = "--log-dir" if log_dir else "PACELINE_HOME"
        raise UserError(
            f"cannot write to {path.parent}: {error.strerror}; choose another folder with {where}"
        ) from None
    return directory


def describe_ranks(spec: NodeSpec) -> list[dict[str, Any]]:
    """The variables that each rank of a single-node job would get, for --dry-run; ports are chosen at the start."""
    port = spec.main_port or 0
    endpoints = spec.nproc if "endpoints" in CONTRACTS[spec.framework].carries else 0
    node = {"address": "127.0.0.1", "slots": spec.nproc, "ports": [port] * endpoints}
    start = {
        "nodes": [node], "node_rank": 0, "main_address": "127.0.0.1", "main_port": port, "attempt": 0, "job": spec.job,
    }  # fmt: skip
    return [placing.variables(spec, placing.place(spec, start, rank)) for rank in range(spec.nproc)]


class Local:
    """Stands in for the backend of the jobs, which is written elsewhere."""

    def describe(self, names: Sequence[str] | None = None) -> list[Job]:
        """These jobs, or all."""
        found = []
        for path in jobs_folder().iterdir() if jobs_folder().exists() else ():
            if names is None or path.name in names:
                spec, run = NodeSpec.load(path / "spec.json"), RunDirectory(path)
                held, status = run.is_held, run.read_status() or {}
                final = status.get("state") in FINAL
                found.append(
                    Job(
                        name=path.name,
                        state=status.get("state", "PENDING") if held or final else "FAILED",
                        backend="local",
                        framework=spec.framework,
                        nodes=spec.nodes,
                        ranks=spec.nproc * spec.nodes,
                        attempt=status.get("attempt", 0),
                        exit_code=status.get("exit_code"),
                        created=0.0,
                        started=None,
                        finished=None,
                        instances=(),
                        error=None,
                    )
                )
        return found

    def logs(self, name: str, query: LogQuery) -> Iterator[LogLines]:
        """Lines of a job."""
        return read_logs(jobs_folder() / name, query)
