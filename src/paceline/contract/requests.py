"""What a client asks of a machine, in JSON; `do` names the verb. Only types: programs do not import this."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class StartRequest(TypedDict):
    """An `Order` to start now; the archives of its code and of its checkpoint follow."""

    do: Literal["start"]
    order: Mapping[str, Any]


class RejoinRequest(TypedDict):
    """The client of a held job is back, after its connection broke."""

    do: Literal["rejoin"]
    name: str
    job_id: str
    seen: int  # how many answers it has received since it held the job


class PlanRequest(TypedDict):
    """An `Order` to plan."""

    do: Literal["plan"]
    order: Mapping[str, Any]
    start: Mapping[str, Any] | None  # the first attempt, as a coordinator would send it; None if it is unknown


class PreflightRequest(TypedDict):
    """What decides whether and where a job can run; without an `Order`, everything that a machine has."""

    do: Literal["preflight"]
    name: str  # of the machine, for the others
    token: str  # with which the machines authenticate each other when they try the routes between them
    order: Mapping[str, Any] | None
    environment: Mapping[str, Any] | None  # what is asked of its environment or its image
    imports: Sequence[str]  # what its script imports, as far as the client has it


class SlurmSubmitRequest(TypedDict):
    """A `SlurmOrder` to check; its `Order`, complete, follows if the job is to be submitted."""

    do: Literal["slurm_submit"]
    order: Mapping[str, Any]
