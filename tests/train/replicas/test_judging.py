"""In whatever order ranks send what they have, differences are found, named, and nothing else is."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.train.replicas.judging import COLUMNS, Comparisons, compare, sentence, weights

_WORD = (1 << 64) - 1


def _signed(value: int) -> int:
    value &= _WORD
    return value - (1 << 64) if value >> 63 else value


class Ranks:
    """Ranks that send sums and answer questions."""

    def __init__(self, count: int) -> None:
        self.judge = Comparisons(count)
        self.heard: list[dict[str, Any]] = []
        self.parts: dict[tuple[int, Any], Any] = {}

    def sends(self, rank: int, key: tuple[int, int, int], value: str, *, waits: bool = False) -> None:
        self.parts[rank, key] = [("parameter", "weight", (len(value), ord(value), 5))]
        message: Any = {"do": "sum", "key": key, "step": key[2], "sum": value, "waits": waits, "warns": False}
        self.handle(self.judge.receive(rank, message))

    def handle(self, messages: Any) -> None:
        self.heard += messages
        for message in messages:
            if message["do"] == "differ":
                key = tuple(message["key"])
                for rank in sorted(r for r, k in self.parts if k == key):
                    answer: Any = {"do": "parts", "key": key, "parts": self.parts[rank, key]}
                    self.handle(self.judge.receive(rank, answer))

    def told(self, what: str) -> list[dict[str, Any]]:
        return [message for message in self.heard if message["do"] == what]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([1, 2, 4, 8]), min_size=2, max_size=4),
    st.integers(8, 40),
    st.randoms(),
    st.integers(1, 40),
)
def test_ranks_that_compare_at_other_steps_meet_at_the_common_ones(
    every: list[int], steps: int, random: Any, flipped: int
) -> None:
    ranks = Ranks(len(every))
    queues = {rank: [(0, 0, step) for step in range(1, steps + 1) if step % k == 0] for rank, k in enumerate(every)}
    while any(queues.values()):
        rank = random.choice([rank for rank, queue in queues.items() if queue])
        key = queues[rank].pop(0)
        ranks.sends(rank, key, "y" if rank == 0 and key[2] >= flipped else "x")
    common = [step for step in range(1, steps + 1) if step % max(every) == 0]
    equal = [step for step in common if step < flipped]
    assert ranks.judge.equal == len(equal)
    assert ranks.judge.step == max(equal, default=0)
    judged = ranks.told("judged")
    assert len(judged) == (len(equal) < len(common))
    if judged:
        assert f"after step {common[len(equal)]}" in judged[0]["why"]
        assert ("rank 0 differs from the other ranks" in judged[0]["why"]) == (len(every) > 2)
        assert "the parameter weight" in judged[0]["why"]


def test_those_who_wait_are_answered_and_a_rank_that_is_gone_keeps_nobody_waiting() -> None:
    ranks = Ranks(3)
    ranks.sends(0, (0, 1, 0), "x", waits=True)
    ranks.sends(1, (0, 1, 0), "x", waits=True)
    ranks.handle(ranks.judge.gone(0, answers=True))
    assert not ranks.heard
    ranks.handle(ranks.judge.gone(2))
    assert [message["do"] for message in ranks.heard] == ["equal"]


def test_ranks_that_have_left_still_say_what_they_had() -> None:
    ranks = Ranks(3)
    for rank, value in enumerate("xxy"):
        ranks.sends(rank, (0, 1, 0), value, waits=True)
        if rank < 2:
            ranks.handle(ranks.judge.gone(rank, answers=True))
    (judged,) = ranks.told("judged")
    assert "rank 2 differs from the other ranks in the parameter weight" in judged["why"]


def test_a_rank_that_does_not_know_any_more_is_left_out() -> None:
    difference = compare({0: [("number", "lr of SGD", "0.1")], 1: []}, {0: "a", 1: "b"})
    assert (difference.kind, difference.apart) == (None, [0, 1])


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 5), st.data())
def test_the_rank_that_stands_alone_is_named(count: int, data: st.DataObject) -> None:
    alone = data.draw(st.integers(0, count - 1))
    word, bit = data.draw(st.integers(0, COLUMNS - 1)), data.draw(st.integers(0, 63))
    sums = [data.draw(st.integers(-(2**63), 2**63 - 1)) for _ in range(2)]
    changed = [_signed(sums[0] + (1 << bit)), _signed(sums[1] + weights()[word] * (1 << bit))]
    parts = {
        rank: [
            ("number", "lr of SGD", "0.1"), ("parameter", "bias", (1, 2, 3)),
            ("parameter", "weight", (*(changed if rank == alone else sums), 5000)),
        ]
        for rank in range(count)
    }  # fmt: skip
    difference = compare(parts, {})  # type: ignore[arg-type]
    assert difference.apart == ([alone] if count > 2 else [0, 1])
    assert (difference.kind, difference.name, difference.more) == ("parameter", "weight", 0)
    assert difference.in_a_word
    assert "one value of it alone differs, as by a fault of the memory" in sentence(difference, "", 3, begins=False)


def test_causes_are_told_apart() -> None:
    lr = compare({0: [("number", "lr of SGD", "0.1")], 1: [("number", "lr of SGD", "0.01")]}, {})
    line = sentence(lr, "after step 9", 8, begins=False)
    assert line.startswith("ranks 0 and 1 differ in lr of SGD (0.1 on rank 0, 0.01 on rank 1), seen after step 9, ")
    assert "equal after step 8: a scheduler was stepped" in line
    steps = compare({0: [("number", "step of bias", (1, 1, 1))], 1: [("number", "step of bias", (2, 2, 1))]}, {})
    assert "a step was taken, on some ranks only" in sentence(steps, "after step 9", 8, begins=False)
    parts: Any = {rank: [("parameter", "a", (rank, 7, 5)), ("parameter", "b", (rank, 9, 5))] for rank in range(2)}
    both = compare(parts, {})
    assert "in the parameter a and 1 more" in sentence(both, "", None, begins=True)
    assert "only after run.setup, as by reset_parameters()" in sentence(both, "before step 1", None, begins=True)
    assert "gradients that ranks do not exchange" in sentence(both, "after step 1", 0, begins=False)
    state: Any = {rank: [("state", "exp_avg of a", (rank, 7, 5))] for rank in range(2)}
    assert "the optimizer state exp_avg of a" in sentence(compare(state, {}), "", 3, begins=False)
    assert (
        compare({rank: [*state[rank], *parts[rank]] for rank in range(2)}, {}).name == "a"
    )  # the cause, not what follows
    numbers: Any = {rank: [*state[rank], *parts[rank], ("number", "lr", str(rank))] for rank in range(2)}
    assert compare(numbers, {}).name == "lr"
