"""Every contract gives back what it carries, for any job on any nodes."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from paceline.contract import CONTRACTS, OWN_CONTRACT, Contract, ContractError, Placement
from paceline.contract.horovod import HorovodContract
from paceline.contract.jax import JaxContract

HOSTS = st.from_regex(r"[a-z][a-z0-9]{0,8}(-[0-9]{1,2})?(\.[a-z]{2,5})?", fullmatch=True) | st.ip_addresses(v=4).map(
    str
)
PORTS = st.integers(1, 65535)
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,20}", fullmatch=True)


@st.composite
def placements(draw: st.DrawFn, even: bool = False) -> Placement:
    nodes = draw(st.integers(1, 5))
    ranks_on = [draw(st.integers(1, 8))] * nodes if even else draw(st.lists(st.integers(1, 8), min_size=1, max_size=5))
    node = draw(st.integers(0, len(ranks_on) - 1))
    local_rank = draw(st.integers(0, ranks_on[node] - 1))
    world_size = sum(ranks_on)
    addresses = st.tuples(HOSTS, PORTS).map(lambda address: f"{address[0]}:{address[1]}")
    return Placement(
        rank=sum(ranks_on[:node]) + local_rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=ranks_on[node],
        node_rank=node,
        node_count=len(ranks_on),
        main_address=draw(HOSTS),
        main_port=draw(PORTS),
        devices=tuple(draw(st.lists(st.from_regex(r"[0-9]|GPU-[0-9a-f]{4}", fullmatch=True), max_size=2))),
        attempt=draw(st.integers(0, 9)),
        job=draw(NAMES),
        endpoints=tuple(draw(st.lists(addresses, min_size=world_size, max_size=world_size))),
    )


def check(contract: Contract, placement: Placement) -> None:
    found = contract.read(contract.write(placement))
    assert found is not None
    for field in fields(Placement):
        if field.name in contract.carries:
            assert getattr(found, field.name) == getattr(placement, field.name), field.name
        elif (contract.name, field.name) != ("slurm", "main_port"):  # follows from the job's number
            assert getattr(found, field.name) == field.default, field.name


@given(placement=placements())
def test_any_placement(placement: Placement) -> None:
    for name in sorted(set(CONTRACTS) - {"horovod"}):
        note(name)
        check(CONTRACTS[name], placement)
    assert OWN_CONTRACT.read(OWN_CONTRACT.write(placement)) == placement, "own variables carry everything"
    written = HorovodContract().write_on_any_nodes(placement)
    assert (written["HOROVOD_RANK"], written["HOROVOD_SIZE"]) == (str(placement.rank), str(placement.world_size))
    assert not any("CROSS" in name for name in written), "on any nodes there is no cross rank"


@given(placement=placements(even=True))
def test_horovod_on_equal_nodes(placement: Placement) -> None:
    check(CONTRACTS["horovod"], placement)


def test_horovod_refuses_unequal_nodes() -> None:
    with pytest.raises(ContractError, match="same number of ranks on every node, but this node has 3 of 4"):
        CONTRACTS["horovod"].write(Placement(world_size=4, local_world_size=3, node_count=2))


@pytest.mark.parametrize("contract", [*CONTRACTS.values(), OWN_CONTRACT], ids=lambda c: c.name)
def test_one_process_needs_no_endpoints_and_a_strange_environment_is_no_placement(contract: Contract) -> None:
    check(contract, Placement())
    assert contract.read({"PATH": "/bin"}) is None


@pytest.mark.parametrize("name", ["paddle", "tensorflow"])
def test_frameworks_that_need_endpoints_say_so(name: str) -> None:
    with pytest.raises(ContractError, match=f"{name} needs the endpoints of all 2"):
        CONTRACTS[name].write(Placement(world_size=2, local_world_size=2))


def test_jax_puts_an_ipv6_coordinator_in_brackets() -> None:
    variables = JaxContract().write(Placement(main_address="fd00::1"))
    assert variables["JAX_COORDINATOR_ADDRESS"] == "[fd00::1]:29500"
    check(JaxContract(), Placement(main_address="fd00::1"))


def test_paddle_uses_gloo_without_devices_and_no_proxy() -> None:
    paddle = CONTRACTS["paddle"]
    assert paddle.write(Placement())["PADDLE_DISTRI_BACKEND"] == "gloo"
    assert "PADDLE_DISTRI_BACKEND" not in paddle.write(Placement(devices=("0",)))
    assert {"http_proxy", "https_proxy"} < set(paddle.unsets)
