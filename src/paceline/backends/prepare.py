"""Makes a job concrete for this machine: what its script and the machine say, and its part on this node."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.contract import CONTRACTS, thread_count
from paceline.job.errors import UserError
from paceline.job.home import jobs_folder
from paceline.job.quantities import show_size
from paceline.job.script import Imports, imports_of, module_file, program_kind
from paceline.node import devices, machine, placing, processes, queue
from paceline.node.ports import is_listening
from paceline.node.spec import NodeSpec, Program, Request

from .tensorboard import check_installed, logdir_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.job.spec import JobSpec
    from paceline.node.run_directory import RunDirectory

    from .volumes import Source

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


def complete(spec: JobSpec, code: Path | None = None) -> JobSpec:
    """Fill in what the script itself and this machine say, and refuse what cannot work; starts nothing.

    Args:
        spec: what the user asked for.
        code: where the job's own copy of its code is; None where it has none, or none yet: then what depends on it
            stays open.

    Raises:
        UserError: the job cannot run here.
    """
    if spec.code is None or spec.working_dir != ".":
        spec = spec.model_copy(update={"working_dir": str(working_dir(spec))})
    imports = Imports()
    folder = code or Path(spec.working_dir)
    if spec.code is None or code is not None:
        if not folder.is_dir():
            raise UserError(f"no folder {folder} to run in; correct --working-dir")
        spec = _check_program(spec, folder)
        imports = _imports(spec, folder)
    if spec.options:
        raise UserError(f"this machine knows no option {next(iter(spec.options))!r}; leave it out")
    framework = spec.framework or imports.framework or "torch"
    if spec.pass_index and framework != "indexed":
        raise UserError("--pass-index needs independent processes; add --framework indexed")
    package = PACKAGES.get(framework)
    needed = package is not None and (spec.framework or package in imports.required) and spec.kind != "command"
    if needed and package is not None and importlib.util.find_spec(package) is None:
        raise UserError(
            f"{package} is not installed for {sys.executable}; install it there, or run paceline with another Python"
        )
    if spec.tensorboard:
        check_installed()
    for module in spec.preload:
        if importlib.util.find_spec(module.partition(".")[0]) is None and module_file(module, folder) is None:
            raise UserError(f"--preload {module}: no such module is installed for {sys.executable}; check the name")
    spec = spec.model_copy(update={"framework": framework})
    _check_meeting(spec)
    spec = spec.model_copy(update={"ranks": _count_ranks(spec), **_start_method(spec, imports)})
    if spec.detached and spec.devices is None and (present := devices.accelerators()):
        # Who watches a run can see to the devices; a job that nobody watches shares them with nobody.
        count = 1 if framework == "indexed" else min(int(spec.ranks), len(present))
        spec = spec.model_copy(update={"devices": count})
    _check_devices(spec)
    return spec


def _start_method(spec: JobSpec, imports: Imports) -> dict[str, Any]:
    """How the ranks are started, and what is imported for that before."""
    if spec.kind == "command":
        return {"start_method": "exec"}
    if spec.start_method != "fork":
        return {}
    framework = spec.framework or ""
    package = PACKAGES.get(framework)
    changes: dict[str, Any] = {}
    if package in imports.every:
        changes["preload"] = PRELOAD.get(framework, ()) + spec.preload
        changes["env"] = {**spec.env, **imports.variables}
        if imports.sets_more:  # the framework is to see them when it is imported, and only the script knows them
            changes["start_method"] = "exec"
    if package is not None and framework not in SAFE_WITH_DEVICES and devices.accelerators():
        changes["start_method"] = "exec"
    return changes


def working_dir(spec: JobSpec) -> Path:
    """Where the ranks start, as a whole path.

    Raises:
        UserError: the current folder is gone.
    """
    try:
        return Path.cwd() / Path(spec.working_dir).expanduser()
    except FileNotFoundError:
        raise UserError("the folder that you are in was deleted; change to one that exists") from None
    except RuntimeError:
        raise UserError(f"--working-dir {spec.working_dir}: no such user; write the whole path") from None


def _check_program(spec: JobSpec, folder: Path) -> JobSpec:
    """Refuse a program that is not there; a "script" that is no Python script becomes a command."""
    name = spec.target
    if spec.kind == "module":
        # Parent packages are not imported: that is the ranks' business.
        if module_file(name, folder) is None and importlib.util.find_spec(name.partition(".")[0]) is None:
            raise UserError(
                f"no module {name} in {folder} or installed for {sys.executable}; check the name and the folder"
            )
    elif spec.kind == "command":
        path = folder / name if os.sep in name else None
        if shutil.which(str(path) if path else name) is None:
            raise UserError(
                f"no program {name} {'that can be run' if path else 'on PATH'}; check the name, or give its whole path"
            )
    elif program_kind(name, folder) == "command":
        return spec.model_copy(update={"script": None, "command": os.path.join(".", name)})
    return spec


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
    named = spec.devices if isinstance(spec.devices, tuple) else None
    present = devices.accelerators()
    usable = present[: spec.devices] if isinstance(spec.devices, int) else named or present
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
    if named and spec.ranks > len(named) and spec.framework != "indexed":
        raise UserError(
            f"-n {spec.ranks} is more than the {len(named)} devices of --devices {','.join(named)}; "
            "name more devices, start fewer ranks, or share devices with --framework indexed"
        )
    return spec.ranks


def _check_meeting(spec: JobSpec) -> None:
    nodes, most = spec.node_range
    if nodes != most:
        raise UserError(f"--nnodes {spec.nodes}: a changing number of machines is not supported; give one number")
    if nodes > 1 and not spec.main_address:
        raise UserError(
            f"--nnodes {nodes} needs to know where the nodes meet; give --master-addr with node 0's address"
        )
    if spec.node_rank is not None and spec.node_rank >= nodes:
        raise UserError(f"--node-rank {spec.node_rank} with --nnodes {nodes}; nodes are numbered 0 … {nodes - 1}")
    listens_here = nodes == 1 or spec.node_rank == 0
    if listens_here and spec.main_port is not None and is_listening(spec.main_port):
        raise UserError(f"port {spec.main_port} is in use on this machine; choose another --master-port, or none")


def _request(spec: JobSpec) -> Request | None:
    """What a completed job asks of this machine's queue, None if it asks for no device."""
    if not spec.devices:
        return None
    of, slots = devices_here()
    folder = str(queue.folder_of(jobs_folder().parent))
    return Request(folder, spec.devices, of, spec.share_devices, spec.priority, slots)


