"""What an agent knows and waits for; `decider` decides by it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from paceline.contract.records import Failure
    from paceline.node.rendezvous.messages import Alone, Finish, Halt, Search, Start, ToNode
    from paceline.node.spec import NodeSpec

    Phase = Literal[
        "claiming", "held", "meeting", "searching", "open", "order", "saved", "cause", "elsewhere", "save", "programs",
        "terminate", "kill", "sweep", "stopped", "closed",
    ]  # fmt: skip

STOPPING = ("save", "programs", "terminate", "kill", "sweep", "stopped")


@dataclass(frozen=True)
class State:
    """What an agent knows and waits for."""

    spec: NodeSpec
    may_join: bool  # whether the other nodes may know of this one
    join_within: float  # seconds for the other nodes to come, at first
    phase: Phase = "open"  # what it waits for; "open" for the next message
    # by name: `leave`, `answer` (of the coordinator, to a node that stops), `join` (of other nodes), `limit` (of time),
    # `doubt` (about the client), and that of the phase, which has its name
    deadlines: dict[str, float] = field(default_factory=dict)
    inbox: tuple[ToNode | None, ...] = ()  # messages of the coordinator that wait, and None for a change of the ranks
    waited: frozenset[str] = frozenset()  # what was waited for already, to report the end of this attempt
    # the message because of which the ranks are being stopped; None at the end
    stopping: Halt | Search | Alone | None = None
    grace: float = 0.0  # seconds between SIGTERM and SIGKILL, for this stop
    signal: int = 0  # the signal because of which the ranks are being stopped; 0 for none
    at_once: bool = False  # whether the ranks get no grace
    stop_signal: int = 0  # the first signal that asked this node to stop
    halted_by: int = 0  # the signal with which the coordinator stopped all ranks
    leaves: bool = False  # whether another node is to take this one's place
    preempted: bool = False  # whether the ranks were asked to save their state and end for good
    start: Start | None = None  # the attempt that this node has agreed to, until it begins
    is_newcomer: bool = False  # whether the coordinator waits for a report that the ranks could start
    reported: bool = False  # whether the coordinator knows how this attempt went here
    halted: bool = True  # whether no rank of this attempt is left or they are being stopped, or there was none
    in_doubt: bool = False  # whether the client may end before all nodes know that they are a job
    has_no_client: bool = False  # whether a client elsewhere that followed the job is gone from this node
    ends_with_starter: bool = False  # whether the other end of the lifeline is the first process of a container
    has_met_all: bool = False  # whether an attempt was proposed
    is_suspended: bool = False  # whether its devices are given back until it is resumed
    is_to_be_suspended: bool = False  # whether the coordinator is to be told so, once there is one
    limit_left: float | None = None  # seconds of the time limit that were left when the job was suspended first
    timed_out: bool = False  # whether the time limit was reached
    hung: str = ""  # why this attempt is a failure: a rank of this node keeps the others waiting; "" if it is none
    gone: tuple[Failure, ...] = ()  # the first loss of a node in this attempt, if the coordinator has told of one
    finish: Finish | None = None  # how the job ends here, once that is decided

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
