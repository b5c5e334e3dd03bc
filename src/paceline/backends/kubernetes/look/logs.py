"""The lines of ranks and the events of a job, from the logs of its pods; see `backends/follow.py`."""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import re
import threading
from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from paceline.backends import follow
from paceline.backends.base import LogLines
from paceline.backends.kubernetes.api.errors import ApiError, Expired, Unreachable
from paceline.backends.kubernetes.api.times import moment
from paceline.backends.kubernetes.manifests import kept
from paceline.job.errors import UserError
from paceline.node.host.pod import MARK
from paceline.node.logs.readers import Readers

from . import kept_reader
from .pods import seen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from paceline.backends.base import LogQuery
    from paceline.backends.kubernetes.api.client import Cluster

    from .jobs import Found
    from .pods import Pod

_LINE = re.compile(
    rb"\[rank (?P<rank>\d+)(?: attempt (?P<attempt>\d+))?(?P<err> stderr)?(?P<traceback> traceback)?(?P<piece> \+)?\]"
    rb" ?(?P<text>.*)",
    re.DOTALL,
)
_AGAIN, _MOST_AGAIN = 0.2, 5.0  # seconds until a log is asked for again, and at most if it fails again and again
_SOON, _CALM = 1.0, 10.0  # seconds until pods are looked for again, while some have not begun, and then
_MORE, _MOST = 16, 1 << 16  # lines that are asked for at first beside the wanted ones, and at most at once

Item = TypeVar("Item")


class Lost(UserError):
    """The logs of a node cannot be read."""


class Entry(NamedTuple):
    """A line of a pod's log: of a rank, perhaps of the traceback that ended it, or an event."""

    time: float
    attempt: int
    rank: int
    stream: str
    text: bytes
    event: dict[str, Any] | None = None
    is_traceback: bool = False


class Parser:
    """Makes entries of the lines of one node's log.

    Attributes:
        attempt: that the next line belongs to, if it does not say so.
    """

    def __init__(self, pod: Pod | None, *, is_plain: bool) -> None:
        """Begin.

        Args:
            pod: that wrote them; None for lines of ranks and events only.
            is_plain: whether the user's command wrote them itself.
        """
        self._pod, self._is_plain, self.attempt = pod, is_plain, 0

    def entry(self, line: bytes) -> Entry | None:
        """What a line says, which begins with its time; None for nothing."""
        stamp, _, text = line.partition(b" ")
        written = _time(stamp)
        if written is None:
            return None
        match = None if self._is_plain else _LINE.fullmatch(text)
        if match is not None:
            end = b"" if match["piece"] else b"\n"
            self.attempt = int(match["attempt"] or self.attempt)
            stream, text, is_traceback = "err" if match["err"] else "out", match["text"] + end, bool(match["traceback"])
            return Entry(written, self.attempt, int(match["rank"]), stream, text, is_traceback=is_traceback)
        if not self._is_plain and text.startswith(MARK):
            event = _event(text[len(MARK) :])
            if event is None:
                return None
            if event["event"] == "started":
                self.attempt = int(event.get("attempt") or 0)
            return Entry(written, self.attempt, -1, "", b"", event)
        if self._pod is None:
            return None
        stream = "out" if self._is_plain else "node"  # else of the interpreter itself, or of the bootstrap
        return Entry(written, self.attempt, self._pod.index, stream, text + b"\n")


def _time(stamp: bytes) -> float | None:
    """Seconds since the epoch of a line's time, which may have nanoseconds."""
    try:
        return moment(re.sub(r"(\.\d{6})\d+", r"\1", stamp.decode()))
    except (ValueError, UnicodeDecodeError):
        return None


def _exact(stamp: str) -> tuple[str, str]:
    """A time of a line that can be compared: its fraction of a second may have any number of digits."""
    seconds, _, fraction = stamp.rstrip("Z").partition(".")
    return seconds, fraction.ljust(9, "0")


