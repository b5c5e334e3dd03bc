"""Which nodes of an elastic job may go on when others cannot be reached: never two groups at once.

Each generation of a job has its members, one of which leads. A group of nodes that can reach each other may go on if it
has the majority of the members that may still be alive; the leader breaks a tie. So of two groups that cannot reach
each other, at most one goes on. A node is known to be dead if the kernel of its machine has closed a connection, or
refuses one to its port; silence proves nothing.

A generation counts from the moment when all its members have agreed to it. If a generation was proposed and a node does
not know whether all agreed, it needs the majority of that generation and of the one before (joint consensus, Ongaro and
Ousterhout, "In Search of an Understandable Consensus Algorithm", 2014, section 6).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from .messages import MembershipRecord, StandingRecord


def agent_id(node_rank: int | None) -> str:
    """A new id for an agent. It names the node rank that was asked for, by which a replaced agent is recognized."""
    name = os.urandom(6).hex()
    return name if node_rank is None else f"{name}-{node_rank}"


def rank_in(name: str) -> int | None:
    """The node rank in an agent's id; None if it asked for none."""
    _, _, rank = name.partition("-")
    return int(rank) if rank else None


@dataclass(frozen=True)
class Membership:
    """The nodes of a generation, by the ids of their agents, and which of them leads."""

    ids: tuple[str, ...]
    leader: str

    def has_majority(self, present: Collection[str], dead: Collection[str]) -> bool:
        """Whether the nodes present may go on without the others, of which some are known to be dead.

        If all are dead, nobody else goes on with this membership either.
        """
        living = [member for member in self.ids if member not in dead]
        return not living or 2 * self._weight(member for member in living if member in present) > self._weight(living)

    def without(self, dead: Collection[str]) -> Membership:
        """The nodes that are not known to be dead, who decide."""
        return Membership(tuple(member for member in self.ids if member not in dead), self.leader)

    def _weight(self, members: Iterable[str]) -> int:
        return sum(3 if member == self.leader else 2 for member in members)

    def to_dict(self) -> MembershipRecord:
        """For messages."""
        return {"ids": list(self.ids), "leader": self.leader}

    @classmethod
    def from_dict(cls, stored: MembershipRecord) -> Membership:
        """Undo `to_dict`."""
        return cls(tuple(stored["ids"]), stored["leader"])


@dataclass(frozen=True)
class Standing:
    """What a node knows of the generations of its job."""

    attempt: int  # the last attempt that it agreed to
    restarts: int  # the number of restarts after failures up to then
    agreed: bool  # whether all other nodes agreed too, as far as it knows
    asked: tuple[Membership, ...]  # the memberships whose majority is needed to go on
    began: float  # when the job's first coordinator began, in seconds since the epoch

    def may_go_on(self, present: Collection[str], dead: Collection[str]) -> bool:
        """Whether the nodes present may go on without the others."""
        return all(membership.has_majority(present, dead) for membership in self.asked)

    def others_may_go_on(self, name: str, dead: Collection[str]) -> bool:
        """Whether the other nodes that are not known to be dead may go on without this one."""
        others = self.members - {name} - set(dead)
        return any(membership.has_majority(others, dead) for membership in self.asked)

    @property
    def members(self) -> set[str]:
        """All nodes that count."""
        return {member for membership in self.asked for member in membership.ids}

    def to_dict(self) -> StandingRecord:
        """For messages."""
        return {
            "attempt": self.attempt,
            "restarts": self.restarts,
            "agreed": self.agreed,
            "asked": [membership.to_dict() for membership in self.asked],
            "began": self.began,
        }

    @classmethod
    def from_dict(cls, stored: StandingRecord) -> Standing:
        """Undo `to_dict`."""
        asked = tuple(map(Membership.from_dict, stored["asked"]))
        return cls(stored["attempt"], stored["restarts"], stored["agreed"], asked, stored["began"])
