"""TF_CONFIG with roles."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.contract import ContractError, Placement
from paceline.contract.tensorflow import TensorflowContract


def test_tensorflow_with_a_chief_and_an_evaluator() -> None:
    endpoints = ("a:1", "b:2", "c:3", "d:4")

    def config(rank: int, roles: str) -> dict[str, Any]:
        placement = Placement(rank=rank, world_size=4, node_count=4, node_rank=rank, endpoints=endpoints)
        found: dict[str, Any] = json.loads(TensorflowContract().write_roles(placement, roles)["TF_CONFIG"])
        return found

    whole = {"chief": ["a:1"], "worker": ["b:2", "c:3"]}
    tasks = [("chief", 0), ("worker", 0), ("worker", 1), ("evaluator", 0)]
    assert [config(rank, "chief,evaluator") for rank in range(4)] == [
        {"cluster": whole, "task": {"type": kind, "index": index}} for kind, index in tasks
    ]
    assert config(3, "chief") == {
        "cluster": {"chief": ["a:1"], "worker": ["b:2", "c:3", "d:4"]},
        "task": {"type": "worker", "index": 2},
    }
    assert [config(rank, "chief,ps=2")["task"] for rank in range(4)] == [
        {"type": kind, "index": index} for kind, index in (("chief", 0), ("worker", 0), ("ps", 0), ("ps", 1))
    ]
    assert config(0, "ps=1,evaluator")["cluster"] == {"worker": ["a:1", "b:2"], "ps": ["c:3"]}
    for wrong in ("ps", "master", "chief=1", "ps=x"):
        with pytest.raises(ContractError, match=f"there is no role '{wrong}'; give chief, evaluator or ps=1"):
            config(0, wrong)
    with pytest.raises(ContractError, match="needs 2 ranks or more, and the job has 1"):
        TensorflowContract().write_roles(Placement(), "chief")
