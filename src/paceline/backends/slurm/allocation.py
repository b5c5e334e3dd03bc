"""The allocation that this process is in: the shell that salloc has opened, or a batch script of the user's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.backends.base import Allocation
from paceline.contract import ContractError
from paceline.contract.slurm import expand_hosts, is_step, tasks_per_node
from paceline.job.errors import UserError
from paceline.node.host.slurm.place.step import WITHIN

if TYPE_CHECKING:
    from collections.abc import Mapping


def current(env: Mapping[str, str]) -> Allocation | None:
    """The allocation of this process.

    None in a step, where srun has started this process, and in everything that a job of paceline has started: a
    `paceline run` there is one process among others, and would start all of them once more.
    """
    if "SLURM_JOB_ID" not in env or is_step(env) or WITHIN in env or "PACELINE_RANK" in env:
        return None
    number = env["SLURM_JOB_ID"]
    if env.get("SLURM_HET_SIZE") or env.get("SLURM_PACK_SIZE"):
        raise UserError(
            f"the allocation {number} is heterogeneous (SLURM_HET_SIZE), and a job of paceline needs nodes of one kind;"
            " make one without ':', or give --nnodes 1"
        )
    try:
        hosts = tuple(expand_hosts(env.get("SLURM_JOB_NODELIST", "")))
        ranks = _ranks(env)
    except ContractError as error:
        raise UserError(f"the variables of the allocation {number} are damaged: {error}; make another one") from None
    return Allocation(number, hosts, ranks, len(hosts) == 1 and env.get("SLURMD_NODENAME") == hosts[0])


def alone(env: Mapping[str, str]) -> str | None:
    """The line for one of several tasks of a step that are no job together; None if this is not the first of them."""
    if not is_step(env) or WITHIN in env or "PACELINE_RANK" in env or env.get("SLURM_PROCID") != "0":
        return None
    tasks, nodes = env.get("SLURM_STEP_NUM_TASKS", "1"), env.get("SLURM_STEP_NUM_NODES", "1")
    if tasks == "1":
        return None
    where = f"on {nodes} nodes" if nodes != "1" else f"{tasks} times on this node"
    return (
        f"srun has started this {where}, and each of them trains alone; leave srun out, and paceline run uses all nodes"
        " of the allocation; or give --nnodes, --node-rank $SLURM_NODEID and --master-addr; --nnodes 1 if that is meant"
    )


def _ranks(env: Mapping[str, str]) -> int | None:
    """How many tasks the user has asked for on each node; None if he has not, 0 if their numbers differ."""
    if "SLURM_NTASKS" not in env:  # else SLURM_TASKS_PER_NODE follows from the CPUs alone
        return None
    counts = set(tasks_per_node(env.get("SLURM_TASKS_PER_NODE", "")))
    if len(counts) > 1:
        return 0
    (count,) = counts
    return count if count > 1 else None