def devices_here() -> tuple[tuple[str, ...], bool]:
    """The devices that jobs can ask this machine for, and whether they are mere slots."""
    present = devices.accelerators()
    if present:
        return present, False
    from paceline.job.settings import load  # takes long to import, and few jobs need it

    slots = load().local.devices or 0
    return tuple(str(slot) for slot in range(slots)), True


def _check_devices(spec: JobSpec) -> None:
    """Refuse what this machine can never give.

    Raises:
        UserError: it lacks the devices, the cores or the memory.
    """
    request = _request(spec)
    if request is not None and (why := queue.impossible(request)):
        declare = "; declare slots as [local] devices = N in paceline.toml" if request.slots else ""
        raise UserError(f"the job can never start: {why}; ask for others{declare}")
    if spec.cpus is not None and spec.cpus > devices.cores():
        raise UserError(f"--cpus {spec.cpus}: this machine lets a job use {devices.cores()} cores; ask for fewer")
    memory = machine.memory()
    most = memory.total if memory.limit is None else min(memory.total, memory.limit)
    if spec.memory is not None and spec.memory > most:
        raise UserError(f"--memory {show_size(spec.memory)}: this machine has {show_size(most)}; ask for less")


def place(
    spec: JobSpec,
    split_streams: tuple[int, ...] = (),
    *,
    folder: Path | None = None,
    sources: Sequence[Source] = (),
) -> NodeSpec:
    """This node's part of a completed job.

    Args:
        spec: the completed job.
        split_streams: the local ranks whose stderr is kept apart.
        folder: where the ranks start, unless it is the job's working dir.
        sources: its volumes.
    """
    request = _request(spec)
    assert spec.framework is not None, "the spec is complete"
    ranks = int(spec.ranks)
    env = dict(spec.env)
    if "OMP_NUM_THREADS" not in {**os.environ, **env}:
        env["OMP_NUM_THREADS"] = str(thread_count(spec.cpus or devices.cores(), ranks))
    if spec.devices == 0:
        env.update(devices.visibility(()))
    env.update((source.variable, source.path) for source in sources)
    if spec.checkpoint_dir is not None:
        env["PACELINE_CHECKPOINT_DIR"] = spec.checkpoint_dir
    job_id = uuid.uuid4().hex
    env["PACELINE_JOB_ID"] = job_id
    return NodeSpec(
        job=spec.name,
        job_id=job_id,
        program=Program(spec.kind, spec.target, spec.args),
        framework=spec.framework,
        nproc=ranks,
        python=python_command(),
        working_dir=str(folder or spec.working_dir),
        env=env,
        preload=spec.preload,
        start_method=spec.start_method,
        devices=None if request else () if spec.devices == 0 else devices.accelerators(),  # its agent gets them
        node_rank=spec.node_rank if spec.node_range[1] > 1 else 0,
        nodes=spec.node_range[1],
        main_address=spec.main_address,
        main_port=spec.main_port if spec.node_range[1] == 1 else spec.main_port or 29500,
        local_address=spec.local_address,
        join_timeout=spec.join_timeout,
        max_restarts=spec.max_restarts,
        grace=spec.grace,
        split_streams=split_streams,
        pass_index=spec.pass_index,
        role=spec.role,
        run_id=spec.run_id,
        time_limit=spec.time_limit,
        detached=spec.detached,
        tensorboard=_tensorboard(spec),
        request=request,
    )


