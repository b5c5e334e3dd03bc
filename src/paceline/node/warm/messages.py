"""What clients, warm servers and agents that these have forked say to each other, in JSON. Types alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict

from paceline.contract.messages import WarmRecord

if TYPE_CHECKING:
    from collections.abc import Sequence


class Message(TypedDict, total=False):
    """A request, or an answer; that to "describe" and "stop" is a `WarmRecord`."""

    do: Literal["describe", "stop", "compare", "start"]
    env: dict[str, str]  # of "compare" and "start": the variables
    cwd: str  # of "compare"
    run: str  # of "start": the run directory of a settled job, and the signals that its agent blocks
    mask: Sequence[int]
    same: bool  # whether a server would import the same
    ready: int  # the pid of an agent
    refused: str  # why no agent is started
    status: int  # the wait status of an agent that has ended
    why: str  # why a server could not begin; "" if it has, see `Ready`


class Ready(WarmRecord):
    """What a server says when it has begun."""

    why: Literal[""]


class Asked(TypedDict):
    """What a warm server is started for."""

    python: list[str]
    preload: list[str]
    seconds: float
    cwd: str
    folder: str
    key: str
    ready: int | None  # a descriptor that gets its record when it is ready
