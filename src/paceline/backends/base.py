"""The interface of a backend, which runs jobs. The verbs use nothing else of it.

A backend subclasses `Backend` and is found by the name of its kind (see `registry`): one of paceline's own, or of the
entry-point group `paceline.backends` of an installed package. docs/backends.md shows how to write one.

A job starts in two steps. `prepare` finds everything that is wrong with it and starts nothing; `start`, or `run` for a
job in the foreground, starts what was prepared. Optional abilities are protocols (`Elastic`, `Checks`, `Metered`,
`Moves`, `Recorded`, `Suspends`, `TensorBoards`, `Volumes`): a backend has an ability if it has the methods of its
protocol.

Methods return results, and raise `UserError` for errors that a user can correct. Only `cli/` prints.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

from paceline.job.errors import UserError, nearest
from paceline.job.paths import where_flags_of
from paceline.node.logs.query import LogLines as LogLines  # noqa: PLC0414 - a part of this interface
from paceline.node.logs.query import LogQuery as LogQuery  # noqa: PLC0414 - likewise

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from paceline.contract.messages import WarmWanted
    from paceline.contract.records import EventRecord, Inventory, NodeHistory
    from paceline.contract.stands import Stand
    from paceline.job.job import Contents, Job, Node, Usage, Volume, WarmServer
    from paceline.job.model import Model
    from paceline.job.spec import JobSpec

    from .check.inspect import Inspected
    from .check.report import Report, Survey
    from .foreground import Foreground, RankStreams


class Incomplete(UserError):
    """Log lines of a machine may be missing that could not be reached, or no longer; all others have been read."""

    __module__ = "paceline.jobs"  # where users find it


@dataclass(frozen=True)
class Shell:
    """A command that replaces this process, with its variables and its folder."""

    command: tuple[str, ...]
    env: dict[str, str]
    folder: str


class ProgressReporter(Protocol):
    """Receives the progress of an operation."""

    def __call__(self, what: str, done: int, total: int | None, now: str = "") -> None:
        """Report what is being done, how much of it is done, and how much there is (None if unknown).

        `now` says more about this moment; only terminals show it.
        """

    def say(self, line: str) -> None:
        """Show a line to the user."""


class Listing(NamedTuple):
    """What `Backend.describe` found.

    Attributes:
        jobs: the newest first, or in the order of the names that were asked for.
        hidden: how many other jobs ended before `since`.
        warnings: what is missing, and why; for example one line per host that did not answer.
    """

    jobs: list[Job]
    hidden: int = 0
    warnings: tuple[str, ...] = ()


MOST_RANKS = 4096  # on one node


@dataclass(frozen=True)
class Prepared:
    """A job that has passed all checks that are possible before it starts.

    A backend may subclass it and add what it needs to start the job.

    Attributes:
        spec: the job, as complete as it is before the start. A name that ends in `-` gets its number at the start.
        ranks: the variables of each rank that are known before the start.
        node_ranks: the greatest number of ranks on a node.
        is_part: whether this is one machine's part of a job that is started on each machine by hand.
        notes: lines for the user, about what may be unexpected.
        python: the command that runs Python for the ranks of each node; none for a program that is not Python's.
        installs: a line about packages that are installed when it starts; "" if none are.
    """

    spec: JobSpec
    ranks: Sequence[Mapping[str, str]] = ()
    node_ranks: int = MOST_RANKS
    is_part: bool = False
    notes: tuple[str, ...] = ()
    python: tuple[str, ...] = ()
    installs: str = ""

    def text(self) -> str:
        """What `--dry-run` prints: here the job and its ranks in JSON, elsewhere a batch script or manifests."""
        shown = {"job": self.spec.dumped(), "python": list(self.python), "ranks": list(self.ranks)}
        return json.dumps(shown, indent=2)


@dataclass(frozen=True)
class Flag:
    """A flag that sets an option of a backend, for every verb or for those that start jobs.

    Attributes:
        option: the field of `Backend.Options` that it sets.
        names: such as `--ssh-port`; messages use the first one.
        metavar: the placeholder of its value in `--help`.
        help: its help text.
        letter: a short form, in the verbs that start jobs; in other verbs letters have other meanings.
        number: the least and the greatest value of a whole number; None for text.
        names_hosts: `list` if its value is HOST[:SLOTS],…; `file` if it is a file with such lines. Such hosts need no
            target in the settings.
        is_switch: it has no value; given, it sets the option to True.
        job: the option is one job's, which is kept with it; only the verbs that start jobs have the flag.
        repeats: it is NAME=VALUE, or NAME, and may be given several times; the option is a table.
        values: that it may have, where they are few; the Tab key completes them.
    """

    option: str
    names: tuple[str, ...]
    metavar: str
    help: str
    letter: str | None = None
    number: tuple[int, int] | None = None
    names_hosts: Literal["list", "file"] | None = None
    is_switch: bool = False
    job: bool = False
    repeats: bool = False
    values: tuple[str, ...] = ()

    @property
    def parameter(self) -> str:
        """The name of click's parameter."""
        return self.names[-1].lstrip("-").replace("-", "_")