def _event(text: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "event" in found else None


def _rfc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _indexes(job: Found, ranks: Iterable[int] | None) -> frozenset[int] | None:
    """The numbers of the pods that have the lines of some ranks; None for all, or if that is not known."""
    each = 1 if job.is_plain else job.spec.get("ranks", 1)
    if ranks is None or job.least < job.nodes or not isinstance(each, int):
        return None
    return frozenset(rank // each for rank in ranks)


def pods_of(job: Found, ranks: Iterable[int] | None = None) -> list[Pod]:
    """The pods that have the lines of some ranks; None for all."""
    wanted = _indexes(job, ranks)
    return [pod for pod in job.pods if wanted is None or pod.index in wanted]


# -- one pod -----------------------------------------------------------------------------------------------------------


class PodLog:
    """The log of a pod, and how far it has been read: the time of the last line, and how many lines had it.

    By the clock of its node alone, so other nodes may have any other time.
    """

    def __init__(
        self, cluster: Cluster, pod: Pod, job_is_over: threading.Event, *, is_plain: bool, since: float | None = None
    ) -> None:
        """Read nothing yet.

        Args:
            cluster: where it is.
            pod: it.
            job_is_over: is set when the job has ended; a pod that is leaving may never do so.
            is_plain: whether the user's command wrote the lines itself.
            since: only what was written after this time.
        """
        self._cluster, self._pod, self._is_plain = cluster, pod, is_plain
        self._begin = None if since is None else _rfc(since)
        self._job_is_over, self._is_closed = job_is_over, threading.Event()
        self.rewind()

    def rewind(self) -> None:
        """Read it from its beginning again."""
        self._parser = Parser(self._pod, is_plain=self._is_plain)
        self._since, self._last, self._same = self._begin, ("", ""), 0

    def close(self) -> None:
        """Follow no more."""
        self._is_closed.set()

    def last(self, wanted: Callable[[Entry], bool], count: int, attempt: int | None) -> list[Entry]:
        """The last lines, and no more read than they take; what is read next comes after them.

        Args:
            wanted: which lines count.
            count: how many.
            attempt: of this attempt; None for the last one.
        """
        asked: int | None = count + _MORE
        while True:
            found: collections.deque[Entry] = collections.deque(maxlen=count)
            self.rewind()
            has_older, count_read, first = False, 0, None
            for line in self._lines(follow=False, tail=asked):
                entry, count_read = self._take(line), count_read + 1
                first = first or self._last
                if entry is None or not wanted(entry):
                    continue
                if entry.attempt > (found[-1].attempt if found else -1) and attempt is None:
                    has_older = has_older or bool(found)
                    found.clear()
                if attempt is None or entry.attempt == attempt:
                    found.append(entry)
                has_older = has_older or (attempt is not None and entry.attempt < attempt)
            is_whole = asked is None or count_read < asked
            # Of lines with the time of the last one all have to be counted, as that is how the next ones are found.
            if is_whole or (first != self._last and (has_older or len(found) == count)):
                return list(found)
            asked = 4 * (asked or 0) if asked is not None and 4 * asked <= _MOST else None

    def rest(self) -> Iterator[Entry]:
        """What is there beyond that.

        Raises:
            Lost: its node does not answer.
        """
        yield from filter(None, map(self._take, self._lines(follow=False)))

    def _lines(self, *, follow: bool, tail: int | None = None) -> Iterator[bytes]:
        """Lines that have not been read.

        Raises:
            Lost: its node does not answer.
        """
        pod = self._pod
        try:
            yield from self._unread(follow=follow, tail=tail)
        except Unreachable as error:
            raise _lost(pod, error) from None
        except ApiError as error:
            if error.code >= 500 and not pod.is_leaving:  # otherwise its node is lost, and another pod replaces it
                raise _lost(pod, error) from None
            if error.code not in (400, 404) and error.code < 500:  # it has not begun, or is gone
                raise

    def _unread(self, *, follow: bool, tail: int | None = None) -> Iterator[bytes]:
        last, skip = self._last, self._same
        for line in self._cluster.log(self._pod.name, self._pod.container, follow=follow, since=self._since, tail=tail):
            written = _exact(_stamp(line))
            if written < last or (written == last and skip):  # it was read before: nodes know only seconds
                skip -= written == last
                continue
            skip = 0
            yield line

    def _take(self, line: bytes) -> Entry | None:
        """What a line says; it has been read now."""
        stamp = _stamp(line)
        written = _exact(stamp)
        self._same = self._same + 1 if written == self._last else 1
        self._since, self._last = stamp, written
        return self._parser.entry(line)

    def __iter__(self) -> Iterator[Entry]:
        """What is there beyond that, and what it writes to its end. A stream may end earlier, and is opened again."""
        pause = _AGAIN
        while not self._is_closed.is_set():
            pod = self._now()
            ended = pod is None or pod.is_over  # asked first: what it writes before its end is in the log then
            has_failed = False
            try:
                for line in self._unread(follow=not ended):
                    pause = _AGAIN
                    if (entry := self._take(line)) is not None:
                        yield entry
            except (ApiError, Unreachable) as error:
                code = error.code if isinstance(error, ApiError) else 0
                if code == 404 or (pod is not None and pod.is_leaving and self._job_is_over.is_set()):
                    return  # it is gone; or its node is lost, and it never ends
                if code not in (0, 400, 429, 500, 502, 503, 504):
                    raise
                has_failed = code != 400
                pause = min(2 * pause, _MOST_AGAIN)
            if ended and not (has_failed and pause < _MOST_AGAIN):
                return
            self._is_closed.wait(pause)

    def _now(self) -> Pod | None:
        """The pod; None if it is gone."""
        try:
            return seen(self._cluster.get(self._cluster.path("v1", "pods", self._pod.name)))
        except ApiError as error:
            return None if error.code == 404 else self._pod
        except Unreachable:
            return self._pod


def _stamp(line: bytes) -> str:
    return line.partition(b" ")[0].decode(errors="replace")


def _lost(pod: Pod, why: UserError) -> Lost:
    return Lost(f"the logs of node {pod.node or 'without a name'} cannot be read: {why}")


# -- all pods ----------------------------------------------------------------------------------------------------------


class Follower(Generic[Item]):
    """Reads the logs of all pods of a job at once, also of those that come later, until the job has ended.

    Attributes:
        readers: of the pods, by their names.
        job_is_over: is set when the job has ended.
    """

    def __init__(
        self, cluster: Cluster, name: str, make: Callable[[Pod], Iterable[Item]], ranks: Iterable[int] | None = None
    ) -> None:
        """Begin.

        Args:
            cluster: where the job is.
            name: of the job.
            make: what reads the log of a pod.
            ranks: only pods that have lines of these; None for all.
        """
        self._cluster, self._name, self._make, self._ranks = cluster, name, make, ranks
        self.readers: Readers[str, Item] = Readers()
        self.job_is_over = threading.Event()

    def start(self) -> Readers[str, Item]:
        """Read from now on."""
        self.readers.add("", self._watch())
        return self.readers

    def _watch(self) -> Iterator[Item]:
        """Start a reader for each pod that comes, until the job has ended."""
        from .describe import described
        from .jobs import find

        names: set[str] = set()
        while not self.readers.is_closed:
            job = find(self._cluster, [self._name]).get(self._name)
            for pod in () if job is None else pods_of(job, self._ranks):
                if pod.name not in names and (pod.has_log or pod.is_over):
                    names.add(pod.name)
                    self.readers.add(pod.name, self._make(pod))
            if job is None or described(job, "", "").is_over:
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
        """Read nothing yet.

        Args:
            log: of the pod.
            query: which lines, and whether they are followed.
            attempts: of all pods.
            starts_again: whether the job may have had several.
        """
        self._log, self._query, self._attempts, self._starts_again = log, query, attempts, starts_again
        self._found: Iterable[Entry] | None = None
        self.close = log.close

    def open(self) -> None:
        """See `Source`. Reads the last lines, or finds out which attempt is the last one."""
        query, log = self._query, self._log
        if query.tail is not None:
            found = log.last(lambda entry: is_wanted(entry, query), max(1, query.tail), query.attempt)
            self._attempts.note(found)
            self._found = found[max(0, len(found) - query.tail) :]
            return
        if self._starts_again and query.attempt is None:
            self._attempts.note(log.last(lambda entry: entry.rank >= 0 and entry.stream != "node", 1, None))
            log.rewind()
        rest = iter(()) if query.follow else log.rest()
        self._found = itertools.chain([*itertools.islice(rest, 1)], rest)

    def __iter__(self) -> Iterator[LogLines]:
        """See `Source`."""
        if self._found is None:
            self.open()
        assert self._found is not None
        number, last = self._query.attempt, self._attempts.last
        for entry in itertools.chain(self._found, self._log if self._query.follow else ()):
            if is_wanted(entry, self._query) and (entry.attempt >= last if number is None else entry.attempt == number):
                yield _shown(entry)


def is_wanted(entry: Entry, query: LogQuery) -> bool:
    """Whether an entry is a line of the ranks and the time of a query."""
    if entry.event is not None or (entry.stream == "node" and query.ranks is not None):  # of a node, and of no rank
        return False
    return (query.ranks is None or entry.rank in query.ranks) and (query.since is None or entry.time >= query.since)


def _shown(entry: Entry) -> LogLines:
    stream = "both" if entry.stream == "out" else "err"
    return LogLines(entry.time, entry.attempt, max(entry.rank, 0), stream, entry.text)


def lines(cluster: Cluster, job: Found, query: LogQuery, *, is_over: bool) -> Iterator[LogLines]:
    """The lines of a job that a query asks for: from the copies on its volume, if pods are gone."""
    query = replace(query, follow=query.follow and not is_over)
    where = kept.of(job.annotations)
    if where is not None and not query.follow and kept_reader.is_needed(job, is_over=is_over):
        return _kept(kept_reader.read(cluster, job, where), query)
    attempts, over = _Attempts(), threading.Event()
    starts_again = bool(job.spec.get("max_restarts")) or job.least < job.nodes

    def source(pod: Pod, query: LogQuery) -> _Lines:
        log = PodLog(cluster, pod, over, is_plain=job.is_plain, since=query.since)
        return _Lines(log, query, attempts, starts_again=starts_again)

    sources = {pod.name: source(pod, query) for pod in pods_of(job, query.ranks)}
    if not query.follow:
        return follow.lines(sources, Lost, follow=False) if sources else iter(())
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
            yield _shown(entry)
        else:
            ends.setdefault(node, collections.deque(maxlen=query.tail)).append(entry)
    yield from map(_shown, sorted(itertools.chain(*ends.values()), key=lambda entry: entry.time))


def events(cluster: Cluster, job: Found, silent: dict[str, UserError], *, is_over: bool) -> Iterator[Entry]:
    """The events that the logs of a job have, those of a node in their order.

    Args:
        cluster: where it is.
        job: it.
        silent: gets the nodes that do not answer, each with why.
        is_over: whether it has ended.
    """
    where = kept.of(job.annotations)
    if where is not None and kept_reader.is_needed(job, is_over=is_over):
        parser = Parser(None, is_plain=False)
        entries = (parser.entry(line) for _, line in kept_reader.read(cluster, job, where).lines)
        yield from (entry for entry in entries if entry is not None and entry.event is not None)
        return
    for pod in job.pods:
        if pod.node not in silent:  # it takes long to find that out
            try:
                log = PodLog(cluster, pod, threading.Event(), is_plain=job.is_plain)
                yield from (entry for entry in log.rest() if entry.event is not None)
            except Lost as error:
                silent[pod.node] = error
