"""The nodes of a Slurm cluster, its partitions, and what is allocated of them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from paceline.node.host.slurm.call import call, table

if TYPE_CHECKING:
    from paceline.contract.messages import Plain, SlurmNode, SlurmNodes
    from paceline.node.store.home import Home

_FIELDS = {
    "NodeHost": 64, "Partition": 64, "StateLong": 24, "CPUsState": 32, "CPUsLoad": 16, "Memory": 20, "AllocMem": 20,
    "FreeMem": 20, "Gres": 256, "GresUsed": 256, "Reason": 128, "NodeAddr": 64,
}  # fmt: skip
_GPU = re.compile(r"\bgpu(?::[^:,()]+)?:(?P<count>\d+)(?=[,(]|$)")
NOT_UP = re.compile(r"down|drain|fail|maint|unk|inval|\*$")  # states in which a node starts nothing
_MEBIBYTE = 1 << 20


def slurm_nodes(home: Home, request: Plain) -> SlurmNodes:
    """The nodes of the cluster."""
    return {"nodes": nodes()}


def nodes() -> list[SlurmNode]:
    """The nodes, each with its partitions, its state, and its CPUs, memory and GPUs in all and allocated."""
    found: dict[str, SlurmNode] = {}
    for column in table("sinfo", "--Node", columns=_FIELDS):
        if column["NodeHost"] in found:
            found[column["NodeHost"]]["partitions"].append(column["Partition"].rstrip("*"))
        else:
            found[column["NodeHost"]] = _node(column)
    return [{**node, "partitions": sorted(node["partitions"])} for node in found.values()]


def limit(asked: str) -> float | None:
    """The time limit in seconds of jobs that ask for none; None if they have none."""
    found = []
    for line in call("scontrol", "show", "partition", "--oneliner").splitlines():
        fields = dict(re.findall(r"(\w+)=(\S*)", line))
        if fields.get("PartitionName") in asked.split(",") or (not asked and fields.get("Default") == "YES"):
            times = (seconds_of(fields.get(name, "")) for name in ("DefaultTime", "MaxTime"))
            found.append(next((time for time in times if time is not None), None))
    return min((time for time in found if time is not None), default=None)


def seconds_of(text: str) -> float | None:
    """A time limit that Slurm has written, or takes: minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S; None if it is none."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if match is None:
        return None
    days, *parts = (None if part is None else int(part) for part in match.groups())
    first, second, third = parts
    if days is None and third is None:  # minutes first
        return float((first or 0) * 60 + (second or 0))
    return float((days or 0) * 86400 + (first or 0) * 3600 + (second or 0) * 60 + (third or 0))


def _node(column: dict[str, str]) -> SlurmNode:
    allocated, _, _, total = (_number(part) for part in f"{column['CPUsState']}///".split("/")[:4])
    reason = column["Reason"] if column["Reason"] not in ("none", "(null)", "") else ""
    return {
        "name": column["NodeHost"],
        "address": column["NodeAddr"] if column["NodeAddr"] != column["NodeHost"] else "",
        "partitions": [column["Partition"].rstrip("*")], "state": column["StateLong"], "reason": reason,
        "cpus": total, "cpus_allocated": allocated, "memory": _number(column["Memory"]) * _MEBIBYTE,
        "memory_allocated": _number(column["AllocMem"]) * _MEBIBYTE, "gpus": gpus(column["Gres"]),
        "gpus_allocated": gpus(column["GresUsed"]),
    }  # fmt: skip


def gpus(gres: str) -> int:
    """How many GPUs there are in Slurm's list of generic resources."""
    return sum(int(match["count"]) for match in _GPU.finditer(gres))


def _number(text: str) -> int:
    match = re.match(r"\d+", text)
    return int(match[0]) if match else 0
