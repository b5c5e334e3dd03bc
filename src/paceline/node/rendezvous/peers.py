"""The other nodes of a job in which another node comes for one that is lost, under the same name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .search import CONNECT_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Literal

    from paceline.node.eventloop.loop import Loop
    from paceline.node.journal.status import NodeEntry

    from .handshake import Network
    from .messages import AgentStatus


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
