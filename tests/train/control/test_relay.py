"""Whatever the ranks say in whatever order, they are told to stop after one step that all of them can reach."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.train.collective_trace import LateRanks, Trace, difference
from paceline.train.control.relay import EVERYBODY, Relay

Message = dict[str, Any]


class Ranks(RuleBasedStateMachine):
    """Ranks that step on, hold when they are asked to, stop, leave and fail."""

    @initialize(ranks=st.integers(1, 4))
    def begin(self, ranks: int) -> None:
        self.relay = Relay(ranks)
        self.told: dict[int, list[Message]] = {rank: [] for rank in range(ranks)}
        self.heard = dict.fromkeys(range(ranks), 0)  # how many of these messages a rank has read
        self.step = dict.fromkeys(range(ranks), 0)
        self.passed = dict.fromkeys(range(ranks), True)  # whether it has passed the end of that step
        self.stopped: dict[int, tuple[int, bool]] = {}
        self.held: set[int] = set()
        self.after: dict[int, tuple[int, bool]] = {}
        self.away: set[int] = set()

    def deliver(self, outbox: list[tuple[int, Message]]) -> None:
        for to, message in outbox:
            for rank in self.told if to == EVERYBODY else [to]:
                self.told[rank].append(message)

    def here(self) -> list[int]:
        return sorted(set(self.told) - self.away)

    @precondition(lambda self: self.here())
    @rule(data=st.data())
    def moves_on(self, data: st.DataObject) -> None:
        """As `Watch.begin` and `Watch.is_to_stop` let it."""
        rank = data.draw(st.sampled_from(self.here()))
        if rank in self.held or rank in self.stopped:
            return
        step, stop = self.step[rank], self.after.get(rank)
        if self.passed[rank]:
            slowest = min(self.step[other] for other in self.here())
            if stop is not None and step + 1 > stop[0]:
                self.stopped[rank] = (step, True)
            elif step <= slowest:  # the exchange of gradients holds it back
                self.step[rank], self.passed[rank] = step + 1, False
        elif stop is not None and (step, not stop[1]) > (stop[0], False):
            self.stopped[rank] = (step, False)
        else:
            self.passed[rank] = True

    @precondition(lambda self: self.here())
    @rule(data=st.data())
    def reads(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from(self.here()))
        if self.heard[rank] == len(self.told[rank]):
            return
        message = self.told[rank][self.heard[rank]]
        self.heard[rank] += 1
        if message["do"] == "hold":
            self.held.add(rank)
            self.deliver(self.relay.receive(rank, {"do": "at", "step": self.step[rank], "passed": self.passed[rank]}))
        elif message["do"] == "stop":
            self.held.discard(rank)
            self.after[rank] = message["after"], message["late"]
            assert self.after[rank] >= (self.step[rank], self.passed[rank]), "it is past where it is to stop"

    @precondition(lambda self: self.here())
    @rule(data=st.data())
    def is_told_to_stop(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from(self.here()))
        self.deliver(self.relay.receive(rank, {"do": "stop", "signal": 15}))

    @precondition(lambda self: len(self.here()) > 1)
    @rule(data=st.data(), how=st.sampled_from(["left", "failed", "gone"]))
    def goes(self, data: st.DataObject, how: str) -> None:
        rank = data.draw(st.sampled_from(self.here()[1:]))  # the relay is rank 0's own
        self.away.add(rank)
        self.held.discard(rank)
        if how == "gone":
            self.deliver(self.relay.disconnected(rank))
        else:
            self.deliver(
                self.relay.receive(rank, {"do": how, "why": "", "count": 0, "step": self.step[rank], "place": {}})
            )
            assert self.relay.disconnected(rank) == []

    @invariant()
    def all_stop_at_the_same_place(self) -> None:
        assert len(set(self.after.values())) <= 1
        assert len(set(self.stopped.values())) <= 1

    @invariant()
    def nobody_is_held_for_ever(self) -> None:
        read_all = all(self.heard[rank] == len(self.told[rank]) for rank in self.here())
        if self.here() and read_all:
            assert not self.held, "all have answered, and nobody has decided"

    @invariant()
    def who_stays_hears_of_every_loss(self) -> None:
        for rank in self.here():
            lost = {m["rank"] for m in self.told[rank] if m["do"] in ("lost", "left")}
            assert lost == self.away


TestRelay = Ranks.TestCase
TestRelay.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)


def test_ranks_that_meet_wait_for_those_that_stay() -> None:
    relay = Relay(3)
    assert relay.receive(0, {"do": "meet", "number": 1}) == []
    assert relay.receive(1, {"do": "meet", "number": 1}) == []
    assert relay.disconnected(2)[-1] == (EVERYBODY, {"do": "met", "number": 1})
    assert relay.receive(1, {"do": "meet", "number": 2}) == []
    assert relay.receive(0, {"do": "meet", "number": 2}) == [(EVERYBODY, {"do": "met", "number": 2})]


COLLECTIVES = st.lists(st.sampled_from(["barrier", "mean", "save"]), max_size=8)


def place(entered: list[str], seconds: float | None, *, failed: bool = False, remembered: int = 100) -> Message:
    """As `Trace.place` gives it, of a rank that is inside of the last collective unless `seconds` is None."""
    recent, total = [], 0
    for number, name in enumerate(entered, 1):
        total = zlib.crc32(name.encode(), total)
        recent.append([name, f"train.py:{number}", total])
    return {
        "number": len(entered), "seconds": seconds, "failed": failed, "line": "train.py:99",
        "recent": recent[-remembered:],
    }  # fmt: skip


def asked(relay: Relay, answers: dict[int, Message]) -> list[tuple[int, Message]]:
    """A rank asks where all are, and all answer, in this order."""
    ((to, question),) = relay.receive(0, {"do": "ask"})
    assert (to, question["do"]) == (EVERYBODY, "where")
    told = []
    for rank, answer in answers.items():
        assert told == []
        told = relay.receive(rank, {"do": "here", "round": question["round"], "place": answer})
    return told


@given(COLLECTIVES, st.data())
def test_ranks_that_call_the_same_collectives_are_never_blamed(script: list[str], data: st.DataObject) -> None:
    """For any place and waiting time of each rank, and any rank whose collective has failed."""
    answers = {}
    for rank in data.draw(st.permutations(range(3))):
        entered = script[: data.draw(st.integers(0, len(script)))]
        seconds = data.draw(st.sampled_from([None, 0.5, 1000.0])) if entered else None
        answers[rank] = place(
            entered, seconds, failed=data.draw(st.booleans()), remembered=data.draw(st.integers(1, 9))
        )
    assert "mismatch" not in [message["do"] for _, message in asked(Relay(3), answers)]


@given(COLLECTIVES, COLLECTIVES, COLLECTIVES, st.permutations(range(3)))
def test_ranks_that_wait_in_different_collectives_hear_of_the_first(
    common: list[str], rest: list[str], other: list[str], order: list[int]
) -> None:
    sequences = [*common, "all_reduce", *rest], [*common, "broadcast", *other]
    answers = {rank: place(sequences[rank == 1], 60.0) for rank in order}
    why = f"rank 0 entered all_reduce (train.py:{len(common) + 1}) while rank 1 entered broadcast (train.py:"
    assert asked(Relay(3), answers) == [(EVERYBODY, {"do": "mismatch", "why": f"{why}{len(common) + 1})"})]


@given(COLLECTIVES, COLLECTIVES, st.sampled_from([None, 0.5]))
def test_as_long_as_a_rank_moves_it_may_still_come(one: list[str], other: list[str], seconds: float | None) -> None:
    answers = {0: place(["barrier", *one], 60.0), 1: place(["mean", *other], seconds)}
    assert "mismatch" not in [message["do"] for _, message in asked(Relay(2), answers)]
    answers = {0: place(["barrier", *one], 60.0, failed=True), 1: place(["mean", *other], seconds)}
    assert "mismatch" in [message["do"] for _, message in asked(Relay(2), answers)], "a failure is not undone"


def test_ranks_that_differed_long_ago() -> None:
    one, other = place(["barrier", "mean", "mean"], 9.0, remembered=1), place(["save", "mean", "mean", "mean"], 9.0)
    assert difference(one, other) == ("entered mean (train.py:3)", "entered mean (train.py:4)")
    far = place(["mean"] * 9, 9.0, remembered=1)
    assert difference(one, far) is None, "nobody remembers"


def test_a_rank_that_left_is_compared_with_those_that_wait() -> None:
    relay = Relay(2)
    relay.receive(1, {"do": "left", "count": 2, "step": 0, "place": place(["mean", "close"], None)})
    why = "rank 0 entered save (train.py:1) while rank 1 entered mean (train.py:1)"
    assert asked(relay, {0: place(["save", "mean"], 9.0)}) == [(EVERYBODY, {"do": "mismatch", "why": why})]


def test_the_one_that_waits_is_sent_whom_it_waits_for() -> None:
    relay = Relay(3)
    answers = {0: place(["mean", "barrier"], 9.0), 1: place(["mean"], None), 2: place(["mean", "barrier"], 9.0)}
    assert asked(relay, answers) == [(0, {"do": "late", "ranks": [(1, "train.py:99")]})]
    assert asked(relay, dict.fromkeys(range(3), answers[0])) == [], "all have come"


def test_rank_zero_is_sent_whom_another_rank_waits_for() -> None:
    """What it prints is what people see."""
    waits = place(["mean", "barrier"], 34.0)
    late = [(0, "train.py:99")]
    assert asked(Relay(2), {0: place(["mean"], None), 1: waits}) == [
        (1, {"do": "late", "ranks": late}),
        (0, {"do": "late", "ranks": late, "rank": 1, "place": waits}),
    ]


def test_a_warning_about_a_rank_that_waits_for_this_one(caplog: pytest.LogCaptureFixture) -> None:
    waits = place(["mean", "barrier"], 34.0)
    late = LateRanks(Trace())
    for _ in range(2):  # it says so once
        late.warn([(0, "train.py:99"), (2, None)], 1, waits)
    (line,) = caplog.messages
    where = waits["recent"][-1][1]
    assert line == (
        f"rank 1 has been waiting 34 s for rank 0 and 1 more, which has not entered barrier ({where}); "
        "it is at train.py:99"
    )


def test_a_rank_that_does_not_answer_is_named() -> None:
    relay = Relay(3)
    (first,) = relay.receive(1, {"do": "ask"})
    assert relay.receive(2, {"do": "ask"}) == [], "it will hear the question that is on its way"
    for rank in (1, 2):
        assert relay.receive(rank, {"do": "here", "round": first[1]["round"], "place": place(["mean"], 9.0)}) == []
    late, again = relay.receive(1, {"do": "ask"})
    assert late == (1, {"do": "late", "ranks": [(0, None)]})
    assert relay.receive(0, {"do": "here", "round": first[1]["round"], "place": place(["save"], 9.0)}) == [], "old news"
    assert again[1]["do"] == "where"
    assert relay.disconnected(0)[0][1]["do"] == "lost"


def test_one_that_asks_why_a_collective_has_failed_is_answered() -> None:
    answers = {0: place(["mean"], 0.1, failed=True), 1: place(["mean"], 9.0)}
    assert asked(Relay(2), answers) == [(0, {"do": "alike"})]
