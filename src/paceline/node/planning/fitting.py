"""Fits a job to the machine that this process runs on: what its script and the machine say of it."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.contract import ContractError, Placement
from paceline.contract.folder_lock import holder_of
from paceline.contract.memory import machine_memory
from paceline.contract.slurm import is_step
from paceline.contract.tensorflow import ROLES, TensorflowContract
from paceline.node.errors import Refused
from paceline.node.machine import containers, devices
from paceline.node.machine.ports import is_listening
from paceline.node.spec import Request
from paceline.node.tensorboard import check_installed

from .packages import PRELOAD, TENSORFLOW, WITH_OPTIMIZERS, Packages
from .script import Imports, imports_of, is_shell_text, module_file, program_kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.contract.nodejob import NodeJob

# The package of each framework.
PACKAGES = {"torch": "torch", "horovod": "horovod", "paddle": "paddle", "tensorflow": "tensorflow", "jax": "jax"}
# Importing these touches no GPU; the others may initialise one, which a forked process cannot use.
SAFE_WITH_DEVICES = ("torch",)


@dataclass(frozen=True)
class Here:
    """This machine, as jobs see it."""

    home: Path  # the folder of jobs and of the queue
    python: tuple[str, ...]  # interpreter with its options, as an argument vector
    slots: Callable[[], int]  # returns the number of slots if it has no accelerators; called only if needed
    declare: str  # how to declare slots, for messages
    choose_python: str  # how to choose another interpreter, for messages
    # whether a scheduler has placed the job here. The scheduler grants devices and manages ports, so there is no queue
    # for devices, and a job gets the devices that a process sees.
    is_scheduled: bool = False

    @property
    def devices(self) -> tuple[tuple[str, ...], bool]:
        """The devices that jobs can request, and whether they are only slots."""
        present = devices.accelerators()
        if present:
            return present, False
        return tuple(str(slot) for slot in range(self.slots())), True

    def packages(self, job: NodeJob) -> Packages:
        """What is known of the packages of a job."""
        is_outside = bool(job.image) and not self.is_scheduled and not containers.is_inside()
        return Packages.of(job, is_outside=is_outside)

    def request(self, job: NodeJob) -> Request | None:
        """The request of a completed job to the queue; None if it requests no device."""
        need = job.devices
        if not need or self.is_scheduled:
            return None
        from paceline.node.devicequeue import ticket

        of, slots = self.devices
        folder = str(ticket.folder_of(self.home))
        need = need if isinstance(need, int) else tuple(need)
        return Request(folder, need, of, job.share_devices, job.priority, slots)


@dataclass(frozen=True)
class Fitted:
    """A job as this machine runs it."""

    job: NodeJob  # complete
    imports: Imports = field(default_factory=Imports)  # of its program; none if that is not here yet
    why_exec: str = ""  # why its ranks are started by exec although the user has not requested it; "" if they are not

    @property
    def local_rank_flag(self) -> str:
        """How its script calls its local rank as an argument; "" if it has none, or shall not get it."""
        job = self.job
        given = any(argument.partition("=")[0] in ("--local_rank", "--local-rank") for argument in job.args)
        return "" if job.use_env or given or job.command is not None else self.imports.local_rank


def complete(job: NodeJob, here: Here, code: Path | None) -> Fitted:
    """Complete a job from its script and this machine, and refuse what cannot work; starts nothing.

    Its framework stays None if its script imports none; the ranks of such a job get torch's variables.
    """
    imports, packages = Imports(), here.packages(job)
    folder = code or Path(job.working_dir)
    if job.code is None or code is not None:
        if not folder.is_dir():
            raise Refused(f"no folder {folder} to run in; correct --working-dir")
        job = _check_program(job, folder, packages)
        imports = imports_of(*job.program, job.args, folder)
    unknown = "torch" if job.code is not None and code is None else None
    framework = job.framework or _found(job, here, imports, packages) or unknown
    if job.pass_index and framework != "indexed":
        raise Refused("--pass-index needs independent processes; add --framework indexed")
    if framework == "mpi" and imports.framework == "horovod" and job.framework is None:
        job = replace(job, horovod="paceline")  # its names; it needs none of Horovod's variables
    if job.horovod and framework not in ("horovod", "mpi"):
        raise Refused(f"--horovod {job.horovod} is for scripts that import horovod; add --framework horovod")
    if framework == "horovod" and not job.horovod and packages.has("horovod"):
        job = replace(job, horovod="real")
    package = _package(replace(job, framework=framework))
    needed = package is not None and (job.framework or package in imports.required) and job.command is None
    if needed and package is not None and not packages.are_unknown and not packages.has(package):
        raise Refused(f"{package} is not installed for {sys.executable}; install it there, or {here.choose_python}")
    if job.tensorboard and not packages.are_elsewhere:
        check_installed()
    for module in () if packages.are_unknown else job.preload:
        if not packages.has(module.partition(".")[0]) and module_file(module, folder) is None:
            raise Refused(f"--preload {module}: no such module is installed for {sys.executable}; check the name")
    if job.framework == "mpi" and (why := _no_mpi(job)):
        raise Refused(f"--framework mpi: {why}, or leave out --framework")
    job = replace(job, framework=framework)
    _check_meeting(job, here)
    job = replace(job, ranks=_count_ranks(job, here))
    why_exec = _why_exec(job, imports)
    job = _with_start_method(job, imports, why_exec)
    _check_roles(job, framework)
    if job.detached and job.devices is None and not here.is_scheduled and (present := devices.accelerators()):
        # The user of `run` can manage the devices; jobs in the background do not share them.
        job = replace(job, devices=1 if framework == "indexed" else min(int(job.ranks), len(present)))
    _check_devices(job, here)
    return Fitted(job, imports, why_exec)


def _found(job: NodeJob, here: Here, imports: Imports, packages: Packages) -> str | None:
    """The framework that a script imports; MPI before any other, or its ranks would be as many worlds of one.

    A script that only may use MPI gets it where nothing else has to be given up, and all nodes decide the same.
    """
    nodes = job.node_range
    if not imports.mpi or (imports.mpi == "may" and (nodes != (1, 1) or imports.framework not in ("torch", "horovod"))):
        return imports.framework
    why = _no_mpi(job)
    if nodes[0] < nodes[1]:
        why = f"with MPI the number of nodes cannot change: give one --nnodes instead of {job.nodes}"
    elif imports.framework == "horovod" and job.horovod != "paceline" and packages.has("horovod"):
        why = "the installed Horovod may be built without MPI: add --framework mpi if it is not"
    if not why:
        return "mpi"
    if imports.mpi == "must" and (nodes, _count_ranks(job, here)) != ((1, 1), 1):  # a rank alone is a whole world
        other = imports.framework or "torch"
        raise Refused(f"{job.program[1]} imports mpi4py: {why}, or add --framework {other} if its ranks use no MPI")
    return imports.framework


def _with_start_method(job: NodeJob, imports: Imports, why_exec: str) -> NodeJob:
    """A job with how its ranks are started, and what the fork server imports before."""
    if job.command is not None or job.start_method == "exec" or why_exec:
        return replace(job, start_method="exec")
    job, framework = replace(job, start_method="fork"), _imported(job, imports)
    if not _is_used(framework, imports):
        return job
    optimizers = WITH_OPTIMIZERS if framework == "torch" and imports.optimizers else ()
    # Torch does the collectives of paceline's horovod.tensorflow.
    beside = PRELOAD["torch"] if (framework, job.framework) == ("tensorflow", "horovod") else ()
    preload = (*PRELOAD.get(framework, ()), *beside, *optimizers, *job.preload)
    return replace(job, preload=preload, env={**job.env, **imports.prelude.variables})


def _imported(job: NodeJob, imports: Imports) -> str:
    """The framework that the fork server would import."""
    framework: str = job.framework or ""
    if framework == "horovod" and job.horovod != "real":
        return "tensorflow" if _is_used("tensorflow", imports) and "torch" not in imports.every else "torch"
    return "torch" if framework == "mpi" else framework  # mpi has nothing to import; many scripts use torch beside it


def _is_used(framework: str, imports: Imports) -> bool:
    """Whether a script imports a framework, as far as its import statements say."""
    return bool(imports.every & (TENSORFLOW if framework == "tensorflow" else {PACKAGES.get(framework)}))


def _package(job: NodeJob) -> str | None:
    """The package that a job's framework needs; None if it needs none."""
    framework: str = job.framework or ""
    return PACKAGES.get("torch" if framework == "horovod" and job.horovod != "real" else framework)


