"""JAX and TensorFlow meet without a proxy, and are told so only where there is one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.contract import Placement
from paceline.node.ranks.placement import variables
from paceline.node.spec import NodeSpec, Program


@pytest.mark.parametrize(("agent", "given"), [({}, None), ({"HTTPS_PROXY": "http://proxy:3128"}, "")])
@pytest.mark.parametrize("framework", ["jax", "tensorflow"])
def test_the_variable_that_ends_a_proxy_is_set_where_there_is_one(
    framework: str, agent: dict[str, str], given: str | None
) -> None:
    spec = NodeSpec(
        job="it", job_id="1", program=Program("script", "it.py", ()), framework=framework, nproc=2, python=("python3",),
        working_dir="/", env={},
    )  # fmt: skip
    placement = Placement(0, 2, 0, 2, 0, 1, main_address="127.0.0.1", main_port=1, endpoints=("a:1", "a:2"))
    assert variables(spec, placement, agent).get("grpc_proxy") == given
    with_own = replace(spec, env={"http_proxy": "http://proxy:3128"})
    assert variables(with_own, placement, agent)["grpc_proxy"] == ""
