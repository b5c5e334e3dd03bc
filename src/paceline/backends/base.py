"""What a backend is: something that runs jobs. The verbs know no more of one than this file says.

A backend subclasses `Backend` and is found by the name of its kind (see `registry`): one of paceline's own, or of the
entry-point group `paceline.backends` of an installed package. docs/backends.md shows how to write one.

A job starts in two steps. `prepare` finds everything that is wrong with it and starts nothing; `start`, or `run` for a
job that is watched, starts what was prepared. What not every backend can do is a protocol below (`Elastic`, `Checks`,
`Metered`, `TensorBoards`, `Volumes`): a backend that has its methods can do it.

Methods return what they find, and raise `UserError` for what a person can correct. Nothing but `cli/` prints.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

from paceline.job.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pydantic import BaseModel

    from paceline.job.job import Job, Node, Usage, Volume
    from paceline.job.spec import JobSpec

    from .check.inspect import Inspected
    from .check.survey import Survey
    from .foreground import Foreground, Shown


@dataclass(frozen=True)
class LogQuery:
    """Which lines of a job's logs.

    Attributes:
        ranks: of these; None for all.
        follow: go on until the job ends.
        tail: only the last so many lines; None for all.
        since: only what was written after this time, in seconds since the epoch.
        attempt: of this attempt; None for the last one, and with `follow` for those that come.
        timed: the lines' times are wanted, not only their order.
        raw: with `follow`, pass on unfinished lines too, such as a progress bar.
    """

    ranks: tuple[int, ...] | None = (0,)
    follow: bool = False
    tail: int | None = None
    since: float | None = None
    attempt: int | None = None
    timed: bool = False
    raw: bool = False


class LogLines(NamedTuple):
    """Lines with their ends: when they were written (about), and by whom.

    The last one of an attempt may have no end, and a line of more than 1 MiB comes in pieces that have none.
    """

    time: float
    attempt: int
    rank: int
    stream: str
    text: bytes


@dataclass(frozen=True)
class Shell:
    """A command to replace this process with, its variables and its folder."""

    command: tuple[str, ...]
    env: dict[str, str]
    folder: str


class ProgressReporter(Protocol):
    """Is called with how far something is."""

    def __call__(self, what: str, done: int, total: int | None) -> None:
        """What is being done, how much of it is done, and how much there is, or None."""

    def say(self, line: str) -> None:
        """Something that the user should read."""


class Listing(NamedTuple):
    """What `Backend.describe` found.

    Attributes:
        jobs: the newest first, or in the order of the names that were asked for.
        hidden: how many others there are that ended before `since`.
        warnings: what is not in there, and why: a line for each host that did not answer, for example.
    """

    jobs: list[Job]
    hidden: int = 0
    warnings: tuple[str, ...] = ()


MOST_RANKS = 4096  # on one node


@dataclass(frozen=True)
class Prepared:
    """A job that nothing is wrong with, so far as that can be known before it starts.

    A backend adds what it needs to start it in a subclass.

    Attributes:
        spec: the job, as complete as it is before it starts. A name that ends in `-` gets its number when it starts.
        ranks: for each rank its variables, those known before it starts.
        node_ranks: the most ranks that any node may have.
        is_part: whether this is one machine's part of a job that people start on each machine by hand.
    """

    spec: JobSpec
    ranks: Sequence[Mapping[str, Any]] = ()
    node_ranks: int = MOST_RANKS
    is_part: bool = False

    def text(self) -> str:
        """What `--dry-run` prints: here the job and its ranks in JSON, elsewhere a batch script or manifests."""
        return json.dumps({"job": self.spec.model_dump(mode="json"), "ranks": list(self.ranks)}, indent=2)


@dataclass(frozen=True)
class Flag:
    """A flag that sets an option of a backend, for every verb.

    Attributes:
        option: the field of `Backend.Options` that it sets.
        names: such as `--ssh-port`; the first one stands in messages.
        metavar: what stands for its value in `--help`.
        help: its line there.
        letter: for it, in the verbs that start jobs; other verbs have other meanings for letters.
        number: the least and the greatest value of a whole number; None for text.
        names_hosts: `list`: its value is HOST[:SLOTS],…; `file`: that of a file with such lines. Hosts that are named
            so need no target in the settings.
    """

    option: str
    names: tuple[str, ...]
    metavar: str
    help: str
    letter: str | None = None
    number: tuple[int, int] | None = None
    names_hosts: Literal["list", "file"] | None = None

    @property
    def parameter(self) -> str:
        """What click calls its value."""
        return self.names[-1].lstrip("-").replace("-", "_")


class Backend(ABC):
    """Something that runs jobs. Every method takes many jobs at once where that saves calls.

    Attributes:
        Options: a pydantic model of what its targets say in the settings, beside `backend`; None: nothing.
        unsupported: the fields of a `JobSpec` that mean nothing to it, and why; a job that sets one is refused. A field
            in another one is `rendezvous.node_rank`, for example.
        name: of the target; of this machine `local`.
        where: the flags that lead to it, with a space before them.
    """

    Options: ClassVar[type[BaseModel] | None] = None
    unsupported: ClassVar[Mapping[str, str]] = {}

    def __init__(self, name: str, options: Any = None, where: str = "") -> None:
        """Connect to nothing yet.

        Args:
            name: see the attribute.
            options: an instance of `Options`.
            where: see the attribute.
        """
        self.name, self.options, self.where = name, options, where

    # -- start ---------------------------------------------------------------------------------------------------------

    @abstractmethod
    def prepare(self, spec: JobSpec, *, detached: bool = True) -> Prepared:
        """Find out what `start` or `run` would do with a job. Starts nothing and leaves nothing.

        Begin it with `refuse_unsupported`.

        Args:
            spec: what the user asks for.
            detached: whether the job is to go on by itself; otherwise it ends with this process.

        Raises:
            UserError: it cannot run there, or its name is taken.
        """

    @abstractmethod
    def start(self, prepared: Prepared, progress: ProgressReporter) -> Job:
        """Start a job that goes on by itself.

        Args:
            prepared: by this backend, `detached`.
            progress: is called with how far it is.

        Raises:
            UserError: it cannot run there after all; then nothing of it is left.
        """

    def run(self, prepared: Prepared, progress: ProgressReporter, shown: Shown) -> Foreground:
        """Start a job that ends with this process, which watches it.

        Args:
            prepared: by this backend, not `detached`.
            progress: is called with how far it is.
            shown: what of its output is watched.

        Raises:
            UserError: as for `start`.
        """
        raise UserError(f"{self.name} cannot run jobs in the foreground; start it with paceline submit{self.where}")

    def refuse_unsupported(self, spec: JobSpec) -> None:
        """See `unsupported`.

        Raises:
            UserError: the job sets such a field.
        """
        from paceline.job.flags import flag_of

        for field, why in self.unsupported.items():
            given, default = _field(spec, field)
            if given != default:
                raise UserError(f"{flag_of(tuple(field.split('.')))}: {why}; leave it out")

    # -- look ----------------------------------------------------------------------------------------------------------

    @abstractmethod
    def describe(self, names: Sequence[str] | None = None, since: float | None = None) -> Listing:
        """These jobs, or all; those that are unknown are left out.

        Args:
            names: of the jobs; None for all.
            since: leave out, of all, those that ended before this time, in seconds since the epoch.

        Raises:
            UserError: it is not known whether there is a job of such a name.
        """

    @abstractmethod
    def spec(self, name: str) -> JobSpec:
        """What a job's user asked for."""

    @abstractmethod
    def events(self, name: str) -> list[dict[str, Any]]:
        """What happened to a job: time, event, and details; of a job on several machines the host, too."""

    @abstractmethod
    def logs(self, name: str, query: LogQuery) -> Iterator[LogLines]:
        """Lines of a job in the order in which they were written; a query that cannot be met is a UserError at once."""

    # -- act -----------------------------------------------------------------------------------------------------------

    @abstractmethod
    def wait(
        self, names: Sequence[str], seconds: float | None = None, tick: Callable[[int], None] = lambda ended: None
    ) -> bool:
        """Come back when these jobs have ended or the time is over; returns whether they have.

        `tick` is called now and then with how many of them have.
        """

    @abstractmethod
    def shell(self, name: str, rank: int, command: Sequence[str]) -> Shell:
        """How to run a command, or a shell if it is empty, where a rank runs, and as it does."""

    @abstractmethod
    def stop(self, names: Sequence[str], now: bool = False) -> Mapping[str, str]:
        """Ask jobs to stop: cleanly, with their grace, or at once. Jobs that have ended are left as they are.

        Returns:
            Of jobs that were not reached everywhere, which others are left, and why: name → a line.
        """

    @abstractmethod
    def delete(self, names: Sequence[str]) -> list[str]:
        """Remove jobs that have ended, with all that was written for them; returns what is left, a line each."""

    def forget(self, name: str) -> list[str]:
        """Remove what can be reached of a LOST job, and know it no more; returns the hosts where something is left.

        Raises:
            UserError: it cannot be forgotten.
        """
        raise UserError(f"job {name} is on another machine; delete it there")