@dataclass(frozen=True)
class Allocation:
    """Nodes that a scheduler has given to this shell or script, for as long as that runs.

    Attributes:
        id: the scheduler's.
        hosts: the names of the nodes, by their numbers.
        ranks: on each node, as its user has asked the scheduler for them; None if he has not.
        is_here: whether it is one node, and this process is on it.
    """

    id: str
    hosts: tuple[str, ...]
    ranks: int | None = None
    is_here: bool = False


class Backend(ABC):
    """Runs jobs. Methods take several jobs at once if that saves calls.

    Attributes:
        Options: a model of a target's keys other than `backend`; None if it has none.
        flags: that set its options. Those of one job, with `job`, can be set by --option and in job files too.
        unsupported: the fields of a `JobSpec` that it cannot honour, each with the reason; a job that sets one is
            refused. A nested field is written like `rendezvous.node_rank`.
        lacks: the name of an ability that it does not have, such as `Moves` → why, and what to do instead.
        name: of the target; `local` for this machine.
        where: the flags that select it, with a space before them.
        setup: the commands of its target that run on a node before the ranks of each job.
        environment: the packages of its jobs that do not say.
    """

    Options: ClassVar[type[Model] | None] = None
    flags: ClassVar[Sequence[Flag]] = ()
    unsupported: ClassVar[Mapping[str, str]] = {}
    lacks: ClassVar[Mapping[str, str]] = {}

    def __init__(self, name: str, options: Any = None, where: str = "") -> None:
        """Make no connection yet."""
        self.name, self.options, self.where = name, options, where
        self.setup: tuple[str, ...] = ()
        self.environment: str | None = None

    def where_of(self, name: str) -> str:
        """The flags that a command needs to find a job, with a space before them; none if it is found without."""
        return where_flags_of(name, self.name, self.where, getattr(self.options, "hosts", None))

    # -- start ---------------------------------------------------------------------------------------------------------

    @abstractmethod
    def prepare(self, spec: JobSpec, *, detached: bool = True) -> Prepared:
        """Check a job, and find out what `start` or `run` would do with it. Starts nothing and leaves nothing behind.

        An implementation calls `refuse_unsupported` and `with_setup` first.

        Args:
            spec: what the user asks for.
            detached: whether the job goes on without the client; otherwise it ends with this process.

        Raises:
            UserError: it cannot run there, or its name is taken.
        """

    @abstractmethod
    def start(self, prepared: Prepared, progress: ProgressReporter) -> Job:
        """Start a job that goes on without the client.

        Args:
            prepared: by this backend, `detached`.
            progress: receives the progress.

        Raises:
            UserError: it cannot run there after all; nothing of it is left.
        """

    def run(self, prepared: Prepared, progress: ProgressReporter, rank_streams: RankStreams) -> Foreground:
        """Start a job in the foreground: it ends with this process.

        Args:
            prepared: by this backend, not `detached`.
            progress: receives the progress.
            rank_streams: which output is shown.

        Raises:
            UserError: as for `start`.
        """
        raise UserError(f"{self.name} cannot run jobs in the foreground; start it with paceline submit{self.where}")

    def within(self, allocation: Allocation) -> Backend | None:
        """This backend with `run` on these nodes; None if it starts no jobs in allocations, or on another cluster."""
        return None

    def refuse_unsupported(self, spec: JobSpec) -> None:
        """Refuse a job that sets a field in `unsupported`, or an option that this backend does not know.

        Raises:
            UserError: the job sets such a field or option.
        """
        from paceline.job.flags import flag_of

        for field, why in self.unsupported.items():
            given, default = _field(self.with_setup(spec), field)
            if given != default:
                raise UserError(f"{flag_of(tuple(field.split('.')))}: {why}{'' if '; ' in why else '; leave it out'}")
        known = self.job_options()
        for option in spec.options:
            if option not in known:
                hint = nearest(option, known) if known else "leave it out"
                raise UserError(f"--option {option}: {self.name} has no such option; {hint}")

    def with_setup(self, spec: JobSpec) -> JobSpec:
        """A job with the commands of its target before its own, which it has already if it is submitted again.

        And with its target's environment, unless it names one.
        """
        has_them = spec.setup[: len(self.setup)] == self.setup
        spec = spec if has_them else spec.changed({"setup": (*self.setup, *spec.setup)})
        environment = spec.environment or self.environment
        return spec.changed({"environment": None if environment == "none" else environment})

    @classmethod
    def job_options(cls) -> dict[str, Flag]:
        """Option of one job → the flag that sets it."""
        return {flag.option: flag for flag in cls.flags if flag.job}

    def replaced(self, job: JobSpec, changes: Mapping[str, Any]) -> JobSpec:
        """A job that is submitted again with changes, without its options that say the same as one of these fields.

        And without its fields that say the same as one of these options.
        """
        return job

    def with_options(self, spec: JobSpec) -> tuple[JobSpec, Any]:
        """A job with its options in the form in which they are kept, and an instance of `Options` for it.

        The job's options take precedence over the target's. Those whose flag `repeats` are added to the target's.

        Raises:
            UserError: one is invalid.
        """
        if not spec.options:
            return spec, self.options
        target: dict[str, Any] = self.options.dumped(only_given=True)
        dumped = self._validated({**target, **spec.options}).dumped()
        kept, whole = {}, target
        for option, given in spec.options.items():
            is_table = self.job_options()[option].repeats
            kept[option] = given if is_table else dumped[option]
            before = {name: it for name, it in target.get(option, {}).items() if name not in given} if is_table else {}
            whole = {**whole, option: {**before, **given} if is_table else given}
        return spec.changed({"options": kept}), self._validated(whole)

    def _validated(self, options: Mapping[str, Any]) -> Model:
        from paceline.job.model import InvalidError

        assert self.Options is not None
        known = self.job_options()
        try:
            return self.Options.validated(options)
        except InvalidError as error:
            raise error.named(lambda entry: known[str(entry[0])].names[0]) from None

    # -- look ----------------------------------------------------------------------------------------------------------

    @abstractmethod
    def describe(self, names: Sequence[str] | None = None, since: float | None = None) -> Listing:
        """Describe these jobs, or all; unknown names are left out.

        Args:
            names: of the jobs; None for all.
            since: if `names` is None, leave out jobs that ended before this time, in seconds since the epoch.

        Raises:
            UserError: it is not known whether there is a job of such a name.
        """

    @property
    def machines(self) -> int:
        """How many machines are asked when something is read; the time that this may take grows with them."""
        return 1

    def look_until(self, deadline: float) -> None:
        """From now on wait for no machine beyond this time (`time.monotonic`) where something is only read.

        What does not answer in time is treated as what does not answer. A backend that waits for nothing does nothing.
        """
        return

    def say_who_is_waited_for(self, say: Callable[[str], None]) -> None:
        """From now on say, once of each, which machines have not answered while it waits for them.

        A backend that asks no machines does nothing.
        """
        return

    def ask_on(self, say: Callable[[str], None]) -> None:
        """From now on ask a scheduler that does not answer again, without end, and say once that it does not.

        For verbs that follow a job: it goes on whatever its scheduler answers. A backend whose `wait` and `logs` do so
        anyway does nothing.
        """
        return

    def look_repeatedly(self) -> None:
        """From now on `describe` is called every few seconds: a backend may have changes sent instead of asking."""
        return

    def keep_expired(self) -> None:
        """From now on `describe` removes no jobs: those whose time to live is over are described like others."""
        return

    def contents(self, names: Sequence[str]) -> Mapping[str, Contents]:
        """What `delete` would remove of these jobs; leaves out those of which that is not known."""
        return {}

    @abstractmethod
    def spec(self, name: str) -> JobSpec:
        """The specification with which a job was submitted."""

    @abstractmethod
    def events(self, name: str) -> list[EventRecord]:
        """The events of a job: time, event, and details; the host too if the job has several."""

    @abstractmethod
    def logs(self, name: str, query: LogQuery) -> Iterator[LogLines]:
        """Lines of a job in the order in which they were written; an invalid query raises UserError at once.

        Raises:
            Incomplete: after the last line, if those of some machine may be missing.
        """

    # -- act -----------------------------------------------------------------------------------------------------------

    @abstractmethod
    def wait(
        self, names: Sequence[str], seconds: float | None = None, tick: Callable[[int], None] = lambda ended: None
    ) -> bool:
        """Wait until these jobs have ended, or the time is over; returns whether they have ended.

        `tick` is called from time to time with how many have ended.
        """

    @abstractmethod
    def shell(self, name: str, rank: int, command: Sequence[str], *, terminal: bool = False) -> Shell:
        """A command (a shell if it is empty) in the folder of a rank, with its variables.

        Args:
            name: of the job.
            rank: of the job.
            command: with its arguments.
            terminal: whether the user who types has one, which the command gets.
        """

    @abstractmethod
    def stop(self, names: Sequence[str], now: bool = False) -> Mapping[str, str]:
        """Ask jobs to stop: within their grace period, or at once. Jobs that have ended are not changed.

        Returns:
            For jobs that were not reached on all hosts: name → a line that says where and why.
        """

    def can_stop(self, name: str) -> bool:
        """Whether something of a LOST job may still run where it can be stopped."""
        return False

    def unended_on(self, name: str) -> Sequence[str]:
        """The hosts that answer, and say that a LOST job has not ended there."""
        return ()

    @abstractmethod
    def delete(self, names: Sequence[str]) -> list[str]:
        """Remove jobs that have ended, with all their files; returns one line for each remainder."""

    def forget(self, name: str) -> list[str]:
        """Remove what can be reached of a LOST job, and forget it; returns the hosts where something is left.

        Raises:
            UserError: it cannot be forgotten.
        """
        raise UserError(f"job {name} is on another machine; delete it there")


