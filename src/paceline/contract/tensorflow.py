"""The variable of TensorFlow's multi-worker strategies: TF_CONFIG.

Source: TensorFlow 2, `tensorflow/python/distribute/cluster_resolver/tfconfig_cluster_resolver.py`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, ClassVar

from .base import Contract, Variables
from .placement import ContractError, Placement
from .values import NO_GRPC_PROXY

if TYPE_CHECKING:
    from collections.abc import Mapping


class TensorflowContract(Contract):
    """TF_CONFIG with workers only: `{"cluster": {"worker": ["host:port", …]}, "task": {"type", "index"}}`."""

    name: ClassVar[str] = "tensorflow"
    carries: ClassVar[frozenset[str]] = frozenset({"rank", "world_size", "endpoints"})

    def write(self, placement: Placement) -> Variables:
        """Every rank as a worker at its endpoint; a single process without one is no cluster."""
        p = placement
        if not p.endpoints and p.world_size > 1:
            raise ContractError(f"tensorflow needs the endpoints of all {p.world_size} workers, and none are known")
        config = {
            "cluster": {"worker": p.endpoints} if p.endpoints else {},
            "task": {"type": "worker", "index": p.rank},
        }
        return {"TF_CONFIG": json.dumps(config), **NO_GRPC_PROXY}

    def read(self, env: Mapping[str, str]) -> Placement | None:
        """The placement of a worker; clusters with a chief or parameter servers are not for paceline to run."""
        if "TF_CONFIG" not in env:
            return None
        try:
            config = json.loads(env["TF_CONFIG"])
            cluster, task = config["cluster"], config["task"]
            kind, index = str(task["type"]), int(task["index"])
            workers = tuple(str(endpoint) for endpoint in cluster.get("worker", ()))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ContractError(
                f"TF_CONFIG={env['TF_CONFIG']!r} does not hold a cluster and a task ({type(error).__name__}: {error})"
            ) from None
        if kind != "worker" or set(cluster) - {"worker"}:
            raise ContractError(f"TF_CONFIG={env['TF_CONFIG']!r} has tasks that are not workers")
        try:
            return Placement(rank=index, world_size=max(1, len(workers)), endpoints=workers)
        except ContractError as error:
            raise ContractError(f"{error} (TF_CONFIG={env['TF_CONFIG']!r})") from None