def _why_exec(job: NodeJob, imports: Imports) -> str:
    """Why ranks are started by exec although the user has not requested it; "" if they are not."""
    framework = _imported(job, imports)
    package = PACKAGES.get(framework)
    if job.command is not None or job.start_method == "exec" or package is None:
        return ""
    if framework not in SAFE_WITH_DEVICES and devices.accelerators():
        return f"importing {package} may initialise this machine's GPUs"
    if job.start_method is None and _is_used(framework, imports) and imports.prelude.unclear:
        return f"{imports.prelude.unclear} before {package} is imported"
    return ""


def _check_program(job: NodeJob, folder: Path, packages: Packages) -> NodeJob:
    """Refuse a program that does not exist; a "script" that is not a Python script becomes a command."""
    kind, name = job.program
    if kind == "module":
        # Parent packages are not imported: only ranks do that.
        is_there = module_file(name, folder) is not None or packages.has(name.partition(".")[0])
        if not is_there and not packages.are_unknown:
            raise Refused(
                f"no module {name} in {folder} or installed for {sys.executable}; check the name and the folder"
            )
    elif kind == "command":
        path = folder / name if os.sep in name else None
        # An environment that is not built yet may have it, or an image.
        is_known = path or not (job.environment_digest or packages.are_elsewhere)
        if shutil.which(str(path) if path else name) is None and is_known:
            raise Refused(
                f"no program {name} {'that can be run' if path else 'on PATH'}; check the name, or give its full path"
            )
    elif program_kind(name, folder) == "command":
        if is_shell_text(folder / name):
            return replace(job, script=None, command="sh", args=(os.path.join(".", name), *job.args))
        return replace(job, script=None, command=os.path.join(".", name))
    return job


