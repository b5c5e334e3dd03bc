"""The lines of ranks, from the logs of their pods."""

from __future__ import annotations

import heapq
import json
import queue
import re
import threading
import time
from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.backends.base import Incomplete, LogLines
from paceline.backends.kubernetes.api.errors import ApiError, Unreachable
from paceline.backends.kubernetes.api.times import moment
from paceline.backends.kubernetes.manifests import kept
from paceline.job.errors import UserError
from paceline.node.host.pod import MARK

from . import kept_reader
from .pods import seen

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from paceline.backends.base import LogQuery
    from paceline.backends.kubernetes.api.client import Cluster

    from .jobs import Found
    from .pods import Pod

_LINE = re.compile(
    rb"\[rank (?P<rank>\d+)(?P<err> stderr)?(?P<traceback> traceback)?(?P<piece> \+)?\] ?(?P<text>.*)", re.DOTALL
)
_AGAIN, _MOST_AGAIN = 0.2, 5.0  # seconds until a log is asked for again, and at most if it fails again and again
_SOON, _CALM = 1.0, 10.0  # seconds until pods are looked for again, while some have not begun, and then
_LATE = 0.2  # seconds for which lines of other pods are waited for, so that they come in the order of time


Silent = dict[str, UserError]  # nodes whose logs cannot be read, each with why


class Entry(NamedTuple):
    """A line of a pod's log: of a rank, perhaps of the traceback that ended it, or an event."""

    time: float
    rank: int
    stream: str
    text: bytes
    event: dict[str, Any] | None = None
    is_traceback: bool = False


def entries(lines: Iterable[bytes], pod: Pod | None, *, is_plain: bool) -> Iterator[Entry]:
    """What the lines of a pod's log say; each begins with its time.

    Args:
        lines: without line ends.
        pod: that wrote them; None for lines of ranks and events only.
        is_plain: whether the user's command wrote them itself.
    """
    for line in lines:
        stamp, _, text = line.partition(b" ")
        written = stamp_of(stamp)
        if written is None:
            continue
        match = None if is_plain else _LINE.fullmatch(text)
        if match is not None:
            end = b"" if match["piece"] else b"\n"
            stream, rank = "err" if match["err"] else "out", int(match["rank"])
            yield Entry(written, rank, stream, match["text"] + end, is_traceback=bool(match["traceback"]))
        elif not is_plain and text.startswith(MARK):
            event = _event(text[len(MARK) :])
            if event is not None:
                yield Entry(written, -1, "", b"", event)
        elif pod is None:
            continue
        elif is_plain:
            yield Entry(written, pod.index, "out", text + b"\n")
        else:  # of the interpreter itself, or of the bootstrap
            yield Entry(written, pod.index, "node", text + b"\n")


def stamp_of(stamp: bytes) -> float | None:
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