def _field(spec: JobSpec, field: str) -> tuple[Any, Any]:
    """The value of a field, which may be nested, and its default."""
    value: Any = spec
    *above, last = field.split(".")
    for part in above:
        value = getattr(value, part)
    return getattr(value, last), type(value).default(last)


# -- optional abilities ------------------------------------------------------------------------------------------------


@runtime_checkable
class Elastic(Protocol):
    """Machines can be added to and removed from a running job."""

    def scaleout(self, name: str, more: Sequence[str] | int | None) -> list[str]:
        """Add nodes to a job: these hosts, this number, or None for all possible; returns the added ones.

        Raises:
            UserError: one cannot be added; then none is, and the job goes on as it is.
        """

    def scalein(self, name: str, fewer: Sequence[str] | int) -> list[str]:
        """Remove these hosts, or this number, from a job, which goes on without them; returns the removed ones.

        Raises:
            UserError: one takes no part in it, or too few would be left.
        """


@runtime_checkable
class Suspends(Protocol):
    """Jobs can give their devices back for a while, and keep their place."""

    def suspend(self, names: Sequence[str]) -> Mapping[str, str]:
        """Have jobs save, end their ranks and give their devices back. Jobs that are suspended are not changed.

        Returns:
            As `stop`.

        Raises:
            UserError: one cannot be suspended now; then none is.
        """

    def resume(self, names: Sequence[str]) -> Mapping[str, str]:
        """Have suspended jobs get devices again, and go on from their last checkpoint; see `suspend`.

        One that is still being suspended goes on, too; others are not changed.
        """


