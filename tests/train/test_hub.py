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
        self.held: set[int] = set()
        self.after: dict[int, int] = {}
        self.away: set[int] = set()

    def deliver(self, outbox: list[tuple[int, Message]]) -> None:
        for to, message in outbox:
            for rank in self.told if to == EVERYBODY else [to]:
                self.told[rank].append(message)

    def here(self) -> list[int]:
        return sorted(set(self.told) - self.away)

    @precondition(lambda self: self.here())
    @rule(data=st.data())
    def steps_on(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from(self.here()))
        slowest = min(self.step[other] for other in self.here())
        may = self.step[rank] < self.after.get(rank, 10**9) and self.step[rank] <= slowest + 1
        if rank not in self.held and may:
            self.step[rank] += 1

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
            self.deliver(self.hub.hear(rank, {"do": "at", "step": self.step[rank]}))
        elif message["do"] == "stop":
            self.held.discard(rank)
            self.after[rank] = message["after"]
            assert message["after"] >= self.step[rank], "it has begun a step after the last one"

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
    def all_stop_after_the_same_step(self) -> None:
        assert len(set(self.after.values())) <= 1

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
