"""Which hosts a job that is watched leaves out after they have failed."""

from __future__ import annotations

from typing import Any

from paceline.backends.ssh.scaling import Cooldown


def test_each_failure_of_a_host_leaves_it_out_for_twice_as_long_up_to_the_most() -> None:
    hosts: Any = ["a", "b", "c"]
    cooldown = Cooldown([10, 30])
    assert [cooldown.begin("b", 100.0) for _ in range(4)] == [10, 20, 30, 30]  # type: ignore[arg-type]
    assert cooldown.begin("a", 100.0) == 10  # type: ignore[arg-type]
    assert cooldown.remaining(hosts, 1, 105.0) == ["c"]
    assert cooldown.remaining(hosts, 1, 110.0) == ["a", "c"]
    assert cooldown.remaining(hosts, 1, 130.0) == hosts
    # Where too few would be left, those that come back next stay.
    assert cooldown.remaining(hosts, 2, 105.0) == ["a", "c"]
    assert cooldown.remaining(hosts, 3, 105.0) == hosts


def test_without_a_range_a_host_does_not_come_back() -> None:
    hosts: Any = ["a", "b"]
    cooldown = Cooldown([])
    cooldown.begin("a", 1.0)  # type: ignore[arg-type]
    assert cooldown.remaining(hosts, 1, 1e12) == ["b"]
    assert cooldown.remaining(hosts, 2, 1e12) == hosts
