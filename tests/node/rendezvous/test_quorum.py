"""Whatever is cut, killed, healed or late: never do two parts of a job train at once."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.tiers import examples

from paceline.node.rendezvous.coordinator import FINISHED, GATHERING, Coordinator
from paceline.node.rendezvous.quorum import Membership, Standing

if TYPE_CHECKING:
    from paceline.node.journal.status import Agreement

Message = dict[str, Any]
GONE = {"do": "gone"}  # a process ended, and its kernel says so
PART = {"do": "part"}  # a process gave a connection up

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


@dataclass
class Node:
    """An agent, as far as messages go."""

    id: str
    is_alive: bool = True
    is_over: bool = False
    standing: Standing | None = None
    coordinator: Coordinator | None = None
    link: Link | None = None
    agreed_to: Message | None = None
    runs: tuple[int, str, tuple[str, ...]] | None = None  # attempt, leader, members
    dead: set[str] = field(default_factory=set)
    former: Agreement | None = None


@dataclass(eq=False)
class Link:
    """A connection of a follower to a leader; messages arrive in order, if at all."""

    guest: Node
    host: Node
    coordinator: Coordinator
    peer: int
    to_host: list[Message] = field(default_factory=list)
    to_guest: list[Message] = field(default_factory=list)


class Network(RuleBasedStateMachine):
    """Nodes that are cut from each other, that die, lead and follow as it comes."""

    @initialize(count=st.integers(2, 5), least=st.integers(1, 2))
    def begin(self, count: int, least: int) -> None:
        self.gather(count, least)
        self.all_messages_arrive()
        assert all(node.runs for node in self.nodes.values())

    def gather(self, count: int, least: int) -> None:
        self.least, self.most = least, 6
        self.nodes: dict[str, Node] = {}
        self.links: list[Link] = []
        self.side: dict[str, int] = {}
        self.calls: list[Node] = []
        self.numbers = itertools.count(1)
        first = self.add()
        self.lead(first, expected=count)
        for _ in range(count - 1):
            self.connect(self.add(), first)

    def add(self) -> Node:
        node = Node(f"n{len(self.nodes)}")
        self.nodes[node.id] = node
        self.side[node.id] = 0
        return node

    # -- what agents do ------------------------------------------------------------------------------------------------

    def lead(self, node: Node, expected: int = 1) -> None:
        node.coordinator = Coordinator(self.least, self.most, 100, expected)
        node.coordinator.dead |= node.dead
        self.post(node, node.coordinator.receive(0, self.join(node)))

    def connect(self, node: Node, host: Node) -> None:
        assert host.coordinator is not None
        link = node.link = Link(node, host, host.coordinator, next(self.numbers))
        self.links.append(link)
        link.to_host.append(self.join(node))

    def join(self, node: Node) -> Message:
        return {
            "do": "join", "id": node.id, "node_rank": None, "nodes": [self.least, self.most], "slots": 1,
            "host": node.id, "address": node.id, "listen": 1, "job": "j", "main_port": 1, "ports": [], "version": "1",
            "standing": node.standing and node.standing.to_dict(), "former": node.former,
        }  # fmt: skip

    def post(self, host: Node, outbox: list[tuple[int, Message]]) -> None:
        coordinator = host.coordinator
        for peer, message in outbox:
            if peer == 0:
                self.hear(host, message, coordinator)
            else:
                for link in self.links:
                    if link.coordinator is coordinator and link.peer == peer:
                        link.to_guest.append(message)

    def say(self, node: Node, message: Message) -> None:
        if node.coordinator is not None:
            self.post(node, node.coordinator.receive(0, message))
        elif node.link is not None:
            node.link.to_host.append(message)

    def leave(self, node: Node) -> None:
        """Give up whatever connects a node."""
        for link in list(self.links):
            if link.host is node and link.coordinator is node.coordinator:
                link.to_guest.append(PART)
        if node.link is not None:
            node.link.to_host.append(PART)
        node.coordinator = node.link = node.runs = node.agreed_to = None

    def hear(self, node: Node, message: Message, coordinator: Coordinator | None = None) -> None:
        if coordinator is not None and coordinator is not node.coordinator:
            return
        what = message["do"]
        if what == "start":
            node.standing, node.agreed_to = Standing.from_dict(message["standing"]), message
            self.say(node, {"do": "ready"})
        elif what == "go":
            assert node.standing is not None
            assert node.agreed_to is not None
            node.standing = replace(node.standing, agreed=True, asked=node.standing.asked[-1:])
            (membership,) = node.standing.asked
            node.runs = (node.standing.attempt, membership.leader, membership.ids)
        elif what == "halt":
            node.runs = node.agreed_to = None
            self.say(node, {"do": "stopped", "failures": [], "main_port": 1, "ports": []})
        elif what == "prepare":
            self.say(node, {"do": "prepared"})
        elif what == "last call":
            self.calls.append(node)
        elif what == "search":
            node.dead.update(message["dead"])
            self.leave(node)
        elif what in ("finish", "refuse"):
            node.is_over, node.runs = what == "finish", None
            if what == "refuse":
                self.leave(node)

    def pass_on(self, link: Link) -> None:
        """Deliver one message each way."""
        if self.side[link.guest.id] != self.side[link.host.id]:
            return
        if link.to_host:
            message = link.to_host.pop(0)
            is_open = link.host.is_alive and link.host.coordinator is link.coordinator
            if is_open and message in (GONE, PART):
                self.links.remove(link)
                self.post(link.host, link.coordinator.lost(link.peer, message == GONE))
            elif is_open:
                self.post(link.host, link.coordinator.receive(link.peer, message))
        if link.to_guest:
            message = link.to_guest.pop(0)
            if link.guest.is_alive and link.guest.link is link:
                if message in (GONE, PART):
                    if message == GONE:
                        link.guest.dead.add(link.host.id)
                    self.leave(link.guest)
                else:
                    self.hear(link.guest, message)

    # -- what happens --------------------------------------------------------------------------------------------------

    @rule(data=st.data())
    def a_message_arrives(self, data: st.DataObject) -> None:
        links = [link for link in self.links if link.to_host or link.to_guest]
        if links:
            self.pass_on(data.draw(st.sampled_from(links)))

    @rule()
    def all_messages_arrive(self) -> None:
        for _ in range(20):
            for link in list(self.links):
                self.pass_on(link)

    @rule(data=st.data())
    def the_network_is_cut(self, data: st.DataObject) -> None:
        for node in self.nodes:
            self.side[node] = data.draw(st.integers(0, 1))

    @rule()
    def the_network_heals(self) -> None:
        self.side = dict.fromkeys(self.nodes, 0)

    @rule(data=st.data())
    def a_host_drops_a_silent_guest(self, data: st.DataObject) -> None:
        links = [
            link for link in self.links
            if link.host.is_alive and link.host.coordinator is link.coordinator
            and self.side[link.guest.id] != self.side[link.host.id]
        ]  # fmt: skip
        if links:
            link = data.draw(st.sampled_from(links))
            link.to_guest.append(PART)
            link.to_host.clear()
            self.post(link.host, link.coordinator.lost(link.peer, is_dead=False))

    @rule(data=st.data())
    def a_guest_gives_a_silent_host_up(self, data: st.DataObject) -> None:
        guests = [
            node for node in self.nodes.values()
            if node.is_alive and node.link and self.side[node.link.host.id] != self.side[node.id]
        ]  # fmt: skip
        if guests:
            self.leave(data.draw(st.sampled_from(guests)))

    @rule(data=st.data())
    def an_agent_is_killed(self, data: st.DataObject) -> None:
        living = [node for node in self.nodes.values() if node.is_alive]
        if len(living) < 2:
            return
        node = data.draw(st.sampled_from(living))
        node.is_alive, node.runs = False, None
        for link in self.links:
            if link.host is node and link.coordinator is node.coordinator:
                link.to_guest.append(GONE)
            if link.guest is node and node.link is link:
                link.to_host.append(GONE)

    @precondition(lambda self: len(self.nodes) < 7)
    @rule(data=st.data())
    def a_machine_reboots(self, data: st.DataObject) -> None:
        """None of the others hears of that before its next agent tells them what the last one has agreed to."""
        if living := [node for node in self.nodes.values() if node.is_alive]:
            node, after = data.draw(st.sampled_from(living)), self.add()
            node.is_alive, node.runs = False, None
            if node.standing is not None and not node.is_over:
                after.former = {"id": node.id, "attempt": node.standing.attempt}

    @rule(data=st.data())
    def a_node_without_others_leads(self, data: st.DataObject) -> None:
        alone = [node for node in self.alone() if node.standing is not None]
        if alone:
            self.lead(data.draw(st.sampled_from(alone)))

    @rule(data=st.data())
    def a_node_follows(self, data: st.DataObject) -> None:
        pairs = [
            (node, host) for node in self.alone() for host in self.nodes.values()
            if host is not node and host.is_alive and host.coordinator is not None
            and host.coordinator.phase != FINISHED and self.side[host.id] == self.side[node.id]
        ]  # fmt: skip
        if pairs:
            self.connect(*data.draw(st.sampled_from(pairs)))

    @rule(data=st.data())
    def one_that_gathers_gives_up(self, data: st.DataObject) -> None:
        gathering = [
            node for node in self.nodes.values()
            if node.is_alive and node.coordinator is not None and node.coordinator.phase == GATHERING
        ]  # fmt: skip
        if gathering:
            self.leave(data.draw(st.sampled_from(gathering)))

    @precondition(lambda self: self.calls)
    @rule()
    def a_call_is_over(self) -> None:
        node = self.calls.pop(0)
        if node.is_alive:
            self.say(node, {"do": "called"})

    def all_calls_are_over(self) -> None:
        self.all_messages_arrive()
        while self.calls:
            self.a_call_is_over()
            self.all_messages_arrive()

    @precondition(lambda self: len(self.nodes) < 7)
    @rule()
    def a_newcomer_appears(self) -> None:
        self.add()

    @rule(data=st.data())
    def a_rank_fails(self, data: st.DataObject) -> None:
        running = [node for node in self.nodes.values() if node.runs]
        if running:
            self.say(data.draw(st.sampled_from(running)), {"do": "failed"})

    def alone(self) -> list[Node]:
        return [
            node for node in self.nodes.values()
            if node.is_alive and not node.is_over and node.link is None and node.coordinator is None
        ]  # fmt: skip

    @invariant()
    def one_generation_at_most_is_whole(self) -> None:
        running = {node.runs for node in getattr(self, "nodes", {}).values() if node.runs}
        whole = [run for run in running if all(self.nodes[member].runs == run for member in run[2])]
        assert len(whole) <= 1, whole


def cut_off(network: Network, *names: str) -> None:
    """Cut these nodes off, and let everybody notice."""
    network.side.update(dict.fromkeys(names, 1))
    for link in list(network.links):
        if network.side[link.guest.id] != network.side[link.host.id]:
            network.leave(link.guest)
            network.post(link.host, link.coordinator.lost(link.peer, is_dead=False))


def test_a_first_attempt_that_some_have_agreed_to_is_theirs_too() -> None:
    network = Network()
    network.gather(3, 1)
    link_1, link_2 = network.links
    for link in (link_1, link_2, link_1):  # all have come, and n1 has agreed; what n2 says is on its way
        network.pass_on(link)
    network.pass_on(link_2)
    first, second, third = (network.nodes[f"n{number}"] for number in range(3))
    assert second.standing is not None
    assert third.standing is not None
    assert first.runs is None
    cut_off(network, "n1", "n2")
    network.lead(second)
    network.connect(third, second)
    network.all_calls_are_over()
    assert second.runs is not None
    assert third.runs == second.runs
    assert first.runs is None


@pytest.mark.parametrize("went_on", [False, True])
def test_one_that_has_rebooted_tells_whether_it_went_on(went_on: bool) -> None:
    network = Network()
    network.begin(4, 1)
    first, second, third, fourth = (network.nodes[f"n{number}"] for number in range(4))
    if went_on:
        cut_off(network, "n1", "n3")
        assert first.coordinator is not None
        for peer in (1, 3):  # its ranks are given up
            network.post(first, first.coordinator.has_stopped(peer))
        network.all_calls_are_over()
        assert first.runs == third.runs == (1, "n0", ("n0", "n2"))
    assert first.standing is not None
    first.is_alive, first.runs = False, None
    again = network.add()
    again.former = {"id": "n0", "attempt": first.standing.attempt}
    network.side.update(n0=2, n2=2, n1=0, n3=0)
    for node in (second, fourth):
        network.leave(node)
    network.lead(second)
    network.connect(fourth, second)
    network.all_calls_are_over()
    assert second.runs is None
    network.connect(again, second)
    network.all_calls_are_over()
    assert (second.runs is None) is went_on


def test_those_that_are_new_do_not_outvote_those_before() -> None:
    network = Network()
    network.begin(3, 1)
    newcomers = [network.add() for _ in range(3)]
    first, second, third = (network.nodes[f"n{number}"] for number in range(3))
    for newcomer in newcomers:
        network.connect(newcomer, first)
    network.all_messages_arrive()
    old, new = network.links[:2], network.links[2:]
    network.a_call_is_over()
    for link in old:  # they halt, and say so
        network.pass_on(link)
        network.pass_on(link)
    for link in new:  # they alone hear of the next attempt
        network.pass_on(link)
        network.pass_on(link)
    assert all(newcomer.standing is not None for newcomer in newcomers)
    network.side.update(n1=1, n2=1)
    first.is_alive = False
    for node in (second, third, *newcomers):
        node.dead.add("n0")
        network.leave(node)
    network.lead(second)
    network.connect(third, second)
    network.lead(newcomers[0])
    for newcomer in newcomers[1:]:
        network.connect(newcomer, newcomers[0])
    network.all_calls_are_over()
    assert second.runs is not None
    assert third.runs == second.runs
    assert not any(newcomer.runs for newcomer in newcomers)


Network.TestCase.settings = settings(max_examples=examples(100, 3000), stateful_step_count=60, deadline=None)
TestNetwork = pytest.mark.soak(Network.TestCase)
