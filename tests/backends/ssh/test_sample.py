"""Which routes are tried between many hosts: few, and enough to find what is wrong."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.backends.ssh.preflight import routes_of, together

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = [2, 3, 16, 17, 31, 32, 33, 100, 256, 1000]


def broken(hosts: list[int], works: Callable[[int, int], bool]) -> set[tuple[int, int]]:
    return {(a, b) for a, others in routes_of(hosts).items() for b in others if not works(a, b)}


@pytest.mark.parametrize("count", SIZES)
def test_each_interface_is_used_both_ways_by_several_others(count: int) -> None:
    tried = routes_of(list(range(count)))
    assert all(host not in others and len(set(others)) == len(others) for host, others in tried.items())
    needed = min(4, count - 1)
    assert min(len(others) for others in tried.values()) >= needed
    assert min(sum(host in others for others in tried.values()) for host in tried) >= needed
    assert all(0 in others for host, others in tried.items() if host != 0), "nodes meet at the first one"


def test_connections_grow_with_the_hosts_not_with_their_square() -> None:
    assert sum(map(len, routes_of(list(range(16))).values())) == 16 * 15
    assert sum(map(len, routes_of(list(range(256))).values())) < 256 * 9
    assert sum(map(len, routes_of(list(range(1000))).values())) < 1000 * 11


@pytest.mark.parametrize("count", [17, 200])
def test_a_wrong_interface_of_any_host_is_found_and_costs_that_host_alone(count: int) -> None:
    hosts = list(range(count))
    for wrong in hosts[:: max(1, count // 25)]:
        for one_way in (lambda a, b, it=wrong: b != it, lambda a, b, it=wrong: a != it):
            found = broken(hosts, one_way)
            assert together(hosts, routes_of(hosts), found) == [host for host in hosts if host != wrong]


@pytest.mark.parametrize("count", [16, 17, 100])
def test_of_groups_that_do_not_reach_each_other_the_largest_remains(count: int) -> None:
    rng = random.Random(count)
    for _ in range(20):
        hosts = list(range(count))
        others = set(rng.sample(hosts, count // 3))
        found = broken(hosts, lambda a, b, apart=others: (a in apart) == (b in apart))
        assert found
        remaining = together(hosts, routes_of(hosts), found)
        assert len(remaining) >= count // 2
        assert others.isdisjoint(remaining)


def test_several_wrong_hosts_are_removed_and_no_others() -> None:
    hosts = list(range(300))
    wrong = {0, 1, 2, 50, 51, 150, 299}
    found = broken(hosts, lambda a, b: a not in wrong and b not in wrong)
    assert together(hosts, routes_of(hosts), found) == [host for host in hosts if host not in wrong]


@given(st.integers(0, 40), st.randoms(use_true_random=False))
def test_hosts_that_are_put_together_reach_each_other(count: int, chance: random.Random) -> None:
    hosts = list(range(count))
    share = chance.choice([0.0, 0.02, 0.2])
    found = broken(hosts, lambda a, b: chance.random() >= share)
    left = together(hosts, routes_of(hosts), found)
    assert not any(a in left and b in left for a, b in found)
    assert left == [host for host in hosts if host in left]
    assert left or not hosts
    assert found or left == hosts
