"""What a backend is: the place where jobs run. The verbs know no more of one than this file says."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from paceline.job.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from paceline.job.job import Job, Node, Usage, Volume
    from paceline.job.spec import JobSpec

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


class Progress(Protocol):
    """Hears how far something is."""

    def __call__(self, what: str, done: int, total: int | None) -> None:
        """What is being done, how much of it is done, and how much there is, or None."""

    def say(self, line: str) -> None:
        """Something that the user should read."""


class Backend(ABC):
    """A place where jobs run. Every method takes many jobs at once where that saves calls.

    Attributes:
        where: the flags that lead there, with a space before them.
    """

    where = ""

    @classmethod
    def configured(cls, name: str, options: Mapping[str, Any]) -> Backend:
        """The place that the settings call so, with its options there.

        Raises:
            UserError: the options make no sense.
        """
        for option in options:
            raise UserError(f"targets.{name}.{option}: this backend has no options; remove it")
        return cls()

    @abstractmethod
    def plan(self, spec: JobSpec) -> dict[str, Any]:
        """What `submit` would do: the complete job, and the variables of its ranks. Starts nothing."""

    @abstractmethod
    def submit(self, spec: JobSpec, progress: Progress) -> Job:
        """Start a job that goes on by itself."""

    def run(self, spec: JobSpec, progress: Progress, shown: Shown) -> Foreground:
        """Start a job that ends with this process, which watches it.

        Raises:
            UserError: it cannot run there.
        """
        raise UserError(f"{spec.backend} runs no job in the foreground; start it with paceline submit")

    @abstractmethod
    def describe(self, names: Sequence[str] | None = None, since: float | None = None) -> list[Job]:
        """These jobs, or all, the newest first; those that are unknown are left out.

        With `since`, in seconds since the epoch, jobs that ended before are left out too.
        """

    def silent(self, name: str) -> list[str]:
        """Why hosts that have a part of a job told nothing of it when it was described, while others did."""
        return []

    @abstractmethod
    def count(self) -> int:
        """How many jobs there are."""

    @abstractmethod
    def spec(self, name: str) -> JobSpec:
        """What a job's user asked for."""

    @abstractmethod
    def wait(
        self, names: Sequence[str], seconds: float | None = None, tick: Callable[[int], None] = lambda ended: None
    ) -> bool:
        """Come back when these jobs have ended or the time is over; returns whether they have.

        `tick` is told now and then how many of them have.
        """

    @abstractmethod
    def events(self, name: str) -> list[dict[str, Any]]:
        """What happened to a job: time, event, and details; of a job on several machines the host, too."""

    @abstractmethod
    def shell(self, name: str, rank: int, command: Sequence[str]) -> Shell:
        """How to run a command, or a shell if it is empty, where a rank runs, and as it does."""

    @abstractmethod
    def logs(self, name: str, query: LogQuery) -> Iterator[LogLines]:
        """Lines of a job in the order in which they were written; a query that cannot be met is a UserError at once."""

    @abstractmethod
    def stop(self, names: Sequence[str], now: bool = False) -> None:
        """Ask jobs to stop: cleanly, with their grace, or at once. Jobs that have ended are left as they are."""

    def add(self, name: str, hosts: Sequence[str]) -> list[str]:
        """Have hosts take part in a job that runs: these, or all that may; returns which."""
        raise UserError(f"job {name} runs on one machine, which others cannot join")

    def leave(self, name: str, hosts: Sequence[str]) -> None:
        """Have hosts leave a job, which goes on without them."""
        raise UserError(f"job {name} runs on one machine, which cannot leave it")

    @abstractmethod
    def delete(self, names: Sequence[str]) -> None:
        """Remove jobs that have ended, with all that was written for them."""

    def forget(self, name: str) -> list[str]:
        """Remove what can be reached of a LOST job, and know it no more; returns where something is left.

        Raises:
            UserError: this place cannot.
        """
        raise UserError(f"job {name} is on another machine; delete it there")

    @abstractmethod
    def nodes(self) -> list[Node]:
        """The machines, and what is in use there."""

    @abstractmethod
    def usage(self, names: Sequence[str]) -> dict[str, Usage]:
        """What these jobs use now, over a moment or since the last call; those that do not run are left out."""

    @abstractmethod
    def open_tensorboard(self, name: str, logdir: str | None = None) -> str:
        """The address of a job's TensorBoard, which is started if there is none; it shows `logdir`, or its default."""

    @abstractmethod
    def close_tensorboard(self, name: str) -> bool:
        """End it; returns whether there was one."""

    @abstractmethod
    def volumes(self) -> list[Volume]:
        """The named volumes."""
