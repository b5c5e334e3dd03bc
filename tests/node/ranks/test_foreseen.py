"""What a dry run says of ranks whose nodes have not connected yet."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from paceline.contract import HOROVOD, ContractError
from paceline.node.ranks.placement import foreseen
from paceline.node.rundir.directory import RunDirectory
from paceline.node.spec import NodeSpec, Program


def test_a_framework_that_needs_equal_nodes_is_foreseen_with_equal_nodes() -> None:
    spec = NodeSpec(
        job="it", job_id="1234", program=Program("script", "train.py"), framework="horovod", nproc=2,
        python=("python3",), working_dir="/", nodes=2, least=2, node_rank=None,
    )  # fmt: skip
    ranks = foreseen(spec, RunDirectory(Path("/run")))
    assert [rank["HOROVOD_LOCAL_SIZE"] for rank in ranks] == ["2", "2"]
    nodes = [{"address": "h1", "slots": 2, "ports": []}, {"address": "h2", "slots": 3, "ports": []}]
    start = {"attempt": 0, "nodes": nodes, "node_rank": 0, "main_address": "h1", "main_port": 1, "job": "it"}
    with pytest.raises(ContractError, match="same number of ranks on every node"):
        foreseen(spec, RunDirectory(Path("/run")), start)
    own = dataclasses.replace(spec, env={**spec.env, HOROVOD: "paceline"})  # needs none
    ranks = foreseen(own, RunDirectory(Path("/run")), start)
    assert [(rank["HOROVOD_SIZE"], "HOROVOD_CROSS_SIZE" in rank) for rank in ranks] == [("5", False)] * 2