def _field(spec: JobSpec, field: str) -> tuple[Any, Any]:
    """The value of a field, which may be in another one, and its default."""
    value: Any = spec
    *above, last = field.split(".")
    for part in above:
        value = getattr(value, part)
    return getattr(value, last), type(value).model_fields[last].get_default(call_default_factory=True)


# -- what not every backend can do -------------------------------------------------------------------------------------


@runtime_checkable
class Elastic(Protocol):
    """The machines of a job that runs can become more or fewer."""

    def scaleout(self, name: str, more: Sequence[str] | int | None) -> list[str]:
        """Have more nodes take part in a job: these hosts, so many, or None for all that may; returns which come.

        Raises:
            UserError: one cannot; then none does.
        """

    def scalein(self, name: str, fewer: Sequence[str] | int) -> list[str]:
        """Have these hosts, or so many, leave a job, which goes on without them; returns which leave.

        Raises:
            UserError: one takes no part in it, or too few would be left.
        """


@runtime_checkable
class Checks(Protocol):
    """It can say what would go wrong with jobs before there are any."""

    def check(self, progress: ProgressReporter) -> Inspected | Survey:
        """What there is, and what would go wrong; starts no job."""


@runtime_checkable
class Metered(Protocol):
    """What jobs and machines use is measured."""

    def nodes(self, warn: Callable[[str], None]) -> list[Node]:
        """The machines, and what is in use there; `warn` is called with why one is left out."""

    def usage(self, names: Sequence[str], warn: Callable[[str], None]) -> dict[str, Usage]:
        """What these jobs use now, over a moment or since the last call; those that do not run are left out."""


