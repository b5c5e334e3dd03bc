"""One decision of an agent: what it changes in the state, and what it has done. The parts that `decider` shares."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.node.failure import culprit, node_failure, outcome
from paceline.node.signals import EXIT_REPLACED

if TYPE_CHECKING:
    from collections.abc import Iterable

    from typing_extensions import Unpack

    from paceline.contract.records import Cause, Failure, FinalState
    from paceline.node.journal.records import Record
    from paceline.node.journal.status import Status
    from paceline.node.ranks.launcher import Ranks
    from paceline.node.rendezvous.messages import ToCoordinator
    from paceline.node.rendezvous.participant import Participant

    from .messages import Action
    from .state import Phase, State

ANSWER_SECONDS = 10.0  # how long the coordinator may take to answer a node that asked to stop
_ENDS_ATTEMPT = ("halt", "search", "alone")  # messages


class View(NamedTuple):
    """What a decision depends on besides the event and the agent's own state, as of now."""

    ranks: Ranks  # of this node
    others: Participant  # the other nodes, as far as this one knows them
    status: Status  # what is recorded


class Step:
    """One decision.

    Attributes:
        state: of the agent from now on.
        actions: what it does.
    """

    def __init__(self, state: State, view: View, now: float) -> None:
        self.state, self.now = state, now
        self.ranks, self.others, self.status = view
        self.spec = state.spec
        self.actions: list[Action] = []

    def set(self, **changes: Any) -> None:
        """Change the state."""
        state = self.state
        if any(getattr(state, name) != value for name, value in changes.items()):
            self.state = replace(state, **changes)

    def do(self, action: Action) -> None:
        """Have something done."""
        self.actions.append(action)

    def send(self, message: ToCoordinator) -> None:
        """Send the coordinator a message."""
        self.do({"do": "send", "message": message})

    def write(self, *records: Record, save: bool = True, **changes: Unpack[Status]) -> None:
        """Record what happened, and what changes in the status."""
        self.do({"do": "write", "records": list(records), "changes": changes, "save": save})

    def arm(self, name: str, seconds: float) -> None:
        """Set a deadline. A node that stops or leaves waits for that alone."""
        if name in ("join", "limit") and (self.state.stop_signal or self.state.leaves):
            return
        self.set(deadlines={**self.state.deadlines, name: self.now + seconds})

    def disarm(self, *names: str) -> None:
        """Forget deadlines."""
        self.set(deadlines={name: at for name, at in self.state.deadlines.items() if name not in names})

    def enter(self, phase: Phase, seconds: float | None = None) -> None:
        """Wait for something, for some seconds if it has a deadline of its own."""
        self.disarm(self.state.phase)
        self.set(phase=phase)
        if seconds is not None:
            self.arm(phase, seconds)

    def await_answer(self) -> None:
        """A node that asked to stop waits for the coordinator; the ranks of the other nodes have their grace too."""
        state = self.state
        if state.phase == "open" and state.halted and state.stop_signal and state.finish is None:
            self.arm("answer", ANSWER_SECONDS + (0.0 if state.at_once else self.spec.grace))

    # -- the end -------------------------------------------------------------------------------------------------------

    def stop_alone(self) -> None:
        """End the job here without asking the coordinator."""
        code = 128 + (self.state.stop_signal or self.state.halted_by or signal.SIGTERM)
        self.set(finish={"do": "finish", "state": "STOPPED", "exit_code": code, "failure": None, "others": []})

    def fail(self, message: str, cause: Cause, exit_code: int = 1, before: Iterable[Failure] = ()) -> None:
        """End the job here for a reason that is not the failure of a rank; it goes on elsewhere if `EXIT_REPLACED`."""
        failure = node_failure(self.spec.node_rank or 0, self.host, cause, message, exit_code)
        state: FinalState = "STOPPED" if exit_code == EXIT_REPLACED else "FAILED"
        first = culprit(failures := [*before, failure])
        self.set(finish={"do": "finish", "state": state, "exit_code": first["exit_code"], **outcome(failures)})

    # -- what is known -------------------------------------------------------------------------------------------------

    @property
    def is_to_halt(self) -> bool:
        """Whether a message waits that ends the attempt."""
        return any(message is not None and message["do"] in _ENDS_ATTEMPT for message in self.state.inbox)

    @property
    def host(self) -> str:
        """The name of this machine."""
        return self.status["agent"]["host"]

    @property
    def node_rank(self) -> int:
        """This node's number; 0 before it has one."""
        return self.status["node_rank"] or 0

    def record_stop(self, number: int) -> None:
        """Record that the ranks are being stopped with the job."""
        self.write({"event": "stopping", "signal": int(number), "grace": self.spec.grace}, save=False)