def _count_ranks(job: NodeJob, here: Here) -> int:
    """The number of ranks on this machine for `auto`, `gpu`, `cpu`, `slots` or a number."""
    ranks, asked = job.ranks, job.devices
    if ranks == "slots":
        ranks = here.slots() or 1
    named = None if asked is None or isinstance(asked, int) else tuple(asked)
    present = devices.accelerators()
    usable = present[:asked] if isinstance(asked, int) else named or present
    if ranks == "gpu":
        if not usable:
            raise Refused("-n gpu, but this machine has no GPU that a process may use; take -n cpu or a number")
        return len(usable)
    if ranks == "auto":
        return len(usable) or devices.cores()
    if ranks == "cpu":
        return devices.cores()
    count = int(ranks)
    if count < 1:
        raise Refused(f"-n {ranks} starts no rank; take 1 or more")
    if named and count > len(named) and job.framework != "indexed":
        raise Refused(
            f"-n {ranks} is more than the {len(named)} devices of --devices {','.join(named)}; "
            "name more devices, start fewer ranks, or share devices with --framework indexed"
        )
    return count


def _check_roles(job: NodeJob, framework: str | None) -> None:
    """Refuse roles of TensorFlow's that are unknown, or for which there are too few ranks."""
    if framework == "tensorflow" and ROLES in job.env:
        try:
            placement = Placement(world_size=int(job.ranks) * job.node_range[0])
            TensorflowContract().write_roles(placement, job.env[ROLES])
        except ContractError as error:
            raise Refused(f"--env {error}") from None


def _no_mpi(job: NodeJob) -> str:
    """Why mpirun cannot connect the ranks, and what to do; "" if it can."""
    mpirun = shutil.which("mpirun", path=job.env.get("PATH"))
    if mpirun is None:
        return "there is no mpirun on PATH: install Open MPI (Debian: apt install openmpi-bin)"
    output = subprocess.run([mpirun, "--version"], capture_output=True, text=True, errors="replace", check=False).stdout
    version = re.search(r"\(Open MPI\) (\d+)\.", output)
    if version is None or not 3 <= int(version[1]) <= 4:
        found = output.partition("\n")[0].strip(" :") or "nothing"
        return f"{mpirun} calls itself {found!r}, and Open MPI 3 or 4 is needed: put it first on PATH"
    return ""