def _tensorboard(spec: JobSpec) -> str | None:
    """What the job's TensorBoard shows, "" for its run directory; None if it wants none."""
    if not spec.tensorboard:
        return None
    return logdir_of(spec.working_dir, spec.tensorboard_dir) if spec.tensorboard_dir else ""


def python_command() -> tuple[str, ...]:
    """This interpreter with the options it was started with (-X, -W, -u, -O, …), so that the ranks get them too."""
    options = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
    if sys.stdout is not None and getattr(sys.stdout, "write_through", False):
        options.append("-u")
    return (sys.executable, *options)


def describe_ranks(spec: NodeSpec) -> list[dict[str, Any]]:
    """The variables that each rank of a single-node job would get, for --dry-run; ports are chosen at the start."""
    return [_variables(spec, rank, {}) for rank in range(spec.nproc)]


def shell_of(run: RunDirectory, rank: int) -> tuple[dict[str, str], str]:
    """The variables that a rank of a job has, secrets included as long as it runs, and the folder where it started.

    Raises:
        UserError: the job has no such rank here.
    """
    spec, status = NodeSpec.load(run.spec), run.read_status() or {}
    local = {entry["rank"]: entry["local_rank"] for entry in status.get("ranks", ())} or {
        number: number for number in range(spec.nproc)
    }
    if rank not in local:
        raise UserError(f"job {spec.job} has no rank {rank} here; its ranks are {', '.join(map(str, local))}")
    if status.get("devices"):
        spec = dataclasses.replace(spec, devices=tuple(status["devices"]))
    mine = {name: os.environ[name] for name in ("TERM", "COLUMNS", "LINES") if name in os.environ}
    env = processes.environment((status.get("agent") or {}).get("pid", 0)) if run.is_held else {}
    return {**os.environ, **env, **mine, **spec.env, **_variables(spec, local[rank], status)}, spec.working_dir


def _variables(spec: NodeSpec, local_rank: int, status: dict[str, Any]) -> dict[str, Any]:
    start = status.get("start")
    if start is None:  # it has not started yet
        port = spec.main_port or 0
        endpoints = spec.nproc if "endpoints" in CONTRACTS[spec.framework].carries else 0
        node = {"address": "127.0.0.1", "slots": spec.nproc, "ports": [port] * endpoints}
        start = {
            "nodes": [node], "node_rank": 0, "main_address": "127.0.0.1", "main_port": port, "attempt": 0,
            "job": spec.job,
        }  # fmt: skip
    return placing.variables(spec, placing.place(spec, start, local_rank))
