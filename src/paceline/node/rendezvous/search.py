"""The search for the agent that coordinates an elastic job, after the last one was lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from paceline.node.eventloop.channel import ChannelClosed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from typing import Literal, Protocol

    from paceline.node.eventloop.loop import Loop
    from paceline.node.journal.status import NodeEntry

    from .handshake import Network
    from .messages import AgentStatus

    Address = tuple[str, int]

    class Searcher(Protocol):
        """What the search asks of the agent that searches; `Participant` is one."""

        id: str

        @property
        def has_met(self) -> bool:
            """Whether it follows a coordinator or has it."""

        @property
        def has_led_on(self) -> bool:
            """Whether the coordinator here has made a decision."""

        def lead(self) -> None:
            """Coordinate from now on."""

        def follow(self, address: Address, timeout: float) -> AgentStatus:
            """Try once to follow an agent; returns its status, with "leads" if that has worked."""

        def part(self) -> None:
            """Leave the coordinator, or stop to coordinate."""

        def may_still_go_on(self, ended: Collection[str]) -> bool:
            """Whether the job could go on here if all agents came that have not ended."""

        def may_have_gone_on(self) -> bool:
            """Whether other agents may have gone on with the job by now, without this one."""

        def agent_died(self, name: str) -> None:
            """Record that an agent is dead."""


CONNECT_PAUSE = 0.3  # seconds between two tries to reach the coordinator
CONNECT_SECONDS = 2.0  # for one try


class _Candidate(NamedTuple):
    """An agent that coordinates the job, or should; without an address it is the one that searches."""

    id: str
    address: Address | None


class Search:
    """Finds the coordinator of the job, or makes this agent the coordinator.

    The first living agent in the order of the last attempt should lead, unless another one does already. An agent whose
    port refuses connections is dead. It died in the last attempt unless it may have gone on with others, and ended with
    them.

    Attributes:
        is_in_vain: whether so many agents have ended for a while that the job cannot go on here.
    """

    def __init__(
        self, loop: Loop, searcher: Searcher, nodes: Sequence[NodeEntry], network: Network, hope: float
    ) -> None:
        """Nothing is asked before `run`."""
        self._loop = loop
        self._searcher = searcher
        self._nodes = nodes
        self._network = network
        self._hope = hope
        self._in_vain_since: float | None = None

    @property
    def is_in_vain(self) -> bool:
        """See the class."""
        return self._in_vain_since is not None and self._loop.now() - self._in_vain_since > self._hope

    def run(self, search_by: float, is_over: Callable[[], bool]) -> bool:
        """Search until the job goes on, or `is_over()`; returns False if it is in vain, or takes until `search_by`."""
        searcher = self._searcher
        while not is_over():
            leader = self._next_leader(is_over)
            if searcher.has_led_on:
                break
            if leader is not None and leader.address is None:
                if not searcher.has_met:
                    searcher.lead()
            elif leader is not None and self._follow(leader):
                break
            if searcher.has_led_on:
                break
            if self.is_in_vain or self._loop.now() > search_by:
                return False
            self._loop.run_until(lambda: is_over() or searcher.has_led_on, CONNECT_PAUSE)
        return True

    def _follow(self, leader: _Candidate) -> bool:
        assert leader.address is not None
        self._searcher.part()
        try:
            return self._searcher.follow(leader.address, CONNECT_SECONDS)["leads"]
        except (OSError, ChannelClosed):
            return False

    def _next_leader(self, is_over: Callable[[], bool]) -> _Candidate | None:
        """The agent that coordinates now, or else should."""
        living, ended = self._ask(is_over)
        own = self._searcher.id
        addresses = [(n["address"], n["listen"]) for n in self._nodes if n["id"] in living or n["id"] == own]
        for answer in living.values():
            if answer["leader"] is not None:
                address, port = str(answer["leader"][0]), int(answer["leader"][1])
                if answer["has_started"] or (address, port) not in addresses:
                    self._in_vain_since = None
                    return _Candidate(answer["id"], (address, port))
        is_possible = self._searcher.may_still_go_on(ended)
        self._in_vain_since = None if is_possible else self._in_vain_since or self._loop.now()
        for node in self._nodes:
            if node["id"] == own:
                return _Candidate(own, None)
            if node["id"] in living:
                return _Candidate(node["id"], (node["address"], node["listen"]))
        return None

    def _ask(self, is_over: Callable[[], bool]) -> tuple[dict[str, AgentStatus], set[str]]:
        """Ask all other agents of the last attempt; returns the answers, by agent id, and which agents have ended."""
        others = [node for node in self._nodes if node["id"] != self._searcher.id]
        survey = self._network.survey(others, CONNECT_SECONDS)
        if others:
            self._loop.run_until(lambda: survey.is_over or is_over())
        survey.close()
        living: dict[str, AgentStatus] = {}
        ended = {name for name, answer in survey.answers.items() if answer == "refused"}
        for name, answer in survey.answers.items():
            if answer == "refused":
                if not self._searcher.may_have_gone_on():
                    self._searcher.agent_died(name)
            elif isinstance(answer, dict) and answer["id"] == name:
                living[name] = answer
        return living, ended


# -- the other nodes of a job in which another node comes for one that is lost, under the same name --------------------


class Peers:
    """Asks the agents at the names of the other nodes which of them coordinates the job, and whether it has begun.

    A node cannot know whether it is the first of its node rank. So node 0 coordinates a job only if no other node
    answers that it has taken part in it already.

    Attributes:
        leader: the address and port of the agent that coordinates the job, None if none is known.
        have_begun: whether an agent that answered has taken part in an attempt.
        have_ended: whether the job has succeeded without this node.
    """

    def __init__(self, loop: Loop, names: Sequence[str], port: int, own: int, network: Network) -> None:
        """Nothing is asked before `ask`."""
        self.leader: tuple[str, int] | None = None
        self.have_begun = self.have_ended = False
        self._loop, self._names, self._own, self._network = loop, names, own, network
        self._others: list[NodeEntry] = [
            {"id": str(rank), "address": name, "listen": port, "slots": 0, "ports": []}
            for rank, name in enumerate(names)
            if rank != own
        ]
        self._answers: dict[str, AgentStatus | Literal["refused", "unknown"] | None] = {}

    def ask(self, is_over: Callable[[], bool]) -> None:
        """Ask all of them once; returns when they have answered, or their time or everything is over."""
        survey = self._network.survey(self._others, CONNECT_SECONDS)
        self._loop.run_until(lambda: survey.is_over or is_over())
        survey.close()
        self._answers = dict(survey.answers)
        there = [answer for _, answer in sorted(self._answers.items()) if isinstance(answer, dict)]
        begun = [answer for answer in there if answer["has_begun"]]
        self.have_begun = bool(begun)
        self.have_ended = any(answer["has_ended"] for answer in there)
        known = [answer for answer in begun or there if answer["leader"] is not None]
        known.sort(key=lambda answer: not answer["leads"])
        self.leader = None
        for answer in known[:1]:
            assert answer["leader"] is not None
            self.leader = str(answer["leader"][0]), int(answer["leader"][1])

    def may_begin(self, needs_all: bool) -> bool:
        """Whether the job may begin here: it has not elsewhere, as far as the other nodes answer."""
        if self.have_begun:
            return False
        return needs_all or all(self._answers.get(other["id"]) is not None for other in self._others)

    @property
    def found(self) -> str:
        """What the other nodes answered, for a message."""
        words = {"refused": "refuses connections", "unknown": "has no address", None: "does not answer"}
        found = []
        for other in self._others:
            answer = self._answers.get(other["id"])
            how = "does not know which node coordinates it" if isinstance(answer, dict) else words[answer]
            found.append(f"{other['address']} {how}")
        return ", ".join(found)
