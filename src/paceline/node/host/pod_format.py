"""What a pod's program and clients agree on: its variables, the lines of its output, and its exit codes."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from paceline.node.signals import EXIT_REPLACED

if TYPE_CHECKING:
    from paceline.contract.records import CheckpointRecord, EventFacts, Failure, NodeHistory, ProgressRecord, State

    class PodEvent(EventFacts, total=False):
        """An event in the output of a pod."""

        ranks: list[tuple[int, int]]  # of `started`: each rank of the pod, and its local rank
        node: NodeHistory  # of `HISTORY`

    class PodReport(TypedDict, total=False):
        """How the job has ended on a node, in its pod's termination message; see `JobRecord`."""

        exit_code: int
        refused: str  # why it could not run
        failure: Failure
        state: State
        error: str
        attempt: int
        restarts: int
        framework: str
        started: float
        finished: float
        progress: ProgressRecord
        checkpoint: CheckpointRecord
        slow: list[str]
        ranks: list[tuple[int, int | None]]  # with the exit code of each
        commit: str  # of the code


FIRST_POD = "PACELINE_FIRST_POD"  # the node rank of the first pod of a role, where pods are numbered by role

MARK = b"[paceline] "  # begins the line of an event
RANK = b"[rank %d"  # begins a line of a rank
ATTEMPT = b" attempt %d"  # follows in later attempts than the first
STDERR = b" stderr"  # follows, where stderr is kept apart
TRACEBACK = b" traceback"  # follows in a line of the traceback that ended the rank
PIECE = b" +] "  # ends the prefix of a piece of a line, which ends without a line end
WHOLE = b"] "  # ends the prefix of a line, or of its last piece
HISTORY = "history"  # the event behind the last line: what the node has used and logged, a `NodeHistory` as `node`
LONGEST = 64 << 10  # bytes of a line; a longer one is written in pieces

KILLED = 137
REPLACED = (KILLED, EXIT_REPLACED)  # exit codes of a pod that was taken away: another one comes in its place
