"""The lines and the events of a job, from the logs of its pods; see `backends/follow.py`."""

from __future__ import annotations

import collections
import contextlib
import itertools
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, TypeVar

from paceline.backends import follow
from paceline.backends.base import LogLines
from paceline.backends.kubernetes.api.errors import Expired
from paceline.backends.kubernetes.manifests import kept
from paceline.node.readers import Readers

from . import kept_reader
from .describe import is_over
from .inside import asked
from .pod_log import Entry, Lost, Parser, PodLog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from paceline.backends.base import LogQuery
    from paceline.backends.kubernetes.api.client import Cluster
    from paceline.job.errors import UserError

    from .jobs import Found
    from .pods import Pod

_SOON, _CALM = 1.0, 10.0  # seconds until pods are looked for again, while some have not begun, and then

Item = TypeVar("Item")


def _indexes(job: Found, ranks: Iterable[int] | None) -> frozenset[int] | None:
    """The numbers of the pods that have the lines of some ranks; None for all, or if that is not known."""
    each = 1 if job.is_plain else job.spec.ranks
    if ranks is None or job.least < job.nodes or not isinstance(each, int):
        return None
    return frozenset(rank // each for rank in ranks)


def pods_of(job: Found, ranks: Iterable[int] | None = None) -> list[Pod]:
    """The pods that have the lines of some ranks; None for all."""
    wanted = _indexes(job, ranks)
    return [pod for pod in job.pods if wanted is None or pod.index in wanted]


# -- all pods ----------------------------------------------------------------------------------------------------------


class Follower(Generic[Item]):
    """Reads the logs of all pods of a job at once, also of those that come later, until the job has ended."""

    def __init__(
        self, cluster: Cluster, name: str, make: Callable[[Pod], Iterable[Item]], ranks: Iterable[int] | None = None
    ) -> None:
        self._cluster, self._name, self._make, self._ranks = cluster, name, make, ranks
        self.readers: Readers[str, Item] = Readers()  # of the pods, by their names
        self.job_is_over = threading.Event()  # is set when the job has ended

    def start(self) -> Readers[str, Item]:
        """Read from now on."""
        self.readers.add("", self._watch())
        return self.readers

    def _watch(self) -> Iterator[Item]:
        """Start a reader for each pod that comes, until the job has ended."""
        from .jobs import find

        names: set[str] = set()
        uid = ""
        while not self.readers.is_closed:
            job = find(self._cluster, [self._name]).get(self._name)
            if job is not None:
                uid = uid or job.uid
                job = job if job.uid == uid else None  # a later one of this name is another job
            for pod in () if job is None else pods_of(job, self._ranks):
                if pod.name not in names and (pod.has_log or pod.is_over):
                    names.add(pod.name)
                    self.readers.add(pod.name, self._make(pod))
            if job is None or is_over(job):
                break
            wanted = _indexes(job, self._ranks)
            has_all = len(names) >= (job.nodes if wanted is None else len(wanted))
            self._wait_for_change(job, _CALM if has_all else _SOON)
        self.job_is_over.set()
        return
        yield

    def _wait_for_change(self, job: Found, seconds: float) -> None:
        """Wait until something of the job may have changed: its status counts its pods. Or until the time is over."""
        path, version = job.kind.path(self._cluster), job.object["metadata"]["resourceVersion"]
        selector = f"metadata.name={self._name}"
        with contextlib.suppress(Expired):
            for kind, _ in self._cluster.watch(path, version, seconds, fieldSelector=selector):
                if kind != "BOOKMARK":
                    return


# -- lines -------------------------------------------------------------------------------------------------------------


class _Attempts:
    """The last attempt that lines of any pod belong to, by the numbers in the lines."""

    def __init__(self) -> None:
        self.last = 0

    def note(self, found: Iterable[Entry]) -> None:
        """Some lines of a pod."""
        self.last = max([self.last, *(entry.attempt for entry in found)])


class _Lines:
    """The lines of a pod that a query asks for: a source, see `backends/follow.py`."""

    def __init__(self, log: PodLog, query: LogQuery, attempts: _Attempts, *, starts_again: bool) -> None:
        self._log, self._query, self._attempts, self._starts_again = log, query, attempts, starts_again
        self._found: Iterable[Entry] | None = None
        self._lost: Lost | None = None
        self._is_to_its_beginning = True
        self.close = log.close

    def open(self) -> None:
        """See `Source`. Reads the last lines, or finds out which attempt is the last one."""
        if self._found is None and self._lost is None:
            try:
                self._found = self._opened()
            except Lost as error:  # it takes long to find that out
                self._lost = error
        if self._lost is not None:
            raise self._lost

    def _opened(self) -> Iterable[Entry]:
        query, log = self._query, self._log
        if query.tail is not None:
            found = log.last(lambda entry: is_wanted(entry, query), max(1, query.tail), query.attempt)
            self._attempts.note(found)
            self._is_to_its_beginning = len(found) < query.tail
            return found[max(0, len(found) - query.tail) :]
        if self._starts_again and query.attempt is None:
            self._attempts.note(log.last(lambda entry: entry.rank >= 0 and entry.stream != "node", 1, None))
            log.rewind()
        rest = iter(()) if query.follow else log.rest()
        return itertools.chain(_beginning(log, rest), rest)

    def is_cut(self) -> bool:
        """Whether the first ones of the lines that the query asks for are gone; known when the others were read."""
        query, log = self._query, self._log
        if not self._is_to_its_beginning:
            return False
        if query.since is not None:
            log = log.from_beginning()
            if not any(entry.time > query.since for entry in _beginning(log, log.rest())[:1]):
                return False
        return log.cut >= max(0, self._attempts.last if query.attempt is None else query.attempt)

    def __iter__(self) -> Iterator[LogLines]:
        if self._found is None:
            self.open()
        assert self._found is not None
        number, last = self._query.attempt, self._attempts.last
        for entry in itertools.chain(self._found, self._log if self._query.follow else ()):
            if is_wanted(entry, self._query) and (entry.attempt >= last if number is None else entry.attempt == number):
                yield _lines_of(entry)
        if self.is_cut():
            raise self._log.without_beginning()


def _beginning(log: PodLog, rest: Iterator[Entry]) -> list[Entry]:
    """The first entries of a log, up to the one that shows whether it has its beginning."""
    found = []
    for entry in rest:
        found.append(entry)
        if log.is_begun:
            break
    return found


def is_wanted(entry: Entry, query: LogQuery) -> bool:
    """Whether an entry is a line of the ranks and the time of a query."""
    if entry.event is not None or (entry.stream == "node" and query.ranks is not None):  # of a node, and of no rank
        return False
    return (query.ranks is None or entry.rank in query.ranks) and (query.since is None or entry.time >= query.since)


def _lines_of(entry: Entry) -> LogLines:
    stream = "o" if entry.stream == "out" else "e"
    return LogLines(entry.time, entry.attempt, max(entry.rank, 0), stream, entry.text)


def lines(cluster: Cluster, job: Found, query: LogQuery) -> Iterator[LogLines]:
    """The lines of a job that a query asks for: from the copies on its volume, if pods are gone."""
    query = replace(query, follow=query.follow and not is_over(job))
    where = kept.of(job.annotations)
    if where is not None and not query.follow and kept_reader.is_needed(job):
        return _kept(kept_reader.read(cluster, job, where), query)
    attempts, over = _Attempts(), threading.Event()
    starts_again = bool(job.spec.max_restarts) or job.least < job.nodes

    def source(pod: Pod, query: LogQuery) -> _Lines:
        log = PodLog(cluster, pod, over, is_plain=job.is_plain, since=query.since)
        return _Lines(log, query, attempts, starts_again=starts_again)

    sources = {pod.name: source(pod, query) for pod in pods_of(job, query.ranks)}
    if where is not None and not query.follow:
        failed = follow.opened(sources)
        if any(it.is_cut() for name, it in sources.items() if name not in failed):
            return _kept(kept_reader.read(cluster, job, where), query)
    if not query.follow:
        return follow.lines(sources, Lost) if sources else iter(())
    for name in follow.opened(sources):  # its node may answer later
        del sources[name]
    follower = Follower(
        cluster, job.name, lambda pod: sources.get(pod.name) or source(pod, replace(query, tail=None)), query.ranks
    )
    follower.job_is_over = over
    return follow.arriving(follower.start(), Lost)


def _kept(found: kept_reader.Kept, query: LogQuery) -> Iterator[LogLines]:
    """The lines that a query asks for, of copies."""
    wanted = found.last if query.attempt is None else query.attempt
    parsers: dict[int, Parser] = {}
    ends: dict[int, collections.deque[Entry]] = {}
    for node, line in found.lines:
        entry = parsers.setdefault(node, Parser(None, is_plain=False)).entry(line)
        if entry is None or entry.attempt != wanted or not is_wanted(entry, query):
            continue
        if query.tail is None:
            yield _lines_of(entry)
        else:
            ends.setdefault(node, collections.deque(maxlen=query.tail)).append(entry)
    yield from map(_lines_of, sorted(itertools.chain(*ends.values()), key=lambda entry: entry.time))


def events(cluster: Cluster, job: Found, silent: dict[str, UserError]) -> list[Entry]:
    """The events that the agents of a job have recorded, those of a node in their order.

    Agents that run are asked. Those of others are in their logs, or in the copies of the logs. `silent` gets the nodes
    that do not answer, and the pods whose logs lack their beginning, each with why.
    """
    where = kept.of(job.annotations)
    if where is not None and kept_reader.is_needed(job):
        return _kept_events(cluster, job, where)
    running = job.running
    answers = asked(cluster, running, {"do": "events", "name": job.name}, job.python)
    found: list[Entry] = []
    for pod in job.pods:
        if pod in running and pod.index in answers:
            found += (Entry(it["time"], 0, -1, "", b"", it) for it in answers[pod.index]["events"])
        elif pod.node not in silent:  # it takes long to find that out
            log = PodLog(cluster, pod, threading.Event(), is_plain=job.is_plain)
            try:
                found += (entry for entry in log.rest() if entry.event is not None)
            except Lost as error:
                silent[pod.node] = error
            if log.cut >= 0 and where is not None:
                return _kept_events(cluster, job, where)
            if log.cut >= 0:
                silent[pod.name] = log.without_beginning()
    return found


def _kept_events(cluster: Cluster, job: Found, where: kept.Kept) -> list[Entry]:
    parser = Parser(None, is_plain=False)
    entries = (parser.entry(line) for _, line in kept_reader.read(cluster, job, where, only_events=True).lines)
    return [entry for entry in entries if entry is not None and entry.event is not None]
