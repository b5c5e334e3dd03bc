"""Slurm's notations, and which processes of a job are its tasks."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.contract import CONTRACTS, ContractError, Placement
from paceline.contract.slurm import agreed_port, expand_hosts, tasks_per_node

SLURM = CONTRACTS["slurm"]


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n[01-03,7],other", ["n01", "n02", "n03", "n7", "other"]),
        ("one", ["one"]),
        ("a,b-1.lab", ["a", "b-1.lab"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("r[1-2]n[1,3]-ib", ["r1n1-ib", "r1n3-ib", "r2n1-ib", "r2n3-ib"]),
    ],
)
def test_expand_hosts(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", "n[", "n]", "n[]", "n[a]", "n[1-]", "n[3-1]", "n[[1]]", "a,,b", ",a", "a,"])
def test_expand_hosts_refuses(text: str) -> None:
    with pytest.raises(ContractError):
        expand_hosts(text)


@st.composite
def compressed(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A node list and, worked out beside it, its hosts."""
    texts, hosts = [], []
    for prefix in draw(
        st.lists(st.from_regex(r"[a-z]([a-z0-9.-]{0,5}[a-z])?", fullmatch=True), min_size=1, max_size=4)
    ):
        width = draw(st.integers(0, 4))
        ranges = draw(st.lists(st.tuples(st.integers(0, 999), st.integers(0, 20)), max_size=3))
        inside = []
        for low, more in ranges:
            inside.append(f"{low:0{width}}-{low + more:0{width}}" if more else f"{low:0{width}}")
            hosts += [f"{prefix}{number:0{width}}" for number in range(low, low + more + 1)]
        hosts += [] if ranges else [prefix]
        texts.append(f"{prefix}[{','.join(inside)}]" if ranges else prefix)
    return ",".join(texts), hosts


@given(compressed())
def test_expand_any_hosts(case: tuple[str, list[str]]) -> None:
    text, hosts = case
    assert expand_hosts(text) == hosts
    assert expand_hosts(",".join(hosts)) == hosts


@given(st.text(alphabet="n0123[]-,x", max_size=12))
def test_expand_hosts_never_fails_in_another_way(text: str) -> None:
    with contextlib.suppress(ContractError):
        hosts = expand_hosts(text)
        assert hosts
        assert all("[" not in host for host in hosts)


def test_tasks_per_node() -> None:
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(1, 9)), min_size=1))
def test_any_tasks_per_node(groups: list[tuple[int, int]]) -> None:
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in groups)
    assert tasks_per_node(text) == [count for count, times in groups for _ in range(times)]


def test_the_port_is_the_same_everywhere_and_another_for_each_step() -> None:
    assert agreed_port("200505") == agreed_port("200505", "0") == 32053
    ports = {agreed_port(str(job), str(step)) for job in range(20) for step in range(5)}
    assert len(ports) > 90
    assert all(20000 <= port <= 60000 for port in ports)


def test_a_step_may_be_smaller_than_its_job() -> None:
    env = {
        "SLURM_JOB_ID": "42",
        "SLURM_JOB_NODELIST": "n[1-4]",
        "SLURM_NNODES": "4",
        "SLURM_NTASKS": "8",
        "SLURM_TASKS_PER_NODE": "2(x4)",
        "SLURM_STEP_ID": "3",
        "SLURM_STEP_NODELIST": "n[3-4]",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "1",
    }
    assert SLURM.read(env) == Placement(
        rank=1,
        world_size=2,
        node_rank=1,
        node_count=2,
        main_address="n3",
        main_port=agreed_port("42", "3"),
        job="42",
    )


@pytest.mark.parametrize("step", [None, "batch", "extern", "interactive", "4294967290", "4294967291", "4294967292"])
def test_a_batch_script_is_no_task(step: str | None) -> None:
    env = {**SLURM.write(Placement(world_size=8, local_world_size=8)), "SLURM_STEP_ID": step}
    assert SLURM.read({name: text for name, text in env.items() if text is not None}) is None