@runtime_checkable
class TensorBoards(Protocol):
    """Jobs have TensorBoards."""

    def open_tensorboard(self, name: str, logdir: str | None, warn: Callable[[str], None]) -> str:
        """The address of a job's TensorBoard, which is started if there is none.

        Args:
            name: of the job.
            logdir: what it shows; None for its default.
            warn: is called with how to reach it, where the address alone does not do.
        """

    def reach_tensorboard(self, name: str, url: str) -> str | None:
        """What to type to reach the address of a job's TensorBoard from here; None where the address alone does."""

    def close_tensorboard(self, name: str) -> bool:
        """End it; returns whether there was one."""


@runtime_checkable
class Volumes(Protocol):
    """Jobs can use named volumes."""

    def volumes(self) -> list[Volume]:
        """The named volumes."""


_LACKING = {
    Elastic: "its jobs keep the machines that they started on",
    Checks: "it cannot be checked",
    Metered: "it does not measure what jobs and machines use",
    TensorBoards: "it starts no TensorBoard",
    Volumes: "it has no named volumes",
}
Ability = TypeVar("Ability", Elastic, Checks, Metered, TensorBoards, Volumes)


def able(backend: Backend, ability: type[Ability]) -> Ability:
    """The backend as what has an ability.

    Raises:
        UserError: it has not.
    """
    if not isinstance(backend, ability):
        raise UserError(f"{backend.name}: {_LACKING[ability]}")
    return backend
