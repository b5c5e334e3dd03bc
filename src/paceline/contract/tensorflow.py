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


ROLES = "PACELINE_TF_ROLES"  # of a job whose ranks are not all workers


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

    def write_roles(self, placement: Placement, roles: str) -> Variables:
        """The same with a chief as rank 0, and an evaluator as the last rank, which belongs to no cluster.

        Args:
            placement: of the rank.
            roles: `chief`, `evaluator` or both, with a comma between them.

        Raises:
            ContractError: there are other roles, or too few ranks.
        """
        p, asked = placement, {role.strip() for role in roles.split(",")}
        if unknown := asked - {"chief", "evaluator"}:
            raise ContractError(f"{ROLES}={roles}: there is no role {min(unknown)!r}; give chief, evaluator or both")
        if p.world_size <= len(asked):
            raise ContractError(f"{ROLES}={roles} needs {len(asked) + 1} ranks or more, and the job has {p.world_size}")
        first = 1 if "chief" in asked else 0
        end = p.world_size - (1 if "evaluator" in asked else 0)
        cluster = {"chief": p.endpoints[:first]} if first else {}
        task = {"type": "worker", "index": p.rank - first}
        if p.rank < first or p.rank >= end:
            task = {"type": "chief" if p.rank < first else "evaluator", "index": 0}
        config = {"cluster": {**cluster, "worker": p.endpoints[first:end]}, "task": task}
        return {"TF_CONFIG": json.dumps(config), **NO_GRPC_PROXY}

    def read(self, env: Mapping[str, str]) -> Placement | None:
        """The placement of a worker; clusters with a chief or parameter servers are not read."""
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