@runtime_checkable
class Checks(Protocol):
    """It can be checked without a job."""

    def check(self, progress: ProgressReporter) -> Inspected | Survey | Report:
        """Find out what there is, and what would go wrong with a job; leaves none behind."""


class EnvironmentLook(NamedTuple):
    """What a machine has for an environment.

    Attributes:
        host: its name.
        python: the version of Python that it would get, or has.
        builder: what installs it: uv, pip or conda.
        origin: where packages come from: an index there, wheels that are sent, or "" if it is installed already.
        bytes: its size, or that of what is sent; None if that is not known.
        seconds: how long the last installation took; None if there was none.
    """

    host: str
    python: str
    builder: str
    origin: str
    bytes: int | None
    seconds: float | None


class ImageLook(NamedTuple):
    """What a machine has for an image.

    Attributes:
        host: its name.
        program: what would run it: podman, docker, apptainer or singularity; "" if nothing can.
        is_there: whether it is on the machine already, and not pulled first.
        problem: why nothing can run it, and what to do; "" if something can.
    """

    host: str
    program: str
    is_there: bool
    problem: str


class InstalledEnvironment(NamedTuple):
    """An environment of a machine: its name there, what the user called it, its size, and when a job used it last.

    `source` is None for one whose installation was interrupted; `used` is in seconds since the epoch.
    """

    host: str
    name: str
    source: str | None
    bytes: int
    used: float


