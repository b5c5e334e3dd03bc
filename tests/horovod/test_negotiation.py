"""The coordinator's part: what is ready, in whatever order it was submitted."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.horovod.engine.negotiation import AVERAGE, MAX, SUM, Negotiator, Request, Response, numbers_of


def allreduce(name: str, shape: tuple[int, ...] = (2,), dtype: str = "float32", op: int = SUM) -> Request:
    return Request("allreduce", name, 0, (("float32" if dtype is None else dtype, shape),), op)


class Rank:
    """A rank that submits each name once at a time, by its number where it knows one."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.known: dict[str, tuple[int, Request]] = {}
        self.named: dict[int, str] = {}
        self.open: dict[str, Request] = {}

    def submit(self, negotiator: Negotiator, requests: list[Request]) -> None:
        mask, full = 0, []
        for request in requests:
            self.open[request.name] = request
            number, same = self.known.get(request.name, (-1, None))
            if same == request:
                mask |= 1 << number
            else:
                full.append(request)
        negotiator.receive(self.number, mask, full)

    def take(self, mask: int, responses: list[Response]) -> list[tuple[str, str]]:
        done = []
        for number in numbers_of(mask):
            name = self.named[number]
            del self.open[name]
            done.append((name, ""))
        for response in responses:
            name = response.request.name
            if response.evicted >= 0:
                self.known.pop(self.named.pop(response.evicted))
            if response.number >= 0:
                self.named[response.number] = name
                self.known[name] = response.number, self.open[name]
            del self.open[name]
            done.append((name, response.error))
        return done


@given(seed=st.integers(0, 2**32), size=st.integers(1, 4), capacity=st.sampled_from([0, 3, 100]))
def test_every_operation_is_answered_once_in_one_order(seed: int, size: int, capacity: int) -> None:
    """Ranks submit the same names in orders of their own, in parts, over several steps; some change their shapes."""
    draw = random.Random(seed)
    negotiator = Negotiator(size, capacity)
    ranks = [Rank(number) for number in range(size)]
    names = [f"t{index}" for index in range(draw.randrange(1, 8))]
    for _ in range(4):
        shapes = {name: (draw.randrange(1, 3),) for name in names}
        wrong = {name for name in names if size > 1 and draw.random() < 0.2}
        left = []
        for rank in ranks:
            mine = [
                allreduce(name, (7,) if name in wrong and rank.number == size - 1 else shapes[name]) for name in names
            ]
            draw.shuffle(mine)
            left.append(mine)
        answered: list[list[tuple[str, str]]] = [[] for _ in ranks]
        while any(left):
            rank = draw.choice([rank for rank in ranks if left[rank.number]])
            part, left[rank.number] = left[rank.number][:2], left[rank.number][2:]
            rank.submit(negotiator, part)
            mask, responses = negotiator.responses()
            for each in ranks:
                answered[each.number] += each.take(mask, responses)
        assert all(one == answered[0] for one in answered)
        assert sorted(name for name, _ in answered[0]) == sorted(names)
        assert {name for name, error in answered[0] if error} == wrong
        assert negotiator.is_idle


def test_a_known_operation_is_submitted_and_answered_as_one_bit() -> None:
    negotiator = Negotiator(2)
    for rank in (0, 1):
        negotiator.receive(rank, 0, [allreduce("a"), allreduce("b")])
    _, responses = negotiator.responses()
    both = sum(1 << response.number for response in responses)
    negotiator.receive(0, both, [])
    assert negotiator.responses() == (0, [])
    negotiator.receive(1, both, [])
    assert negotiator.responses() == (both, [])


def test_joined_ranks_count_as_ready_and_the_last_one_is_named() -> None:
    negotiator = Negotiator(3)
    negotiator.receive(1, 0, [Request("join", "join")])
    for rank in (0, 2):
        negotiator.receive(rank, 0, [allreduce("a", op=AVERAGE), allreduce("m", op=MAX)])
    _, (mean, most) = negotiator.responses()
    assert not mean.error
    assert "Allreduce with op Max is not supported with Join at this time: ranks [1] have joined" in most.error
    negotiator.receive(2, 0, [Request("join", "join")])
    negotiator.receive(0, 0, [Request("join", "join")])
    _, (joined,) = negotiator.responses()
    assert joined.value == 0
    assert negotiator.is_idle


def test_what_waits_names_the_missing_ranks() -> None:
    negotiator = Negotiator(3)
    negotiator.receive(1, 0, [allreduce("a")])
    assert [(name, missing) for name, _, missing in negotiator.waiting(0.0)] == [("allreduce.a", [0, 2])]


def test_alike_operations_are_fused_up_to_the_threshold() -> None:
    from paceline.horovod.engine.fusion import batches  # imports torch

    kinds = [allreduce(f"t{i}", (4,), "float64" if i == 2 else "float32") for i in range(5)]
    made = batches([Response(kind) for kind in kinds], 40)
    assert [[response.request.name for response in batch] for batch in made] == [
        ["t0", "t1"],
        ["t2"],
        ["t3", "t4"],
    ]


@pytest.mark.parametrize("other", [{"op": MAX}, {"prescale": 2.0}, {"postscale": 2.0}, {"process_set": 1}])
def test_operations_that_are_not_alike_are_not_fused(other: dict[str, Any]) -> None:
    from paceline.horovod.engine.fusion import batches  # imports torch

    kinds = [allreduce("t0"), allreduce("t1")._replace(**other), allreduce("t2")]
    made = batches([Response(kind) for kind in kinds], 1 << 20)
    assert [[response.request.name for response in batch] for batch in made] == [["t0", "t2"], ["t1"]]