def indexes(job: Found, ranks: Iterable[int] | None) -> frozenset[int] | None:
    """The numbers of the pods that have the lines of some ranks; None for all, or if that is not known."""
    each = 1 if job.is_plain else job.spec.get("ranks", 1)
    if ranks is None or job.least < job.nodes or not isinstance(each, int):
        return None
    return frozenset(rank // each for rank in ranks)


def _pods(job: Found, ranks: Iterable[int] | None) -> list[Pod]:
    """The pods that have the lines of some ranks."""
    wanted = indexes(job, ranks)
    return [pod for pod in job.pods if wanted is None or pod.index in wanted]


def read(
    cluster: Cluster, pods: Iterable[Pod], silent: Silent, *, is_plain: bool, since: float | None = None
) -> Iterator[Entry]:
    """All that is in the logs of these pods now, in the order of time.

    Args:
        cluster: where they are.
        pods: whose logs are read.
        silent: gets the nodes that do not answer, each with why.
        is_plain: whether the user's command wrote the lines itself.
        since: only what was written after this time.
    """
    found = (_of_pod(cluster, pod, silent, is_plain, since) for pod in pods)
    return heapq.merge(*found, key=lambda entry: entry.time)


def read_all(
    cluster: Cluster, job: Found, silent: Silent, *, is_over: bool, ranks: Iterable[int] | None = None,
    since: float | None = None,
) -> Iterator[Entry]:  # fmt: skip
    """All that is in the logs of a job now, in the order of time: from the copies on its volume, if pods are gone.

    Args:
        cluster: where it is.
        job: whose logs are read.
        silent: see `read`.
        is_over: whether it has ended.
        ranks: whose pods are asked at least; None for all.
        since: only what was written after this time.
    """
    where = kept.of(job.annotations)
    if where is None or not kept_reader.is_needed(job, is_over=is_over):
        return read(cluster, _pods(job, ranks), silent, is_plain=job.is_plain, since=since)
    return entries(kept_reader.lines(cluster, job, where), None, is_plain=False)


def _of_pod(cluster: Cluster, pod: Pod, silent: Silent, is_plain: bool, since: float | None) -> Iterator[Entry]:
    if pod.node in silent:  # it takes long to find that out
        return
    try:
        lines = cluster.log(pod.name, pod.container, follow=False, since=None if since is None else _rfc(since))
        yield from entries(lines, pod, is_plain=is_plain)
    except Unreachable as error:
        silent[pod.node] = error
    except ApiError as error:
        if error.code >= 500 and not pod.is_leaving:  # otherwise its node is lost, and another pod replaces it
            silent[pod.node] = error
        elif error.code not in (400, 404) and error.code < 500:  # it has not begun, or is gone
            raise


def with_silent(lines: Iterable[LogLines], silent: Silent) -> Iterator[LogLines]:
    """The lines, and after them which nodes do not answer.

    Raises:
        Incomplete: some do not.
    """
    yield from lines
    if silent:
        why = [f"the logs of node {node or 'without a name'} cannot be read: {why}" for node, why in silent.items()]
        raise Incomplete("\n".join(f"{line}; what it has is not shown" for line in why))


def _rfc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def chosen(found: Iterable[Entry], query: LogQuery) -> Iterator[LogLines]:
    """The lines that a query asks for, of entries that are complete; see `LogQuery`."""
    attempt, lines = 0, []
    for entry in found:
        if entry.event is not None:
            attempt = max(attempt, _attempt(entry))
        elif _wanted(entry, query):
            lines.append(LogLines(entry.time, attempt, max(entry.rank, 0), _stream(entry), entry.text))
    last = query.attempt if query.attempt is not None else max((line.attempt for line in lines), default=0)
    lines = [line for line in lines if line.attempt == last]
    if query.tail is not None:
        lines = lines[max(0, len(lines) - query.tail) :]
    yield from lines


def _stream(entry: Entry) -> str:
    return "both" if entry.stream == "out" else "err"


def _wanted(entry: Entry, query: LogQuery) -> bool:
    if entry.stream == "node" and query.ranks is not None:  # of a node, and of no rank
        return False
    return (query.ranks is None or entry.rank in query.ranks) and (query.since is None or entry.time >= query.since)


# -- following ---------------------------------------------------------------------------------------------------------


class Follower:
    """Follows the logs of all pods of a job at once, over reconnects and log rotation, and pods that come later."""

    def __init__(
        self, cluster: Cluster, name: str, *, is_plain: bool, since: float | None = None,
        ranks: tuple[int, ...] | None = None,
    ) -> None:  # fmt: skip
        """Begin; each pod has a thread that reads its log, and one watches for pods and the end of the job."""
        self._cluster, self._name, self._is_plain = cluster, name, is_plain
        self._since, self._ranks = since, ranks
        self._found: queue.SimpleQueue[Entry | UserError | None] = queue.SimpleQueue()
        self._is_over = threading.Event()
        self._is_done = False  # whether the job has ended
        self._threads: dict[str, threading.Thread] = {}
        threading.Thread(target=self._watch, daemon=True).start()

    def close(self) -> None:
        """Follow no more."""
        self._is_over.set()

    def entries(self) -> Iterator[Entry]:
        """What the pods write, until the job has ended and all is read.

        Raises:
            UserError: the cluster refuses to say.
        """
        held: list[tuple[float, int, Entry]] = []  # for a moment, so that those of several pods come in order
        count = 0
        has_ended = False
        while True:
            now = time.time()
            while held and (has_ended or held[0][0] <= now - _LATE):
                yield heapq.heappop(held)[2]
            if has_ended:
                return
            try:
                found = self._found.get(timeout=_LATE if held else None)
            except queue.Empty:
                continue
            if isinstance(found, UserError):
                raise found
            if found is None:
                has_ended = True
                continue
            count += 1
            heapq.heappush(held, (now if found.time > now else max(found.time, now - _LATE), count, found))

    def _watch(self) -> None:
        """Start a reader for each pod that comes; at the end of the job wait for the readers."""
        from .describe import described
        from .jobs import find

        try:
            while not self._is_over.is_set():
                jobs = find(self._cluster, [self._name])
                job = jobs.get(self._name)
                wanted = None if job is None else indexes(job, self._ranks)
                for pod in _pods(job, self._ranks) if job is not None else ():
                    if pod.has_log or pod.is_over:
                        self._follow(pod)
                if job is None or described(job, "", "").is_over:
                    break
                has_all = len(self._threads) >= (job.nodes if wanted is None else len(wanted))
                self._wait_for_change(job, _CALM if has_all else _SOON)
            self._is_done = True
            for thread in list(self._threads.values()):
                thread.join()
            self._found.put(None)
        except UserError as error:
            self._found.put(error)

    def _wait_for_change(self, job: Found, seconds: float) -> None:
        """Wait until something of the job may have changed: its status counts its pods. Or until the time is over."""
        from paceline.backends.kubernetes.api.errors import Expired

        try:
            path, version = job.kind.path(self._cluster), job.object["metadata"]["resourceVersion"]
            selector = f"metadata.name={self._name}"
            for kind, _ in self._cluster.watch(path, version, seconds, fieldSelector=selector):
                if kind != "BOOKMARK":
                    return
        except Expired:
            return

    def _follow(self, pod: Pod) -> None:
        if pod.name not in self._threads:
            thread = threading.Thread(target=self._read, args=(pod,), daemon=True)
            self._threads[pod.name] = thread
            thread.start()

    def _read(self, pod: Pod) -> None:
        """Read a pod's log to its end. A stream may end earlier: then go on after the last line."""
        since = None if self._since is None else _rfc(self._since)
        last, same = ("", ""), 0  # the time of the last line, and how many lines had it
        pause = _AGAIN
        while not self._is_over.is_set():
            ended = self._has_ended(pod)  # asked first: what it writes before its end is in the log then
            skip, has_failed = same, False
            try:
                for line in self._cluster.log(pod.name, pod.container, follow=not ended, since=since):
                    stamp = line.partition(b" ")[0].decode(errors="replace")
                    moment = _exact(stamp)
                    if moment < last or (moment == last and skip):  # it was read before: nodes know only seconds
                        skip -= moment == last
                        continue
                    skip, pause = 0, _AGAIN
                    since, last, same = stamp, moment, same + 1 if moment == last else 1
                    for entry in entries((line,), pod, is_plain=self._is_plain):
                        self._found.put(entry)
            except (ApiError, Unreachable) as error:
                if isinstance(error, ApiError) and error.code not in (400, 404, 429, 500, 502, 503, 504):
                    self._found.put(error)
                    return
                if isinstance(error, ApiError) and error.code == 404:
                    return
                if self._is_done and self._is_leaving(pod):  # its node is lost: it never ends
                    return
                has_failed = not isinstance(error, ApiError) or error.code != 400
                pause = min(2 * pause, _MOST_AGAIN)
            if ended and not (has_failed and pause < _MOST_AGAIN):
                return
            self._is_over.wait(pause)

    def _is_leaving(self, pod: Pod) -> bool:
        try:
            return seen(self._cluster.get(self._cluster.path("v1", "pods", pod.name))).is_leaving
        except (ApiError, Unreachable):
            return False

    def _has_ended(self, pod: Pod) -> bool:
        try:
            return seen(self._cluster.get(self._cluster.path("v1", "pods", pod.name))).is_over
        except ApiError as error:
            return error.code == 404
        except Unreachable:
            return False


def follow(cluster: Cluster, job: Found, query: LogQuery) -> Iterator[LogLines]:
    """The lines that a query asks for, until the job ends."""
    since, attempt = query.since, 0
    if query.tail is not None:  # the last ones of what is there, and then all that comes
        there = list(read(cluster, _pods(job, query.ranks), {}, is_plain=job.is_plain, since=since))
        yield from chosen(there, query)
        attempt = max((_attempt(entry) for entry in there), default=0)
        since = there[-1].time + 1e-6 if there else since
    follower = Follower(cluster, job.name, is_plain=job.is_plain, since=since, ranks=query.ranks)
    query = replace(query, since=since)
    try:
        for entry in follower.entries():
            if entry.event is not None:
                attempt = max(attempt, _attempt(entry))
            elif _wanted(entry, query) and (query.attempt is None or query.attempt == attempt):
                yield LogLines(entry.time, attempt, max(entry.rank, 0), _stream(entry), entry.text)
    finally:
        follower.close()


def _attempt(entry: Entry) -> int:
    """The attempt that begins with an event; 0 if none does."""
    event = entry.event or {}
    return int(event.get("attempt") or 0) if event.get("event") == "started" else 0
