"""The nodes of a Slurm cluster, its partitions, and what is allocated of them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from .commands import table

if TYPE_CHECKING:
    from paceline.node.store.home import Answer, Home, Request

_FIELDS = {
    "NodeHost": 64, "Partition": 64, "StateLong": 24, "CPUsState": 32, "CPUsLoad": 16, "Memory": 20, "AllocMem": 20,
    "FreeMem": 20, "Gres": 256, "GresUsed": 256, "Reason": 128,
}  # fmt: skip
_GPU = re.compile(r"\bgpu(?::(?P<type>[A-Za-z][\w.-]*))?:(?P<count>\d+)")
_MEBIBYTE = 1 << 20


def slurm_nodes(home: Home, request: Request) -> Answer:
    """The nodes, each with its partitions, its state, and its CPUs, memory and GPUs in all and allocated."""
    nodes: dict[str, dict[str, Any]] = {}
    for column in table("sinfo", "--Node", columns=_FIELDS):
        if column["NodeHost"] in nodes:
            nodes[column["NodeHost"]]["partitions"].append(column["Partition"].rstrip("*"))
        else:
            nodes[column["NodeHost"]] = _node(column)
    return {"nodes": [{**node, "partitions": sorted(node["partitions"])} for node in nodes.values()]}


def _node(column: dict[str, str]) -> dict[str, Any]:
    allocated, _, _, total = (_number(part) for part in f"{column['CPUsState']}///".split("/")[:4])
    kind, count = gpus(column["Gres"])
    _, used = gpus(column["GresUsed"])
    memory = _number(column["Memory"]) * _MEBIBYTE
    reason = column["Reason"] if column["Reason"] not in ("none", "(null)", "") else ""
    return {
        "name": column["NodeHost"],
        "partitions": [column["Partition"].rstrip("*")],
        "state": column["StateLong"],
        "reason": reason,
        "cpus": total,
        "cpus_allocated": allocated,
        "memory": memory,
        "memory_allocated": _number(column["AllocMem"]) * _MEBIBYTE,
        "gpu": kind,
        "gpus": count,
        "gpus_allocated": used,
    }


def gpus(gres: str) -> tuple[str, int]:
    """The type of GPU in Slurm's list of generic resources, "" if it has none, and how many there are."""
    matches = list(_GPU.finditer(gres))
    kinds = [match["type"] for match in matches if match["type"]]
    return (kinds[0] if kinds else ""), sum(int(match["count"]) for match in matches)


def _number(text: str) -> int:
    match = re.match(r"\d+", text)
    return int(match[0]) if match else 0
