"""The jobs of all targets, looked at again and again while somebody watches: each target by its own thread.

A target that does not answer delays no other: what was known of its jobs stays, and its error says so.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import ChainMap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypedDict

from paceline.job.errors import UserError
from paceline.job.quantities import show_time

from . import everywhere, registry
from .repeated import Repeated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paceline.job.job import Job

    from .base import Backend
    from .everywhere import Place

_PAUSE = 2.0  # seconds between two looks at a target
_SHARE = 0.008  # of the time that looks may take
_PLACES = 15.0  # seconds between two looks at which targets there are
_FIRST = 3.0  # seconds in which the first requests wait for the first answer of any target
_IDLE = 60.0  # seconds after the last request in which targets are still looked at

Key = tuple[str, str]  # the target and the name of a job


class TargetRecord(TypedDict):
    """A target: its jobs that are known, when it answered last, and why it does not; in JSON."""

    name: str
    jobs: int
    answered: str | None
    error: str | None
    warnings: list[str]


class Lender:
    """Backends of a target, each lent to one thread at a time: they need not be made for several."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._free: list[Backend] = []  # the one that was used last is the last

    @contextlib.contextmanager
    def lent(self) -> Iterator[Backend]:
        """A backend that no other thread uses meanwhile."""
        try:
            there = self._free.pop()
        except IndexError:
            there = self.new()
        try:
            yield there
        finally:
            self._free.append(there)

    def new(self) -> Backend:
        """A backend that is not used again."""
        return (self._place.another or self._place.load)()


class Found(NamedTuple):
    """A job, where it is, and the version in which it changed last."""

    job: Job
    there: Backend  # its backend, which the thread uses that looks at it; others read its constants
    lender: Lender  # of its backend
    version: int


@dataclass
class _Target:
    """A target and what it has answered last.

    Attributes:
        name: of the target; hosts that flags named have those of their hosts.
        asked: when it was asked last, in seconds since the epoch; None while it has never been.
        answered: when it answered last.
        error: why it has not answered since; None if it has.
        warnings: what is missing of its answer.
        listed: its answer, of which `jobs` was made.
    """

    place: Place
    asked: float | None = None
    answered: float | None = None
    error: str | None = None
    warnings: tuple[str, ...] = ()
    jobs: dict[Key, Found] = field(default_factory=dict)
    lender: Lender = field(init=False)
    listed: list[Job] | None = None
    looks: Repeated = field(init=False)

    def __post_init__(self) -> None:
        self.lender = Lender(self.place)


