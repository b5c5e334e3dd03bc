"""Which nodes may go on without the others; what follows for a job is simulated (tests/simulation)."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from paceline.node.rendezvous.quorum import Membership, Standing

groups = st.lists(st.integers(0, 8), min_size=1, max_size=9, unique=True)


@given(groups, st.data())
def test_of_two_groups_that_cannot_talk_one_at_most_goes_on(members: list[int], data: st.DataObject) -> None:
    ids = tuple(map(str, members))
    membership = Membership(ids, ids[0])
    side = {member: data.draw(st.integers(0, 2)) for member in ids}  # 2: it is dead
    dead = [member for member in ids if side[member] == 2]
    assume(len(dead) < len(ids))
    one, other = ([m for m in ids if side[m] == part] for part in (0, 1))
    known = [[m for m in dead if data.draw(st.booleans())] for _ in range(2)]
    assert not (membership.has_majority(one, known[0]) and membership.has_majority(other, known[1]))


@pytest.mark.parametrize("ids", ["ab", "ba", "abc", "bca", "abcd", "bcda"])
def test_others_that_may_not_go_on_do_not_whatever_they_know(ids: str) -> None:
    """a is alive; each of the others is dead and known to be, or goes on, knows a death, or does neither."""
    membership = Membership(tuple(ids), ids[0])
    found = set()
    for sides in itertools.product("dgkn", repeat=len(ids) - 1):
        side = dict(zip(sorted(ids)[1:], sides, strict=True))
        dead, go, known = ([name for name in side if side[name] == part] for part in "dgk")
        may = Standing(1, 0, True, (membership,), 1.0).others_may_go_on("a", dead)
        does = membership.has_majority(go, [*dead, *known])
        assert may or not does
        found.add((may, does))
    assert (False, False) in found


@pytest.mark.parametrize(
    ("ids", "present", "dead", "goes_on"),
    [
        ("ab", "a", "", True),  # a tie, and the leader is here
        ("ab", "b", "", False),
        ("ab", "b", "a", True),
        ("abc", "a", "", False),
        ("abc", "bc", "", True),
        ("abcd", "cd", "", False),
        ("abcd", "cd", "a", True),
        ("abcd", "ab", "", True),
        ("ab", "c", "ab", True),
    ],
)
def test_who_goes_on(ids: str, present: str, dead: str, goes_on: bool) -> None:
    assert Membership(tuple(ids), "a").has_majority(present, dead) is goes_on
