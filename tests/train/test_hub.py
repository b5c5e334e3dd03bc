"""Whatever the ranks say in whatever order, they are told to stop after one step that all of them can reach."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.train.hub import EVERYBODY, Hub

Message = dict[str, Any]


class Ranks(RuleBasedStateMachine):
    """Ranks that step on, hold when they are asked to, stop, leave and fail."""

    @initialize(ranks=st.integers(1, 4))
    def begin(self, ranks: int) -> None:
        self.hub = Hub(ranks)
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
            self.deliver(self.hub.hear(rank, {"do": "at", "step": self.step[rank], "passed": self.passed[rank]}))
        elif message["do"] == "stop":
            self.held.discard(rank)
            self.after[rank] = message["after"], message["late"]
            assert self.after[rank] >= (self.step[rank], self.passed[rank]), "it is past where it is to stop"

    @precondition(lambda self: self.here())
    @rule(data=st.data())
    def is_told_to_stop(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from(self.here()))
        self.deliver(self.hub.hear(rank, {"do": "stop", "signal": 15}))

    @precondition(lambda self: len(self.here()) > 1)
    @rule(data=st.data(), how=st.sampled_from(["left", "failed", "gone"]))
    def goes(self, data: st.DataObject, how: str) -> None:
        rank = data.draw(st.sampled_from(self.here()[1:]))  # the hub is rank 0's own
        self.away.add(rank)
        self.held.discard(rank)
        if how == "gone":
            self.deliver(self.hub.gone(rank))
        else:
            self.deliver(self.hub.hear(rank, {"do": how, "why": "", "count": 0, "step": self.step[rank]}))
            assert self.hub.gone(rank) == []

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


TestHub = Ranks.TestCase
TestHub.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)


def test_ranks_that_meet_wait_for_those_that_stay() -> None:
    hub = Hub(3)
    assert hub.hear(0, {"do": "meet", "number": 1}) == []
    assert hub.hear(1, {"do": "meet", "number": 1}) == []
    assert hub.gone(2)[-1] == (EVERYBODY, {"do": "met", "number": 1})
    assert hub.hear(1, {"do": "meet", "number": 2}) == []
    assert hub.hear(0, {"do": "meet", "number": 2}) == [(EVERYBODY, {"do": "met", "number": 2})]
