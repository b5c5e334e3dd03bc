"""What the coordinator tells the nodes; that its promises hold in any order is simulated (tests/simulation)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.node.watching.test_hang import stand

from paceline.contract import RESUME_CODE
from paceline.contract.records import Failure
from paceline.node.failure import culprit
from paceline.node.rendezvous.coordinator import RUNNING, Coordinator

Message = dict[str, Any]
STOPPED = {"do": "stopped", "failures": [], "main_port": 1, "ports": []}


def join(nodes: int, peer: int = 0, **changes: Any) -> Message:
    return {
        "do": "join", "id": f"n{peer}", "node_rank": None, "nodes": [nodes, nodes], "slots": 2, "host": "h",
        "address": "10.0.0.1", "listen": 0, "job": "j", "main_port": 1234, "ports": [], "version": "1",
        "standing": None, "former": None, "suspended": False, **changes,
    }  # fmt: skip


def rank_of(peer: int, start: Message) -> int:
    """The place of a node that has joined as `n{peer}`."""
    return [node["id"] for node in start["nodes"]].index(f"n{peer}")


def failed(rank: int, age: float, symptom: bool = False) -> Failure:
    return Failure(
        rank=rank, node=0, host="h", pid=1, exit_code=rank + 1, signal="", oom=False, message=f"rank {rank}",
        traceback="", has_traceback=False, log="", symptom=symptom, ended=0.0, age=age, collectives="barrier 7",
    )  # fmt: skip


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
    assert coordinator.receive(0, STOPPED) == []
    told = coordinator.receive(1, STOPPED)
    if final:
        assert [(m["do"], m["state"], m["exit_code"]) for _, m in told] == [("finish", "STOPPED", RESUME_CODE)] * 2
    else:
        assert [(m["do"], m["attempt"]) for _, m in told] == [("restart", 1)] * 2 + [("start", 1)] * 2


def elastic(coordinator: Coordinator, nodes: int) -> None:
    """Nodes join and agree, and an attempt runs."""
    for peer in range(nodes):
        coordinator.receive(peer, {**join(nodes, peer), "nodes": [coordinator.least, coordinator.most]})
    agree(coordinator, nodes)


def agree(coordinator: Coordinator, nodes: int) -> list[tuple[int, dict[str, Any]]]:
    return [told for peer in range(nodes) for told in coordinator.receive(peer, {"do": "ready"})]


@pytest.mark.parametrize("last", ["done", "symptom", "failed"])
def test_symptoms_halt_the_others_once_no_other_node_can_report_the_cause(last: str) -> None:
    coordinator = Coordinator(3, 3, 0)
    elastic(coordinator, 3)
    assert coordinator.receive(1, {"do": "symptom"}) == []
    assert coordinator.receive(2, {"do": "symptom"}) == []
    told = coordinator.receive(0, {"do": last})
    assert [(peer, message["do"]) for peer, message in told] == [(0, "halt"), (1, "halt"), (2, "halt")]


def test_the_last_lines_of_ranks_that_failed_later_are_told() -> None:
    coordinator = Coordinator(1, 1, 0)
    elastic(coordinator, 1)
    failures = [{**failed(rank, age=10.0 - rank), "traceback": "1\n2\n3\n4\n5\n6\n7\n"} for rank in range(12)]
    coordinator.receive(0, {"do": "failed"})
    ((_, told),) = coordinator.receive(0, {**STOPPED, "failures": failures})
    assert (told["failure"]["rank"], len(told["others"])) == (0, 11)
    assert told["others"][7] == {
        "rank": 8, "node": 0, "message": "rank 8", "traceback": "2\n3\n4\n5\n6\n7", "collectives": "barrier 7",
    }  # fmt: skip
    assert told["others"][8] == {"rank": 9, "node": 0, "message": "rank 9"}


@pytest.mark.parametrize(("end", "why"), [("lost", "h joins, h is gone"), ("leave", "h joins, h leaves")])
def test_that_a_newcomer_has_gone_before_it_took_part_is_said(end: str, why: str) -> None:
    coordinator = Coordinator(1, 2, 0, expected=1)
    elastic(coordinator, 1)
    coordinator.receive(1, {**join(2, 1), "nodes": [1, 2]})
    coordinator.receive(1, {"do": "prepared"})
    coordinator.receive(0, {"do": "called"})
    told = coordinator.lost(1) if end == "lost" else coordinator.receive(1, {"do": "leave"})
    assert [m["do"] for _, m in told] == ([] if end == "lost" else ["finish"])
    told = coordinator.receive(0, STOPPED)
    assert [(m["do"], m.get("why"), len(m["nodes"]) if m["do"] == "start" else m["nodes"]) for _, m in told] == [
        ("restart", why, 1), ("start", None, 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("least", "unfollowed", "lost", "told"),
    [
        (1, (1,), (), ["finish STOPPED 0", "restart", "start"]),  # it goes on without this node
        (1, (0,), (), ["finish STOPPED 0", "search"]),  # for another coordinator
        (1, (0, 1), (), ["finish STOPPED 129"] * 2),
        (1, (1, 0), (), ["finish STOPPED 129"] * 2),
        (1, (0,), (1,), ["finish STOPPED 129"]),
        (2, (1,), (), ["finish STOPPED 129"] * 2),
    ],
)
def test_a_node_that_nobody_follows_leaves_a_job_that_goes_on_and_stops_it_otherwise(
    least: int, unfollowed: tuple[int, ...], lost: tuple[int, ...], told: list[str]
) -> None:
    coordinator = Coordinator(least, 3, 0, expected=2)
    elastic(coordinator, 2)
    halts = [m for peer in unfollowed for _, m in coordinator.receive(peer, {"do": "leave or stop", "signal": 1})]
    first, then = ("halt", int(least == 2), least == 1), ("halt", 1, False)  # the second one of all stops the job
    assert [(m["do"], m["signal"], m["save"]) for m in halts] == [first] * 2 + [then] * 2 * (len(unfollowed) - 1)
    for peer in lost:
        coordinator.lost(peer)
    messages = [m for peer in {0, 1} - {*lost} for _, m in coordinator.receive(peer, STOPPED)]
    ends = [f" {m['state']} {m['exit_code']}" if m["do"] == "finish" else "" for m in messages]
    assert [m["do"] + end for m, end in zip(messages, ends, strict=True)] == told


def test_a_node_that_asks_to_leave_while_all_agree_leaves_once_they_have() -> None:
    coordinator = Coordinator(1, 3, 0, expected=2)
    for peer in range(2):
        coordinator.receive(peer, {**join(2, peer), "nodes": [1, 3]})
    assert coordinator.receive(1, {"do": "leave"}) == []
    told = agree(coordinator, 2)
    assert [(peer, message["do"]) for peer, message in told[:2]] == [(0, "go"), (1, "go")]
    assert [(peer, message["do"], message["save"]) for peer, message in told[-2:]] == [
        (0, "halt", True),
        (1, "halt", True),
    ]


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
    assert done(coordinator.receive(0, STOPPED), 0) == ["wait"]
    outbox = coordinator.receive(2, numbered(coordinator, 2, 1, "m-1"))
    assert [(to, message["do"]) for to, message in outbox] == [(0, "start"), (2, "start")]
    assert [node["id"] for node in outbox[0][1]["nodes"]][1] == "m-1"
    assert coordinator.restarts == 1
    for peer in (0, 2):
        coordinator.receive(peer, {"do": "ready"})
    ((_, refused),) = coordinator.receive(3, numbered(coordinator, 3, 1, "n-1"))
    assert refused == {"do": "refuse", "why": "another node has taken its place"}, "the lost one comes back"
    coordinator.lost(2)
    ((_, end),) = coordinator.receive(0, STOPPED)
    assert (end["do"], end["state"]) == ("finish", "FAILED") and "node 1 (h1) is gone" in end["failure"]["message"]


def test_a_node_that_is_told_to_go_saves_its_state_and_uses_up_no_restart() -> None:
    coordinator = replaced(restarts=1)
    assert [(to, message["save"]) for to, message in coordinator.receive(1, {"do": "leave"})] == [(0, True), (1, True)]
    assert done(coordinator.receive(2, numbered(coordinator, 2, 1, "m-1")), 2) == ["prepare"], "it may come before"
    coordinator.receive(1, STOPPED)
    outbox = coordinator.receive(0, STOPPED)
    assert (done(outbox, 1), done(outbox, 2), coordinator.restarts) == (["finish"], ["restart", "start"], 0)
    assert done(coordinator.receive(3, numbered(coordinator, 3, 1, "n-1")), 3) == ["refuse"], "the older one comes back"


def test_the_newer_node_of_a_rank_stays() -> None:
    coordinator = replaced(restarts=1, nodes=3, least=1)
    outbox = coordinator.receive(3, numbered(coordinator, 3, 1, "m-1"))
    assert [done(outbox, peer) for peer in range(4)] == [["halt"], ["halt"], ["halt"], ["prepare"]]
    for peer in range(3):
        outbox = coordinator.receive(peer, STOPPED)
    assert done(outbox, 1) == ["finish"]
    assert [to for to, message in outbox if message["do"] == "start"][:2] == [0, 2]


def test_the_node_that_takes_the_place_of_another_has_its_rank() -> None:
    coordinator = replaced(nodes=3)
    coordinator.lost(1)
    for peer in (0, 2):
        coordinator.receive(peer, STOPPED)
    outbox = coordinator.receive(3, numbered(coordinator, 3, 1, "m-1"))
    assert [node["id"] for node in dict(outbox)[0]["nodes"]] == ["n-0", "m-1", "n-2"]


def test_when_all_are_told_to_go_all_go() -> None:
    coordinator = replaced()
    coordinator.receive(1, {"do": "leave"})
    coordinator.receive(0, {"do": "leave"})
    coordinator.receive(1, STOPPED)
    outbox = coordinator.receive(0, STOPPED)
    assert (done(outbox, 0), done(outbox, 1), coordinator.members) == (["finish"], ["finish"], {})


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("end", [[], [stand(0, {}, idle=1.0)]], ids=["its ranks go on", "a rank works"])
def test_a_hang_that_is_over_is_taken_back_and_the_next_one_is_said(nodes: int, end: list[Any]) -> None:
    coordinator = Coordinator(nodes, nodes, 0)
    for peer in range(nodes):
        coordinator.receive(peer, join(nodes, peer))
    for peer in range(nodes):
        coordinator.receive(peer, {"do": "ready"})

    def says(peer: int, stands: list[Any]) -> list[Any]:
        outbox = coordinator.receive(peer, {"do": "stands", "after": 60.0, "stands": stands})
        assert [(to, message["do"]) for to, message in outbox] in ([], [(to, "hung") for to in range(nodes)])
        return [message["hang"] and message["hang"]["kind"] for _, message in outbox[:1]]

    def all_say(stands: list[Any]) -> list[Any]:
        for peer in range(1, nodes):
            assert says(peer, [stand(peer, {})]) == []
        return says(0, stands)

    for _ in range(2):
        assert all_say([stand(0, {})]) == ["idle"]
        assert all_say([stand(0, {})]) == []
        assert all_say(end) == [None]
        assert all_say(end) == []


def test_culprit_is_the_first_that_is_no_mere_symptom() -> None:
    assert culprit([failed(0, 9.0, symptom=True), failed(1, 1.0), failed(2, 2.0)])["rank"] == 2
    assert culprit([failed(0, 1.0, symptom=True), failed(1, 2.0, symptom=True)])["rank"] == 1