def _check_meeting(job: NodeJob, here: Here) -> None:
    _, nodes = job.node_range
    if nodes > 1 and not job.main_address:
        raise Refused(
            f"--nnodes {job.nodes} needs to know where the nodes meet; give --master-addr with node 0's address"
        )
    if job.node_rank is not None and job.node_rank >= nodes:
        raise Refused(f"--node-rank {job.node_rank} with --nnodes {nodes}; nodes are numbered 0 … {nodes - 1}")
    if nodes > 1 and not here.is_scheduled and not _may_resolve(job.main_address or ""):
        raise Refused(f"no host is named {job.main_address}; give --master-addr with node 0's name or address")
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "") if is_step(os.environ) and not here.is_scheduled else ""
    if nodes > 1 and tasks.isdecimal() and int(tasks) > nodes:
        raise Refused(
            f"srun has started {tasks} tasks for --nnodes {job.nodes}, which needs one on each node: "
            "give srun --ntasks-per-node=1, as paceline starts the ranks"
        )
    listens_here = not here.is_scheduled and (nodes == 1 or job.node_rank == 0)
    if listens_here and job.main_port is not None and is_listening(job.main_port):
        raise Refused(f"port {job.main_port} is in use on this machine; choose another --master-port, or none")


def _may_resolve(host: str) -> bool:
    """Whether a host has an address, or may have one later."""
    try:
        socket.getaddrinfo(host, None)
    except socket.gaierror as error:  # in a pod, the name of another one appears when that one starts
        return error.errno != socket.EAI_NONAME or "KUBERNETES_SERVICE_HOST" in os.environ
    except UnicodeError:  # a label that is empty or too long
        return False
    return True


def _check_devices(job: NodeJob, here: Here) -> None:
    """Refuse what this machine can never give."""
    request = here.request(job)
    if request is not None:
        from paceline.node.devicequeue.policy import impossible

        if why := impossible(request):
            declare = f"; {here.declare}" if request.slots else ""
            raise Refused(f"the job can never start: {why}; ask for others{declare}")
    if here.is_scheduled and isinstance(job.devices, int) and job.devices > len(here.devices[0]):
        count = len(here.devices[0])
        raise Refused(f"the job needs {job.devices} devices on each node, and its scheduler granted {count} here")
    if job.cpus is not None and job.cpus > devices.cores():
        raise Refused(f"--cpus {job.cpus}: this machine lets a job use {devices.cores()} cores; ask for fewer")
    if job.memory is None:
        return
    memory = machine_memory()
    most = memory.total if memory.limit is None else min(memory.total, memory.limit)
    if job.memory > most:
        raise Refused(f"--memory {_gibibytes(job.memory)}: this machine has {_gibibytes(most)}; ask for less")


def _gibibytes(number: int) -> str:
    return f"{number / (1 << 30):.1f} GiB"


def check_checkpoint_dir(job: NodeJob) -> None:
    """Check that a folder for checkpoints can be one, and that no other job saves there now, as far as is known."""
    if job.checkpoint_dir is None:
        return
    saves_to = Path(job.working_dir, job.checkpoint_dir)
    there = next(it for it in (saves_to, *saves_to.parents) if os.path.lexists(it))
    if not there.is_dir():
        raise Refused(f"--checkpoint-dir {saves_to}: {there} is no folder; name another one")
    if job.fresh and any(saves_to.glob("step-*")):
        raise Refused(
            f"--fresh: there are checkpoints in --checkpoint-dir {saves_to}, and the job would resume from them; "
            "name another folder"
        )
    holder = holder_of(saves_to)
    if holder is not None:
        raise Refused(
            f"--checkpoint-dir {saves_to}: {holder} saves checkpoints there; stop that first, or choose another folder"
        )
