"""Who started this process, and where does it stand?

The environment of a process holds the variables of every launcher above it: torchrun within srun within sbatch. The
innermost one counts, so the order below goes from inside to outside:

1. a torchrun that a rank of a paceline job started, known by a run of its own;
2. paceline;
3. torchrun and its like, known by LOCAL_RANK with LOCAL_WORLD_SIZE, which hardly anybody sets by hand;
4. mpirun, then a step of srun: mpirun starts its daemons with srun, srun never starts within mpirun;
5. a pod of a PyTorchJob or TrainJob, whose RANK is that of the node;
6. RANK and WORLD_SIZE set by hand;
7. no launcher: one process.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .memory import PLAN
from .mpi import MpiContract
from .paceline import PacelineContract
from .placement import MAIN_PORT, ContractError, Placement
from .slurm import SlurmContract
from .torch import TorchContract
from .values import integer, placement_from

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


# What a script for one process may set without meaning that there are others.
HARMLESS = {"RANK": ("0", "-1"), "WORLD_SIZE": ("1",), "LOCAL_RANK": ("0", "-1")}


@dataclass(frozen=True)
class Recognised:
    """What `recognise` found."""

    # "paceline", "torchrun", "torch.distributed.launch", "mpirun", "srun", "pytorchjob", "environment" for RANK and
    # WORLD_SIZE set by hand, or "none"
    launcher: str
    placement: Placement  # where this process stands


def recognise(env: Mapping[str, str], argv: Sequence[str]) -> Recognised:
    """Find out from the environment and the arguments which launcher started this process."""
    if env.get(PLAN):  # `paceline plan` runs one process, also where a launcher would start several: nobody would join
        return Recognised("none", Placement())
    argument = _local_rank_argument(argv)
    if argument:
        _agree(env, "LOCAL_RANK", int(argument[2]), argument[1])
        env = {**env, "LOCAL_RANK": argument[2]}
    return (
        _paceline(env)
        or _torchrun(env, "torch.distributed.launch" if argument else "torchrun")
        or _mpirun_or_srun(env)
        or _pod(env)
        or _by_hand(env)
        or Recognised("none", Placement())
    )


def _paceline(env: Mapping[str, str]) -> Recognised | None:
    placement = PacelineContract().read(env)
    if placement is None:
        return None
    run = env.get("TORCHELASTIC_RUN_ID")
    if run == placement.job:
        _agree(env, "RANK", placement.rank, "PACELINE_RANK")
        _agree(env, "WORLD_SIZE", placement.world_size, "PACELINE_WORLD_SIZE")
    elif run is not None and (
        integer(env, "RANK") != placement.rank or integer(env, "WORLD_SIZE") != placement.world_size
    ):
        return None  # a torchrun that a rank of the job started
    return Recognised("paceline", placement)


def _torchrun(env: Mapping[str, str], launcher: str) -> Recognised | None:
    if "LOCAL_RANK" not in env or "LOCAL_WORLD_SIZE" not in env:
        return None
    placement = TorchContract().read(env)
    return Recognised(launcher, placement) if placement else None


def _mpirun_or_srun(env: Mapping[str, str]) -> Recognised | None:
    slurm = SlurmContract().read(env)
    if slurm is not None and slurm.world_size == 1 and "WORLD_SIZE" in env:
        slurm = None  # ranks started by hand in the one shell of `srun --pty`
    if slurm is not None and not _mpirun_within(env, slurm):
        return Recognised("srun", _meet(env, slurm, "SLURM_PROCID", "SLURM_NTASKS"))
    mpi = MpiContract().read(env)
    if mpi is None:
        return None
    if mpi.local_world_size < mpi.world_size and "MASTER_ADDR" not in env:
        raise ContractError("mpirun does not say where rank 0 is: set MASTER_ADDR (mpirun -x MASTER_ADDR=HOST …)")
    rank, size = (
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE") if "OMPI_COMM_WORLD_RANK" in env else ("PMI_RANK", "PMI_SIZE")
    )
    return Recognised("mpirun", _meet(env, mpi, rank, size))


def _mpirun_within(env: Mapping[str, str], slurm: Placement) -> bool:
    """Whether mpirun started this process in a step; srun sets PMI_RANK and PMI_SIZE as well, to its own numbers."""
    if "OMPI_COMM_WORLD_RANK" in env:
        return True
    return integer(env, "PMI_RANK", slurm.rank) != slurm.rank or integer(env, "PMI_SIZE", slurm.world_size) != (
        slurm.world_size
    )


def _meet(env: Mapping[str, str], placement: Placement, rank: str, world_size: str) -> Placement:
    """The placement with the main address and port that the user set for `env://`, if any."""
    if "PET_NNODES" not in env:  # RANK is the node's there
        _agree(env, "RANK", placement.rank, rank)
        _agree(env, "WORLD_SIZE", placement.world_size, world_size)
    return replace(
        placement,
        main_address=env.get("MASTER_ADDR", placement.main_address),
        main_port=integer(env, "MASTER_PORT", placement.main_port),
    )


def _pod(env: Mapping[str, str]) -> Recognised | None:
    """A pod of Kubeflow: PyTorchJob sets RANK and WORLD_SIZE, TrainJob only torchrun's PET_NODE_RANK and PET_NNODES."""
    if "PET_NNODES" not in env or "PET_NPROC_PER_NODE" not in env or "LOCAL_RANK" in env:
        return None
    processes = env["PET_NPROC_PER_NODE"]
    if processes.isdecimal() and int(processes) > 1:
        raise ContractError(
            f"PET_NPROC_PER_NODE={processes}, but this pod runs one process: start the script with `paceline run`"
        )
    rank, world_size = ("RANK", "WORLD_SIZE") if "RANK" in env else ("PET_NODE_RANK", "PET_NNODES")
    return Recognised(
        "pytorchjob",
        placement_from(
            env,
            {"rank": rank, "world_size": world_size, "node_rank": rank, "node_count": world_size},
            main_address=env.get("MASTER_ADDR", env.get("PET_MASTER_ADDR", "127.0.0.1")),
            main_port=integer(env, "MASTER_PORT", integer(env, "PET_MASTER_PORT", MAIN_PORT)),
        ),
    )


def _by_hand(env: Mapping[str, str]) -> Recognised | None:
    placement = TorchContract().read(env)
    if placement is not None:
        return Recognised("environment", placement)
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK"), ("LOCAL_RANK", "RANK")):
        if name in env and other not in env and env[name] not in HARMLESS[name]:
            raise ContractError(f"{name}={env[name]} is set, but {other} is not: set both or neither")
    return None


def _local_rank_argument(argv: Sequence[str]) -> re.Match[str] | None:
    """The first `--local-rank=N` of the arguments, flag and N; N = -1 says, by custom, that there is no launcher."""
    matches = (re.fullmatch(r"(--local[-_]rank)=(\d+)", argument) for argument in argv)
    return next(filter(None, matches), None)


def _agree(env: Mapping[str, str], name: str, value: int, source: str) -> None:
    """Raise ContractError if `env[name]` is set to something else than `value`, which `source` says."""
    if integer(env, name, value) != value:
        raise ContractError(f"{name}={env[name]} contradicts {source}={value}: remove the one that is wrong")
