"""What an agent knows and waits for; `decider` decides by it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from paceline.node.journal.status import Failure
    from paceline.node.rendezvous.messages import Alone, Finish, Halt, Search, Start, ToNode
    from paceline.node.spec import NodeSpec

    Phase = Literal[
        "claiming", "held", "meeting", "searching", "open", "order", "saved", "cause", "elsewhere", "save", "programs",
        "terminate", "kill", "sweep", "stopped", "closed",
    ]  # fmt: skip

STOPPING = ("save", "programs", "terminate", "kill", "sweep", "stopped")


@dataclass(frozen=True)
class State:
    """What an agent knows and waits for.

    Attributes:
        phase: what it waits for; "open" for the next message.
        deadlines: by name: `leave`, `answer` (of the coordinator, to a node that stops), `join` (of other nodes),
            `limit` (of time), `doubt` (about the client), and that of the phase, which has its name.
        inbox: messages of the coordinator that wait, and None for a change of the ranks.
        waited: what was waited for already, to report the end of this attempt.
        stopping: the message because of which the ranks are being stopped; None at the end.
        grace: seconds between SIGTERM and SIGKILL, for this stop.
        signal: the signal because of which the ranks are being stopped; 0 for none.
        at_once: whether the ranks get no grace.
        stop_signal: the first signal that asked this node to stop.
        halted_by: the signal with which the coordinator stopped all ranks.
        leaves: whether another node is to take this one's place.
        preempted: whether the ranks were asked to save their state and end for good.
        start: the attempt that this node has agreed to, until it begins.
        is_newcomer: whether the coordinator waits for a report that the ranks could start.
        reported: whether the coordinator knows how this attempt went here.
        halted: whether no rank of this attempt is left or they are being stopped, or there was none.
        in_doubt: whether the client may end before all nodes know that they are a job.
        may_join: whether the other nodes may know of this one.
        has_no_client: whether a client elsewhere that followed the job is gone from this node.
        ends_with_starter: whether the other end of the lifeline is the first process of a container.
        has_met_all: whether an attempt was proposed.
        join_within: seconds for the other nodes to come, at first.
        hung: why this attempt is a failure: a rank of this node keeps the others waiting; "" if it is none.
        gone: the first loss of a node in this attempt, if the coordinator has told of one.
        timed_out: whether the time limit was reached.
        finish: how the job ends here, once that is decided.
    """

    spec: NodeSpec
    may_join: bool
    join_within: float
    phase: Phase = "open"
    deadlines: dict[str, float] = field(default_factory=dict)
    inbox: tuple[ToNode | None, ...] = ()
    waited: frozenset[str] = frozenset()
    stopping: Halt | Search | Alone | None = None
    grace: float = 0.0
    signal: int = 0
    at_once: bool = False
    stop_signal: int = 0
    halted_by: int = 0
    leaves: bool = False
    preempted: bool = False
    start: Start | None = None
    is_newcomer: bool = False
    reported: bool = False
    halted: bool = True
    in_doubt: bool = False
    has_no_client: bool = False
    ends_with_starter: bool = False
    has_met_all: bool = False
    timed_out: bool = False
    hung: str = ""
    gone: tuple[Failure, ...] = ()
    finish: Finish | None = None

    @property
    def may_go_on(self) -> bool:
        """Whether a message waits that can be acted on."""
        return bool(self.inbox) and self.phase == "open" and self.finish is None

    @property
    def may_close(self) -> bool:
        """Whether the end is decided, and no attempt is being stopped."""
        return self.finish is not None and self.phase not in STOPPING

    @property
    def counting(self) -> dict[str, float]:
        """The deadlines that count: all while the agent is open, else that of its phase, and of the client."""
        if self.phase == "open" and self.finish is None:
            return self.deadlines
        names = (self.phase, "doubt") if self.finish is None else (self.phase,)
        return {name: at for name, at in self.deadlines.items() if name in names}


def begin(spec: NodeSpec, *, has_lifeline: bool) -> State:
    """The state of an agent that has done nothing yet."""
    return State(spec, may_join=not has_lifeline or not spec.joins, join_within=spec.join_timeout)