class Watch:
    """What is known of all jobs. All methods may be called by any thread."""

    def __init__(self) -> None:
        self.version = 1  # grows whenever something has changed
        self.problem: str | None = None  # why the targets are not known
        # The first one that knows a job counts: hosts that flags named come last, and may be a target's.
        self._targets: dict[str, _Target] = {}
        self._changed = threading.Condition()
        self._used = -math.inf
        self._has_waited = False
        self._listeners: list[Callable[[], object]] = []
        self._looks = Repeated(self._look_for_places)

    # -- what is known -------------------------------------------------------------------------------------------------

    def jobs(self) -> list[Found]:
        """All jobs, the newest first."""
        self.use()
        with self._changed:
            found = {key: it for target in reversed(self._targets.values()) for key, it in target.jobs.items()}
        return sorted(found.values(), key=lambda it: it.job.created, reverse=True)

    def find(self, target: str, name: str) -> Found:
        """A job; KeyError if none is known."""
        self.use()
        with self._changed:
            return ChainMap(*(it.jobs for it in self._targets.values()))[target, name]

    def targets(self) -> list[TargetRecord]:
        """The targets, and which of them do not answer."""
        with self._changed:
            return [
                {
                    "name": name,
                    "jobs": len(it.jobs),
                    "answered": show_time(it.answered),
                    "error": it.error or self._silence(it),
                    "warnings": list(it.warnings),
                }
                for name, it in self._targets.items()
            ]

    def lender(self, target: str) -> Lender:
        """Lends the backend of a target; KeyError if there is none."""
        return self._targets[target].lender

    @staticmethod
    def _silence(target: _Target) -> str | None:
        if (
            target.asked is not None
            and (seconds := time.time() - target.asked) > 5
            and target.asked > (target.answered or 0.0)
        ):
            return f"has not answered for {seconds:.0f} s"
        return None

    # -- who watches ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Somebody will look soon."""
        was_used, self._used = self._used, time.monotonic()
        if self._used - was_used > _IDLE:
            self._looks.wake()
            self.look_now()

    def use(self) -> None:
        """Somebody looks now; the first requests wait a moment for the first target that answers."""
        self.begin()
        if not self._has_waited:
            with self._changed:
                self._changed.wait_for(lambda: any(it.answered or it.error for it in self._targets.values()), _FIRST)
            self._has_waited = True

    def look_now(self) -> None:
        """Something was done that changes jobs."""
        with self._changed:
            for target in self._targets.values():
                target.looks.wake()

    def announce(self) -> None:
        """Something else has changed that listeners show."""
        with self._changed:
            self._tell()

    def add(self, job: Job, there: Backend) -> None:
        """A job has been started just now."""
        with self._changed:
            target = self._targets.get(there.name)
            if target is not None:
                target.jobs = {
                    **target.jobs,
                    (job.backend, job.name): Found(job, there, target.lender, self.version + 1),
                }
                self._tell()
        self.look_now()

    @contextlib.contextmanager
    def listening(self, listener: Callable[[], object]) -> Iterator[None]:
        """Call this, in any thread, when something has changed."""
        with self._changed:
            self._listeners.append(listener)
        self.use()
        try:
            yield
        finally:
            with self._changed:
                self._listeners.remove(listener)

    def close(self) -> None:
        """Look no more."""
        self._looks.stop()
        with self._changed:
            for target in self._targets.values():
                target.looks.stop()

    def _is_watched(self) -> bool:
        return bool(self._listeners) or time.monotonic() - self._used < _IDLE

    # -- the threads ---------------------------------------------------------------------------------------------------

    def _look_for_places(self) -> float:
        if self._is_watched():
            problem: str | None = None
            try:
                places = {place.name or registry.HERE: place for place in everywhere.places()}
            except UserError as error:
                places, problem = {registry.HERE: everywhere.Place(registry.HERE, registry.load)}, str(error)
            self._set_places(places, problem)
        return _PLACES

    def _set_places(self, places: dict[str, Place], problem: str | None) -> None:
        with self._changed:
            before, self._targets = self._targets, {}
            for name, place in places.items():
                target = self._targets[name] = before.get(name) or self._watched(place)
                if target.place.jobs != place.jobs:
                    target.place = place
                    target.looks.wake()
            for name in before.keys() - places.keys():
                before[name].looks.stop()
            if self.problem != problem or before.keys() != self._targets.keys():
                self.problem = problem
                self._tell()

    def _watched(self, place: Place) -> _Target:
        target = _Target(place)

        def look() -> float:
            began = time.thread_time()
            if not self._is_watched():
                return math.inf  # until it is woken
            self._look(target)
            return max(_PAUSE, (time.thread_time() - began) / _SHARE)

        target.looks = Repeated(look)
        return target

    def _look(self, target: _Target) -> None:
        target.asked = time.time()
        jobs: list[Job] | None = None
        error, warnings = None, target.warnings
        try:
            there = target.place.load()
            there.look_repeatedly()
            there.keep_expired()
            listing = there.describe(target.place.jobs)
            jobs, warnings = listing.jobs, listing.warnings
        except UserError as caught:
            error = str(caught)
        except Exception as caught:  # a fault of one backend must not end the page
            error = f"{type(caught).__name__}: {caught}"
        with self._changed:
            is_first = target.answered is None and target.error is None
            is_other = (error, warnings) != (target.error, target.warnings)
            target.error, target.warnings = error, warnings
            if jobs is not None:
                target.answered = time.time()
                is_other |= self._take(target, there, jobs)
            if is_first or is_other:
                self._tell()

    def _take(self, target: _Target, there: Backend, jobs: list[Job]) -> bool:
        """Take over the jobs that a target has now; returns whether any has changed."""
        if jobs is target.listed:
            return False
        before, now = target.jobs, dict[Key, Found]()
        is_other = len(before) != len(jobs)
        for job in jobs:
            key = job.backend, job.name
            old = before.get(key)
            if old is not None and (old.job is job or old.job == job):
                now[key] = old
            else:
                now[key], is_other = Found(job, there, target.lender, self.version + 1), True
        target.jobs, target.listed = now, jobs
        return is_other

    def _tell(self) -> None:
        self.version += 1
        self._changed.notify_all()
        for listener in self._listeners:
            listener()
