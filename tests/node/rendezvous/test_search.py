"""The search for the agent that coordinates a job, when the job has ended elsewhere."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from paceline.node.eventloop.loop import Loop
from paceline.node.rendezvous.handshake import Listener, Network
from paceline.node.rendezvous.quorum import Membership, Standing
from paceline.node.rendezvous.search import Search

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from paceline.node.journal.status import NodeEntry
    from paceline.node.rendezvous.messages import AgentStatus

TOKEN = b"secret"
NEVER = float("inf")


class Agent:
    """Node b of a, b, c, d, whose leader was a; c searches as well, unless it has ended."""

    id = "b"
    has_led_on = False

    def __init__(self, dead: Collection[str] = ()) -> None:
        members = Membership(("a", "b", "c", "d"), "a")
        self.standing, self.dead, self.has_met = Standing(3, 0, True, (members,), 1.0), set(dead), False
        self.looks = 0  # at what all have answered

    def lead(self) -> None:
        self.has_met = True

    def part(self) -> None:
        self.has_met = False

    def follow(self, address: tuple[str, int], timeout: float) -> AgentStatus:
        self.looks += 1
        raise ConnectionRefusedError

    def may_have_gone_on(self) -> bool:
        return True

    def agent_died(self, name: str) -> None:
        self.dead.add(name)

    def may_still_go_on(self, ended: Collection[str]) -> bool:
        self.looks += 1
        return self.standing.may_go_on(self.standing.members - set(ended), self.dead)


@pytest.fixture
def loop() -> Iterator[Loop]:
    yield Loop()


def entry(name: str, port: int) -> NodeEntry:
    return {"id": name, "address": "127.0.0.1", "listen": port, "slots": 1, "ports": []}


def listening(loop: Loop, name: str, leader: list[str | int] | None = None) -> Listener:
    status: AgentStatus = {
        "id": name, "leads": False, "has_started": False, "leader": leader, "has_begun": True, "has_ended": False,
    }  # fmt: skip
    it = Listener(loop, TOKEN, lambda: status, lambda _: None)
    it.open(0, "127.0.0.1")
    return it


@pytest.mark.parametrize("c_searches", [False, True])
def test_it_ends_when_the_others_have(loop: Loop, c_searches: bool) -> None:
    other = listening(loop, "c")
    if not c_searches:
        other.close()
    with socket.socket() as closed:  # nobody listens, and nobody else gets the port
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        nodes = [entry("a", port), entry("b", 1), entry("c", other.port if c_searches else port), entry("d", port)]
        agent = Agent()
        it = Search(loop, agent, nodes, Network(loop, TOKEN), 0.5)
        assert not it.run(NEVER, lambda: False) and it.is_in_vain
        assert agent.looks > 1  # one may have been asked while it began to search
    other.close()


@pytest.mark.parametrize("how", ["d does not answer", "a and d are known to be dead", "c knows who goes on"])
def test_it_goes_on_as_long_as_there_is_hope(loop: Loop, how: str) -> None:
    other = listening(loop, "c", ["127.0.0.1", 9] if how == "c knows who goes on" else None)
    with socket.socket() as closed, socket.create_server(("127.0.0.1", 0)) as mute:
        closed.bind(("127.0.0.1", 0))
        port, silent = closed.getsockname()[1], mute.getsockname()[1]
        nodes = [entry("a", port), entry("b", 1), entry("c", other.port), entry("d", port)]
        if how == "d does not answer":
            nodes[3] = entry("d", silent)
        agent = Agent(["a", "d"] if how == "a and d are known to be dead" else ())
        it = Search(loop, agent, nodes, Network(loop, TOKEN), 0.0)
        it.run(NEVER, lambda: agent.looks == 2)
        assert not it.is_in_vain
    other.close()
