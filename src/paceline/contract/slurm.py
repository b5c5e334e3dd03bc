"""The variables of a task that Slurm's `srun` starts.

Source: https://slurm.schedmd.com/srun.html, section OUTPUT ENVIRONMENT VARIABLES.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

from .base import Contract, Variables
from .placement import PLACEMENT_FIELDS, ContractError, Placement
from .values import integer, placement_from

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# Step numbers from here on are no tasks: the batch script, the extern step, the shell that salloc opens.
# Source: SLURM_MAX_NORMAL_STEP_ID in slurm/slurm.h.
FIRST_RESERVED_STEP = 0xFFFFFFF0


class SlurmContract(Contract):
    """SLURM_PROCID, SLURM_NTASKS, … as srun sets them.

    The variables of the step count, not those of the job: a step may have fewer nodes and tasks. Main address is the
    step's first host; the port follows from job and step, so that all tasks agree on it without a message. Devices are
    not set: SLURM_STEP_GPUS numbers a node's GPUs, a process under cgroups sees other numbers.
    """

    name: ClassVar[str] = "slurm"
    carries: ClassVar[frozenset[str]] = PLACEMENT_FIELDS - {"main_port", "devices", "endpoints"}

    def write(self, placement: Placement) -> Variables:
        """What srun would set for this task as step 0; hosts other than the first get made-up names."""
        p = placement
        hosts = p.main_address if p.node_count == 1 else f"{p.main_address},node[1-{p.node_count - 1}]"
        tasks = ",".join(str(count) for count in _ranks_on_each_node(p))
        variables = {
            "SLURM_JOB_ID": p.job,
            "SLURM_JOB_NODELIST": hosts,
            "SLURM_NNODES": str(p.node_count),
            "SLURM_NTASKS": str(p.world_size),
            "SLURM_TASKS_PER_NODE": tasks,
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NODELIST": hosts,
            "SLURM_STEP_NUM_NODES": str(p.node_count),
            "SLURM_STEP_NUM_TASKS": str(p.world_size),
            "SLURM_STEP_TASKS_PER_NODE": tasks,
            "SLURM_PROCID": str(p.rank),
            "SLURM_LOCALID": str(p.local_rank),
            "SLURM_NODEID": str(p.node_rank),
        }
        if p.attempt:
            variables["SLURM_RESTART_COUNT"] = str(p.attempt)
        return variables

    def read(self, env: Mapping[str, str]) -> Placement | None:
        """The placement of a task of a step; None in a batch script or in the shell of salloc.

        These have SLURM_PROCID=0 and the SLURM_NTASKS of the whole job too, but are not one of its tasks.
        """
        if "SLURM_PROCID" not in env or not is_step(env):
            return None
        per_node = _either(env, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
        counts = tasks_per_node(env[per_node])
        node = integer(env, "SLURM_NODEID")
        if not 0 <= node < len(counts):
            raise ContractError(f"SLURM_NODEID={node} is not one of the nodes in {per_node}={env[per_node]}")
        return placement_from(
            env,
            {
                "rank": "SLURM_PROCID",
                "world_size": _either(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
                "local_rank": "SLURM_LOCALID",
                "node_rank": "SLURM_NODEID",
                "node_count": _either(env, "SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
            },
            local_world_size=counts[node],
            main_address=expand_hosts(env[_either(env, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")])[0],
            main_port=agreed_port(env.get("SLURM_JOB_ID", ""), env["SLURM_STEP_ID"]),
            attempt=integer(env, "SLURM_RESTART_COUNT", 0),
            job=env.get("SLURM_JOB_ID", "none"),
        )


def agreed_port(job_id: str, step_id: str = "0") -> int:
    """A port that everybody who knows the step computes alike; Linux gives those from 32768 on to connections."""
    from random import Random  # costs more than this whole package, and only Slurm needs it

    return Random(f"{job_id}.{step_id}").randint(20000, 32767)  # a text seed gives the same number on every Python


def expand_hosts(nodelist: str) -> list[str]:
    """The hosts of a list in Slurm's notation: `n[01-03,7],other` is n01, n02, n03, n7, other."""
    items = re.findall(r"(?:[^][,]|\[[^][]+\])+", nodelist)
    if not items or ",".join(items) != nodelist:
        raise ContractError(f"{nodelist!r} is not a Slurm node list")
    return [host for item in items for host in _expand_item(item)]


def tasks_per_node(text: str) -> list[int]:
    """The counts in Slurm's notation: `2(x3),1` is 2, 2, 2, 1."""
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        if not match:
            raise ContractError(f"{text!r} is not a Slurm list of tasks per node such as 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _expand_item(item: str) -> list[str]:
    head, bracket, rest = item.partition("[")
    if not bracket:
        return [item]
    ranges, _, tail = rest.partition("]")
    tails = _expand_item(tail)
    return [head + number + end for part in ranges.split(",") for number in _expand_range(part) for end in tails]


def _expand_range(part: str) -> Iterator[str]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
    low, high = (match[1], match[2] or match[1]) if match else ("1", "0")
    if int(high) < int(low):
        raise ContractError(f"[{part}] is not a range of a Slurm node list such as [01-03,7]")
    return (str(number).zfill(len(low)) for number in range(int(low), int(high) + 1))


def is_step(env: Mapping[str, str]) -> bool:
    """Whether srun has started this process; False in a batch script, and in the shell that salloc has opened."""
    step = env.get("SLURM_STEP_ID", "")
    return step.isdecimal() and int(step) < FIRST_RESERVED_STEP


def _either(env: Mapping[str, str], name: str, other: str) -> str:
    """`name` if it is set, else `other`."""
    if name not in env and other not in env:
        raise ContractError(f"neither {name} nor {other} is set, though other variables of Slurm are")
    return name if name in env else other


def _ranks_on_each_node(p: Placement) -> list[int]:
    """Ranks on each node; exact on this one, shared out evenly over the others, of which a placement knows the sum."""
    before = p.rank - p.local_rank
    after = p.world_size - p.local_world_size - before
    return [*_share(before, p.node_rank), p.local_world_size, *_share(after, p.node_count - 1 - p.node_rank)]


def _share(ranks: int, nodes: int) -> list[int]:
    return [ranks // nodes + (node < ranks % nodes) for node in range(nodes)]
