"""The coordinator's promises hold in whatever order messages come and nodes vanish."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.tiers import examples

from paceline.contract import RESUME_CODE
from paceline.node.failure import culprit
from paceline.node.journal.status import Failure
from paceline.node.rendezvous.coordinator import FINISHED, GATHERING, HALTING, RUNNING, Coordinator

Message = dict[str, Any]
PORTS = {"main_port": 1, "ports": []}


def join(nodes: int, peer: int = 0, **changes: Any) -> Message:
    return {
        "do": "join", "id": f"n{peer}", "node_rank": None, "nodes": [nodes, nodes], "slots": 2, "host": "h",
        "address": "10.0.0.1", "listen": 0, "job": "j", "main_port": 1234, "ports": [], "version": "1",
        "standing": None, "former": None, **changes,
    }  # fmt: skip


def rank_of(peer: int, start: Message) -> int:
    """The place of a node that has joined as `n{peer}`."""
    return [node["id"] for node in start["nodes"]].index(f"n{peer}")


def failed(rank: int, age: float, symptom: bool = False) -> Failure:
    return Failure(
        rank=rank, node=0, host="h", pid=1, exit_code=rank + 1, signal="", oom=False, message=f"rank {rank}",
        traceback="", has_traceback=False, log="", symptom=symptom, ended=0.0, age=age, collectives="barrier 7",
    )  # fmt: skip


class Job(RuleBasedStateMachine):
    """Plays the nodes of a job against the coordinator, and checks the messages that each of them gets."""

    @initialize(nodes=st.integers(1, 4), restarts=st.integers(0, 2))
    def begin(self, nodes: int, restarts: int) -> None:
        self.coordinator = Coordinator(nodes, nodes, restarts)
        self.nodes = nodes
        self.told: dict[int, list[Message]] = {peer: [] for peer in range(nodes)}
        self.joined: set[int] = set()
        self.agreeing: set[int] = set()  # peers that were told of an attempt
        self.running: set[int] = set()  # peers whose ranks run
        self.preempted: set[int] = set()  # peers whose ranks have saved their state and ended
        self.halting: set[int] = set()  # peers that were told to halt and have not answered

    def deliver(self, outbox: list[tuple[int, Message]]) -> None:
        for peer, message in outbox:
            self.told[peer].append(message)
            if message["do"] == "start":
                self.agreeing.add(peer)
            elif message["do"] == "go":
                self.agreeing.discard(peer)
                self.running.add(peer)
                self.preempted.discard(peer)
            elif message["do"] == "halt":
                self.agreeing.discard(peer)
                self.halting.add(peer)

    @precondition(lambda self: self.agreeing)
    @rule(data=st.data())
    def a_node_agrees(self, data: st.DataObject) -> None:
        peer = data.draw(st.sampled_from(sorted(self.agreeing)))
        self.deliver(self.coordinator.receive(peer, {"do": "ready"}))

    @precondition(lambda self: len(self.joined) < self.nodes and self.coordinator.phase == GATHERING)
    @rule()
    def another_joins(self) -> None:
        peer = min(set(range(self.nodes)) - self.joined)
        self.joined.add(peer)
        self.deliver(self.coordinator.receive(peer, join(self.nodes, peer)))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), what=st.sampled_from(["failed", "done", "over"]))
    def ranks_end(self, data: st.DataObject, what: str) -> None:
        peer = data.draw(st.sampled_from(sorted(self.running)))
        self.deliver(self.coordinator.receive(peer, {"do": what}))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), final=st.booleans())
    def ranks_have_saved_their_state(self, data: st.DataObject, final: bool) -> None:
        peer = data.draw(st.sampled_from(sorted(self.running)))
        self.preempted.add(peer)
        self.deliver(self.coordinator.receive(peer, {"do": "preempted", "final": final}))

    @precondition(lambda self: self.halting)
    @rule(data=st.data())
    def ranks_are_stopped(self, data: st.DataObject) -> None:
        peer = data.draw(st.sampled_from(sorted(self.halting)))
        self.halting.discard(peer)
        self.running.discard(peer)
        failures = [] if peer in self.preempted else [failed(peer, 1.0)]
        self.deliver(
            self.coordinator.receive(peer, {"do": "stopped", "failures": failures, "main_port": 4321, "ports": []})
        )

    @precondition(lambda self: self.joined)
    @rule(data=st.data())
    def somebody_stops(self, data: st.DataObject) -> None:
        peer = data.draw(st.sampled_from(sorted(self.joined)))
        self.deliver(self.coordinator.receive(peer, {"do": "stop", "signal": 15}))

    @precondition(lambda self: len(self.joined) > 1)
    @rule(data=st.data())
    def a_node_vanishes(self, data: st.DataObject) -> None:
        peer = data.draw(st.sampled_from(sorted(self.joined - {0})))
        self.joined.discard(peer)
        self.agreeing.discard(peer)
        self.running.discard(peer)
        self.halting.discard(peer)
        self.told[peer] = []
        self.deliver(self.coordinator.lost(peer))

    @invariant()
    def no_attempt_starts_while_ranks_of_another_run(self) -> None:
        for messages in self.told.values():
            starts = [m["attempt"] for m in messages if m["do"] == "start"]
            assert starts == list(range(starts[0], starts[0] + len(starts))) if starts else True
            failures = [m for m in messages if m["do"] == "restart" and m["failure"] is not None]
            assert len(failures) <= self.coordinator.max_restarts

    @invariant()
    def everybody_hears_the_same_end_once(self) -> None:
        ends = [[m for m in self.told[peer] if m["do"] == "finish"] for peer in self.joined]
        assert all(len(end) <= 1 for end in ends)
        if self.coordinator.phase == FINISHED and self.joined:
            assert all(len(end) == 1 for end in ends)
            assert len({(end[0]["state"], end[0]["exit_code"]) for end in ends}) == 1

    @invariant()
    def it_never_waits_for_nobody(self) -> None:
        if self.coordinator.phase == HALTING:
            assert self.halting, "nobody is left who could answer"
        if self.coordinator.phase == RUNNING:
            assert self.running

    @invariant()
    def node_ranks_are_given_once_each(self) -> None:
        starts = {peer: [m for m in self.told[peer] if m["do"] == "start"] for peer in self.joined}
        for attempt in {m["attempt"] for told in starts.values() for m in told}:
            ranks = [rank_of(peer, m) for peer, told in starts.items() for m in told if m["attempt"] == attempt]
            assert len(ranks) == len(set(ranks))


TestJob = pytest.mark.soak(Job.TestCase)
TestJob.settings = settings(max_examples=examples(60, 2000), stateful_step_count=25, deadline=None)


@given(asked=st.permutations(range(4)), silent=st.sets(st.integers(0, 3)))
def test_nodes_get_the_ranks_they_ask_for(asked: list[int], silent: set[int]) -> None:
    coordinator = Coordinator(4, 4, 0)
    outbox = []
    for peer in range(4):
        wanted = None if peer in silent else asked[peer]
        outbox = coordinator.receive(peer, join(4, peer, node_rank=wanted))
    given_ranks = {peer: rank_of(peer, message) for peer, message in outbox}
    assert sorted(given_ranks.values()) == [0, 1, 2, 3]
    assert all(given_ranks[peer] == asked[peer] for peer in range(4) if peer not in silent)


def test_those_who_do_not_fit_are_refused() -> None:
    coordinator = Coordinator(3, 3, 0)
    assert coordinator.receive(0, join(3, node_rank=0)) == []
    assert coordinator.receive(4, join(3, node_rank=1)) == []
    for peer, changes, why in (
        (1, {"node_rank": 1}, "two machines call themselves node 1, h and h; give each its own --node-rank"),
        (2, {"version": "2"}, "this node has paceline 2, h has 1"),
        (3, {"nodes": [4, 4]}, "this node was started with --nnodes 4, node 0 with --nnodes 3"),
    ):
        ((to, message),) = coordinator.receive(peer, {**join(3, peer), **changes})
        assert (to, message["do"]) == (peer, "refuse")
        assert why in message["why"]


def test_two_first_nodes_do_not_wait_for_each_other() -> None:
    coordinator = Coordinator(2, 2, 0)
    assert coordinator.receive(0, join(2, node_rank=0)) == []
    (_, refused), (to, end) = coordinator.receive(1, join(2, 1, node_rank=0))
    assert refused["do"] == "refuse"
    assert (to, end["do"], end["exit_code"]) == (0, "finish", 2)
    assert "two machines call themselves node 0" in end["failure"]["message"]


@pytest.mark.parametrize("final", [False, True])
def test_ranks_that_saved_their_state_go_on_without_using_up_restarts(final: bool) -> None:
    coordinator = Coordinator(2, 2, 0)
    for peer in range(2):
        coordinator.receive(peer, join(2, peer))
    for peer in range(2):
        coordinator.receive(peer, {"do": "ready"})
    coordinator.receive(0, {"do": "preempted", "final": False})
    coordinator.receive(1, {"do": "preempted", "final": final})
    stopped = {"do": "stopped", "failures": [], "main_port": 1, "ports": []}
    assert coordinator.receive(0, stopped) == []
    told = coordinator.receive(1, stopped)
    if final:
        assert [(m["do"], m["state"], m["exit_code"]) for _, m in told] == [("finish", "STOPPED", RESUME_CODE)] * 2
    else:
        assert [(m["do"], m["attempt"]) for _, m in told] == [
            ("restart", 1),
            ("restart", 1),
            ("start", 1),
            ("start", 1),
        ]


def elastic(coordinator: Coordinator, nodes: int) -> None:
    """Nodes join and agree, and an attempt runs."""
    for peer in range(nodes):
        coordinator.receive(peer, {**join(nodes, peer), "nodes": [coordinator.least, coordinator.most]})
    agree(coordinator, nodes)


def agree(coordinator: Coordinator, nodes: int) -> list[tuple[int, dict[str, Any]]]:
    return [told for peer in range(nodes) for told in coordinator.receive(peer, {"do": "ready"})]


def test_no_more_nodes_leave_at_once_than_the_job_can_do_without() -> None:
    coordinator = Coordinator(2, 3, 0)
    elastic(coordinator, 3)
    told = [message for peer in (2, 1, 0) for message in coordinator.receive(peer, {"do": "leave"})]
    assert [message["do"] for _, message in told] == ["halt"] * 3
    stopped = {"do": "stopped", "failures": [], "main_port": 1, "ports": []}
    told = [(peer, m["do"]) for sender in range(3) for peer, m in coordinator.receive(sender, stopped)]
    assert told == [(2, "finish"), (0, "restart"), (1, "restart"), (0, "start"), (1, "start")]


@pytest.mark.parametrize("last", ["done", "symptom", "failed"])
def test_symptoms_halt_the_others_once_no_other_node_can_report_the_cause(last: str) -> None:
    coordinator = Coordinator(3, 3, 0)
    elastic(coordinator, 3)
    assert coordinator.receive(1, {"do": "symptom"}) == []
    assert coordinator.receive(2, {"do": "symptom"}) == []
    told = coordinator.receive(0, {"do": last})
    assert [(peer, message["do"]) for peer, message in told] == [(0, "halt"), (1, "halt"), (2, "halt")]


def test_nodes_know_which_one_was_lost_first_before_they_may_lose_their_coordinator() -> None:
    coordinator = Coordinator(4, 4, 0)
    elastic(coordinator, 4)
    told = [coordinator.lost(2), coordinator.lost(1)]
    assert [[[it["node"] for it in halt["gone"]] for _, halt in halts] for halts in told] == [[[2]] * 3, [[2]] * 2]


def test_the_last_lines_of_ranks_that_failed_later_are_told() -> None:
    coordinator = Coordinator(1, 1, 0)
    elastic(coordinator, 1)
    failures = [{**failed(rank, age=10.0 - rank), "traceback": "1\n2\n3\n4\n5\n6\n7\n"} for rank in range(12)]
    coordinator.receive(0, {"do": "failed"})
    ((_, told),) = coordinator.receive(0, {"do": "stopped", "failures": failures, "main_port": 1, "ports": []})
    assert (told["failure"]["rank"], len(told["others"])) == (0, 11)
    assert told["others"][7] == {
        "rank": 8, "node": 0, "message": "rank 8", "traceback": "2\n3\n4\n5\n6\n7", "collectives": "barrier 7",
    }  # fmt: skip
    assert told["others"][8] == {"rank": 9, "node": 0, "message": "rank 9"}


def test_a_newcomer_does_not_stay_for_others_before_it_takes_part() -> None:
    coordinator = Coordinator(1, 2, 0, expected=1)
    elastic(coordinator, 1)
    coordinator.receive(1, {**join(2, 1), "nodes": [1, 2]})
    coordinator.receive(1, {"do": "prepared"})
    assert coordinator.receive(0, {"do": "leave"}) == []
    assert [m["do"] for _, m in coordinator.receive(0, {"do": "called"})] == ["halt"]
    assert coordinator.receive(0, {"do": "leave"}) == []
    told = coordinator.receive(0, {"do": "stopped", "failures": [], "main_port": 1, "ports": []})
    assert [m["do"] for _, m in told] == ["restart"] * 2 + ["start"] * 2
    assert coordinator.receive(0, {"do": "leave"}) == []  # not before the newcomer knows that the attempt runs
    assert [(peer, m["do"]) for peer, m in agree(coordinator, 2)] == [(0, "go"), (1, "go"), (0, "halt"), (1, "halt")]


def test_a_node_that_leaves_stays_when_the_others_are_gone() -> None:
    coordinator = Coordinator(1, 2, 0)
    elastic(coordinator, 2)
    assert [m["do"] for _, m in coordinator.receive(0, {"do": "leave"})] == ["halt"] * 2
    assert [m["do"] for _, m in coordinator.lost(1)] == ["halt"]
    told = coordinator.receive(0, {"do": "stopped", "failures": [], "main_port": 1, "ports": []})
    assert [m["do"] for _, m in told] == ["restart", "start"]
    assert told[0][1]["why"] == "node 1 (h) is gone"


@pytest.mark.parametrize(("end", "why"), [("lost", "h joins, h is gone"), ("leave", "h joins, h leaves")])
def test_that_a_newcomer_has_gone_before_it_took_part_is_said(end: str, why: str) -> None:
    coordinator = Coordinator(1, 2, 0, expected=1)
    elastic(coordinator, 1)
    coordinator.receive(1, {**join(2, 1), "nodes": [1, 2]})
    coordinator.receive(1, {"do": "prepared"})
    coordinator.receive(0, {"do": "called"})
    told = coordinator.lost(1) if end == "lost" else coordinator.receive(1, {"do": "leave"})
    assert [m["do"] for _, m in told] == ([] if end == "lost" else ["finish"])
    told = coordinator.receive(0, {"do": "stopped", "failures": [], "main_port": 1, "ports": []})
    assert [(m["do"], m.get("why"), len(m["nodes"]) if m["do"] == "start" else m["nodes"]) for _, m in told] == [
        ("restart", why, 1), ("start", None, 1),
    ]  # fmt: skip


def test_a_rank_that_starts_when_the_others_have_saved_and_ended_has_not_failed() -> None:
    coordinator = Coordinator(1, 2, 0)
    elastic(coordinator, 2)
    assert [m["do"] for _, m in coordinator.receive(0, {"do": "leave"})] == ["halt"] * 2
    assert coordinator.receive(0, {"do": "stopped", "failures": [], "main_port": 1, "ports": []}) == []
    late = {"do": "stopped", "failures": [failed(1, 1.0, symptom=True)], "main_port": 1, "ports": []}
    assert [(peer, m["do"]) for peer, m in coordinator.receive(1, late)] == [(0, "finish"), (1, "search")]


def test_what_a_node_sent_before_it_connected_again_does_not_count() -> None:
    coordinator = Coordinator(2, 2, 0)
    coordinator.receive(0, join(2))
    coordinator.receive(2, join(2, 1))
    agree(coordinator, 1)
    assert [m["do"] for _, m in coordinator.receive(2, {"do": "ready"})] == ["go"] * 2
    assert coordinator.receive(1, join(2, 1)) == coordinator.lost(1, is_dead=False) == []
    assert [m["do"] for _, m in coordinator.receive(2, {"do": "failed"})] == ["halt"] * 2


LOST = {"do": "leave or stop", "signal": 1}
STOPPED = {"do": "stopped", "failures": [], "main_port": 1, "ports": []}


def test_a_node_that_nobody_follows_leaves_a_job_that_goes_on() -> None:
    coordinator = Coordinator(1, 2, 0)
    elastic(coordinator, 2)
    assert [(m["do"], m["save"]) for _, m in coordinator.receive(1, LOST)] == [("halt", True)] * 2
    told = [(to, m["do"]) for peer in (0, 1) for to, m in coordinator.receive(peer, STOPPED)]
    assert told == [(1, "finish"), (0, "restart"), (0, "start")]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_job_that_nobody_follows_on_any_node_is_stopped(order: tuple[int, int]) -> None:
    coordinator = Coordinator(1, 2, 0)
    elastic(coordinator, 2)
    assert [m["do"] for peer in order for _, m in coordinator.receive(peer, LOST)] == ["halt"] * 2
    told = [m for peer in (0, 1) for _, m in coordinator.receive(peer, STOPPED)]
    assert [(m["do"], m["state"], m["exit_code"]) for m in told] == [("finish", "STOPPED", 129)] * 2


def test_a_node_that_nobody_follows_stops_a_job_that_needs_it() -> None:
    coordinator = Coordinator(2, 3, 0, expected=2)
    elastic(coordinator, 2)
    assert [(m["do"], m["signal"]) for _, m in coordinator.receive(1, LOST)] == [("halt", 1)] * 2


def test_a_node_that_nobody_follows_stops_the_job_when_the_others_are_gone_meanwhile() -> None:
    coordinator = Coordinator(1, 2, 0)
    elastic(coordinator, 2)
    coordinator.receive(0, LOST)
    coordinator.lost(1)
    ((_, told),) = coordinator.receive(0, STOPPED)
    assert (told["do"], told["state"], told["exit_code"]) == ("finish", "STOPPED", 129)


def replaced(restarts: int = 1, nodes: int = 2, least: int | None = None) -> Coordinator:
    """A job whose nodes are replaced, and which runs."""
    coordinator = Coordinator(least or nodes, nodes, restarts, replaces=True)
    for peer in range(nodes):
        coordinator.receive(peer, numbered(coordinator, peer, peer, f"n-{peer}"))
    agree(coordinator, nodes)
    assert coordinator.phase == RUNNING
    return coordinator


def numbered(coordinator: Coordinator, peer: int, rank: int, name: str) -> Message:
    nodes = [coordinator.least, coordinator.most]
    return {**join(2, peer), "nodes": nodes, "node_rank": rank, "id": name, "host": f"h{rank}"}


def done(outbox: list[tuple[int, Message]], peer: int) -> list[str]:
    return [message["do"] for to, message in outbox if to == peer]


def test_another_node_takes_the_place_of_one_that_is_lost_within_the_restarts() -> None:
    coordinator = replaced(restarts=1)
    coordinator.lost(1)
    assert done(coordinator.receive(0, {"do": "stopped", "failures": [], **PORTS}), 0) == ["wait"]
    outbox = coordinator.receive(2, numbered(coordinator, 2, 1, "m-1"))
    assert [(to, message["do"]) for to, message in outbox] == [(0, "start"), (2, "start")]
    assert [node["id"] for node in outbox[0][1]["nodes"]][1] == "m-1"
    assert coordinator.restarts == 1
    for peer in (0, 2):
        coordinator.receive(peer, {"do": "ready"})
    coordinator.lost(2)
    ((_, end),) = coordinator.receive(0, {"do": "stopped", "failures": [], **PORTS})
    assert (end["do"], end["state"]) == ("finish", "FAILED") and "node 1 (h1) is gone" in end["failure"]["message"]


def test_a_node_that_is_told_to_go_saves_its_state_and_uses_up_no_restart() -> None:
    coordinator = replaced(restarts=1)
    assert [(to, message["save"]) for to, message in coordinator.receive(1, {"do": "leave"})] == [(0, True), (1, True)]
    assert done(coordinator.receive(2, numbered(coordinator, 2, 1, "m-1")), 2) == ["prepare"], "it may come before"
    coordinator.receive(1, {"do": "stopped", "failures": [], **PORTS})
    outbox = coordinator.receive(0, {"do": "stopped", "failures": [], **PORTS})
    assert (done(outbox, 1), done(outbox, 2), coordinator.restarts) == (["finish"], ["restart", "start"], 0)
    assert done(coordinator.receive(3, numbered(coordinator, 3, 1, "n-1")), 3) == ["refuse"], "the older one comes back"


def test_the_newer_node_of_a_rank_stays() -> None:
    coordinator = replaced(restarts=1, nodes=3, least=1)
    outbox = coordinator.receive(3, numbered(coordinator, 3, 1, "m-1"))
    assert [done(outbox, peer) for peer in range(4)] == [["halt"], ["halt"], ["halt"], ["prepare"]]
    for peer in range(3):
        outbox = coordinator.receive(peer, {"do": "stopped", "failures": [], **PORTS})
    assert done(outbox, 1) == ["finish"]
    assert [to for to, message in outbox if message["do"] == "start"][:2] == [0, 2]


def test_when_all_are_told_to_go_all_go() -> None:
    coordinator = replaced()
    coordinator.receive(1, {"do": "leave"})
    coordinator.receive(0, {"do": "leave"})
    coordinator.receive(1, {"do": "stopped", "failures": [], **PORTS})
    outbox = coordinator.receive(0, {"do": "stopped", "failures": [], **PORTS})
    assert (done(outbox, 0), done(outbox, 1), coordinator.members) == (["finish"], ["finish"], {})


def test_culprit_is_the_first_that_is_no_mere_symptom() -> None:
    assert culprit([failed(0, 9.0, symptom=True), failed(1, 1.0), failed(2, 2.0)])["rank"] == 2
    assert culprit([failed(0, 1.0, symptom=True), failed(1, 2.0, symptom=True)])["rank"] == 1