class Installer(Protocol):
    """Installs packages for jobs on the machines of a backend."""

    def look(self, source: str) -> list[EnvironmentLook]:
        """What would happen on each machine for a job with this environment.

        Raises:
            UserError: it cannot be installed on one.
        """

    def installed(self) -> list[InstalledEnvironment]:
        """The environments of the machines."""

    def remove(self, going: Sequence[InstalledEnvironment]) -> list[InstalledEnvironment]:
        """Remove environments, but none that a job uses; returns those that are gone."""


@runtime_checkable
class Installs(Protocol):
    """The packages of its jobs can be installed on its machines: `--environment`."""

    def installer(self) -> Installer:
        """What installs them."""


@runtime_checkable
class RunsImages(Protocol):
    """Its machines run the images of jobs by what is installed there: `--image`."""

    def images(self, image: str) -> list[ImageLook]:
        """What each machine has for an image."""


@runtime_checkable
class Metered(Protocol):
    """It measures what jobs and machines use."""

    def nodes(self, warn: Callable[[str], None]) -> list[Node]:
        """The machines, and what is in use; `warn` gets the reason if one is left out."""

    def usage(self, names: Sequence[str], warn: Callable[[str], None]) -> dict[str, Usage]:
        """What these jobs use, as it was measured last; jobs that do not run are left out."""


class History(NamedTuple):
    """What `Recorded.history` found.

    Attributes:
        nodes: of each node what it has written, by node rank; a node that was replaced has several.
        warnings: what is missing, and why; for example one line per host that did not answer.
    """

    nodes: list[NodeHistory]
    warnings: tuple[str, ...] = ()


@runtime_checkable
class Recorded(Protocol):
    """What its jobs use over time, and what they log, is kept."""

    def history(self, name: str, since: float = 0.0) -> History:
        """What a job has used and logged until now.

        Args:
            name: of the job.
            since: only what was written after this time, in seconds since the epoch.

        Raises:
            UserError: no machine answers that may have it.
        """


@runtime_checkable
class Sketched(Protocol):
    """What many of its jobs have logged can be seen at a glance."""

    def losses(self, names: Sequence[str]) -> dict[str, list[float]]:
        """The losses that these jobs have logged, some 40 of each over all its steps; jobs without are left out."""


@runtime_checkable
class Listed(Protocol):
    """Its machines have names before one of them answers."""

    def silent_nodes(self) -> list[Node]:
        """The machines as those that do not answer."""


@runtime_checkable
class Watched(Protocol):
    """Its ranks can be asked where they are."""

    def stands(self, name: str) -> list[Stand]:
        """Where the ranks of a job are that runs, on all machines that answer; takes some seconds.

        Raises:
            UserError: no rank of it runs.
        """


@runtime_checkable
class TensorBoards(Protocol):
    """Jobs have TensorBoards."""

    def open_tensorboard(self, name: str, logdir: str | None, warn: Callable[[str], None]) -> str:
        """The address of a job's TensorBoard, which is started if there is none.

        Args:
            name: of the job.
            logdir: what it shows; None for its default.
            warn: gets a line that says how to reach it, if the address is not enough.
        """

    def reach_tensorboard(self, name: str, url: str) -> str | None:
        """What to type to reach the address of a job's TensorBoard from here; None where the address alone does."""

    def close_tensorboard(self, name: str) -> bool:
        """End it; returns whether there was one."""


