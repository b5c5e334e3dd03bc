"""What an agent's decisions depend on besides events and its own state: its ranks, and the other nodes, as of now."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.contract.records import Cause
    from paceline.node.journal.status import Failure, Status
    from paceline.node.ranks.launcher import Ranks
    from paceline.node.rendezvous.participant import Participant

    from .status import JobStatus


class View:
    """Looks at the ranks and the other nodes; nothing is kept."""

    def __init__(self, ranks: Ranks, participant: Participant, status: JobStatus) -> None:
        self._ranks, self._participant, self._status = ranks, participant, status

    @property
    def status(self) -> Status:
        """The state that is recorded."""
        return self._status.current

    @property
    def clock(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    @property
    def has_ranks(self) -> bool:
        """Whether there are ranks, ended or not."""
        return bool(self._ranks.current)

    @property
    def has_server(self) -> bool:
        """Whether there is a fork server."""
        return self._ranks.has_server

    @property
    def is_ready(self) -> bool:
        """Whether the fork server can start ranks."""
        return self._ranks.is_ready

    @property
    def have_started(self) -> bool:
        """Whether every rank of the attempt has started."""
        return self._ranks.have_started

    @property
    def has_live_ranks(self) -> bool:
        """Whether a rank has not ended."""
        return self._ranks.has_live_ranks

    @property
    def is_over(self) -> bool:
        """Whether a rank has succeeded with which the job ends, whatever still runs."""
        return self._ranks.is_over

    @property
    def resumes(self) -> bool:
        """Whether a rank has saved its state and asks to be started again."""
        return self._ranks.resumes

    @property
    def failures(self) -> list[Failure]:
        """Of the ranks that failed."""
        return self._ranks.failures()

    @property
    def server_failure(self) -> str:
        """Why the fork server ended on its own, or ""."""
        return self._ranks.server_failure

    @property
    def server_cause(self) -> Cause:
        """The cause of that."""
        return self._ranks.server_cause

    @property
    def is_swept(self) -> bool:
        """Whether what the ranks left behind is gone."""
        return self._ranks.is_swept

    @property
    def awaited(self) -> float:
        """Seconds to wait for programs beside the ranks, before these are stopped; 0 for none."""
        return self._ranks.awaited

    @property
    def has_met(self) -> bool:
        """Whether another node, or the coordinator here, knows of this node."""
        return self._participant.has_met

    @property
    def leads(self) -> bool:
        """Whether the coordinator runs here."""
        return self._participant.leads

    @property
    def last_call_until(self) -> float | None:
        """There are enough nodes, and others may come until then."""
        return self._participant.last_call_until

    @property
    def missing(self) -> str:
        """The nodes that have not joined, in words."""
        return self._participant.missing
