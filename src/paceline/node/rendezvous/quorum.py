"""Which nodes of an elastic job may go on when others are out of reach: never two halves at once.

Each generation of a job has its members, one of which leads. Those that can talk to each other may go on if they weigh
more than half of the members that may still live; the leader breaks a tie. Of two groups that cannot talk, one at most
does. A node is known to be dead where its machine says so (a connection that its kernel closed, a port that it
refuses); silence proves nothing.

A generation counts from the moment when all its members have agreed to it. One that was proposed, and of which a node
does not know whether it came to be, is asked as well as the one before: the two need to agree (joint consensus, Ongaro
and Ousterhout, "In Search of an Understandable Consensus Algorithm", 2014, section 6).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection


@dataclass(frozen=True)
class Membership:
    """The nodes of a generation, by what identifies their agents, and which of them leads."""

    ids: tuple[str, ...]
    leader: str

    def has_majority(self, present: Collection[str], dead: Collection[str]) -> bool:
        """Whether those present may go on without the others, some of which are known to be dead."""
        living = [member for member in self.ids if member not in dead]
        return 2 * self._weight(member for member in living if member in present) > self._weight(living)

    def _weight(self, members: Any) -> int:
        return sum(3 if member == self.leader else 2 for member in members)

    def to_dict(self) -> dict[str, Any]:
        """For messages."""
        return {"ids": list(self.ids), "leader": self.leader}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Membership:
        """Undo `to_dict`."""
        return cls(tuple(stored["ids"]), stored["leader"])


@dataclass(frozen=True)
class Standing:
    """What a node knows of the generations of its job.

    Attributes:
        attempt: the last one that it agreed to.
        restarts: after failures, up to then.
        agreed: whether all others did so too, as far as it knows.
        asked: the memberships that decide who may go on.
    """

    attempt: int
    restarts: int
    agreed: bool
    asked: tuple[Membership, ...]

    def may_go_on(self, present: Collection[str], dead: Collection[str]) -> bool:
        """Whether those present may go on without the others."""
        return all(membership.has_majority(present, dead) for membership in self.asked)

    @property
    def members(self) -> set[str]:
        """All whose word counts."""
        return {member for membership in self.asked for member in membership.ids}

    def to_dict(self) -> dict[str, Any]:
        """For messages."""
        return {
            "attempt": self.attempt,
            "restarts": self.restarts,
            "agreed": self.agreed,
            "asked": [membership.to_dict() for membership in self.asked],
        }

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Standing:
        """Undo `to_dict`."""
        return cls(**{**stored, "asked": tuple(map(Membership.from_dict, stored["asked"]))})