class PortForward(Protocol):
    """A port of this machine that leads to a TensorBoard elsewhere, until its context ends.

    Attributes:
        url: the address here.
    """

    @property
    def url(self) -> str:
        """See above."""

    def serve(self) -> None:
        """Lead connections there; returns when there is nothing to lead to any more."""


@runtime_checkable
class Forwards(Protocol):
    """TensorBoards are led to ports of this machine."""

    def forward_tensorboard(
        self, name: str, url: str, warn: Callable[[str], None], *, port: int | None = None
    ) -> AbstractContextManager[PortForward]:
        """Lead a port of this machine to the TensorBoard of a job.

        Args:
            name: of the job.
            url: of its TensorBoard, as `open_tensorboard` said.
            warn: gets a line about each connection that cannot be led there.
            port: of this machine; None takes a free one.

        Raises:
            UserError: it cannot be reached, or the port is taken.
        """


@runtime_checkable
class Warms(Protocol):
    """Processes that have imported a framework can wait there for the next job; see `node/warm`."""

    def start_warm(self, wanted: WarmWanted, warn: Callable[[str], None]) -> list[WarmServer]:
        """Start one on each machine, and wait until they are ready.

        Raises:
            UserError: one cannot start.
        """

    def ask_warm(self, what: Literal["describe", "stop"], warn: Callable[[str], None]) -> list[WarmServer]:
        """This user's processes of that kind; "stop" ends them, and the jobs that they have started go on."""


@runtime_checkable
class Volumes(Protocol):
    """Jobs can use named volumes."""

    def volumes(self, warn: Callable[[str], None]) -> list[Volume]:
        """The named volumes; `warn` gets the reason if a machine does not say whether it can read them."""


@dataclass(frozen=True)
class JobExport:
    """A job's code and newest checkpoint, for a job on another target that resumes it.

    Attributes:
        name: of the job.
        where: the machine that has the newest checkpoint, for messages.
        inventory: what that machine has.
        fetch: writes an archive (tar) to a file: of the "code", or of the "checkpoint".
        notes: lines for the user.
    """

    name: str
    where: str
    inventory: Inventory
    fetch: Callable[[Literal["code", "checkpoint"], Path, ProgressReporter], None]
    notes: tuple[str, ...] = ()


@runtime_checkable
class Moves(Protocol):
    """Jobs can go on from those of another target, and those of another target from its jobs."""

    def export(self, name: str, *, fresh: bool) -> JobExport:
        """The job's code and newest checkpoint.

        Args:
            name: of the job.
            fresh: whether its checkpoints are not needed.

        Raises:
            UserError: no machine answers that may have the checkpoints.
        """

    def prepare_moved(self, spec: JobSpec, export: JobExport) -> Prepared:
        """Check a job that goes on from one of another target; see `Backend.prepare`.

        Raises:
            UserError: it cannot run there, or its name is taken.
        """


_LACKING = {
    Suspends: "its jobs cannot be suspended; paceline stop saves and ends one, and paceline resubmit goes on",
    Moves: "its jobs cannot go on elsewhere, and those from elsewhere not there",
    Elastic: "its jobs keep the machines that they started on",
    Checks: "it cannot be checked",
    Installs: "it installs no packages for jobs",
    RunsImages: "what runs the images of its jobs is not asked",
    Recorded: "it keeps nothing of what jobs use over time",
    Metered: "it does not measure what jobs and machines use",
    Watched: "its ranks cannot be asked where they are; paceline why without --live shows what their nodes have seen",
    TensorBoards: "it starts no TensorBoard",
    Volumes: "it has no named volumes",
    Warms: "no process of ours outlives a job there, so none is kept warm",
}
Ability = TypeVar(
    "Ability",
    Elastic,
    Checks,
    Installs,
    Metered,
    Moves,
    Recorded,
    RunsImages,
    Suspends,
    TensorBoards,
    Volumes,
    Warms,
    Watched,
)


def able(backend: Backend, ability: type[Ability]) -> Ability:
    """The backend, typed as one that has the ability.

    Raises:
        UserError: it lacks the ability.
    """
    if not isinstance(backend, ability):
        raise UserError(f"{backend.name}: {backend.lacks.get(ability.__name__) or _LACKING[ability]}")
    return backend
