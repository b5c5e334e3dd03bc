"""The log of one pod: its lines as entries, and how far it has been read."""

from __future__ import annotations

import collections
import json
import re
import threading
from datetime import datetime, timezone
from typing import TYPE_CHECKING, NamedTuple, cast

from paceline.backends.kubernetes.api.errors import ApiError, Gone, Unreachable
from paceline.backends.kubernetes.api.times import moment
from paceline.job.errors import UserError
from paceline.node.host.pod_format import MARK

from .pods import seen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paceline.backends.kubernetes.api.client import Cluster
    from paceline.node.host.pod_format import PodEvent

    from .pods import Pod

_LINE = re.compile(
    rb"\[rank (?P<rank>\d+)(?: attempt (?P<attempt>\d+))?(?P<err> stderr)?(?P<traceback> traceback)?(?P<piece> \+)?\]"
    rb" ?(?P<text>.*)",
    re.DOTALL,
)
_AGAIN, _MOST_AGAIN = 0.2, 5.0  # seconds until a log is asked for again, and at most if it fails again and again
_MORE, _MOST = 16, 1 << 16  # lines that are asked for at first beside the wanted ones, and at most at once


class Lost(UserError):
    """The logs of a node cannot be read, or have lost their beginning."""


class Entry(NamedTuple):
    """A line of a pod's log: of a rank, perhaps of the traceback that ended it, or an event."""

    time: float
    attempt: int
    rank: int
    stream: str
    text: bytes
    event: PodEvent | None = None
    is_traceback: bool = False


class Parser:
    """Makes entries of the lines of one node's log.

    Attributes:
        attempt: that the next line belongs to, if it does not say so.
        is_begun: whether ranks have started: one of their lines has come, or an event that says so.
        cut: the attempt in which the log begins, behind its first lines; -1 if it has them.
    """

    def __init__(self, pod: Pod | None, *, is_plain: bool) -> None:
        self._pod, self._is_plain, self.attempt = pod, is_plain, 0
        self.is_begun, self.cut = is_plain, -1

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
            if not self.is_begun:
                self.is_begun, self.cut = True, self.attempt
            stream, text, is_traceback = "err" if match["err"] else "out", match["text"] + end, bool(match["traceback"])
            return Entry(written, self.attempt, int(match["rank"]), stream, text, is_traceback=is_traceback)
        if not self._is_plain and text.startswith(MARK):
            event = _event(text[len(MARK) :])
            if event is None:
                return None
            number = int(event.get("attempt") or 0)
            if event["event"] == "restarting" and not self.is_begun:  # it names the attempt that follows
                self.is_begun, self.cut = True, number - 1
            if event["event"] == "started":
                self.attempt, self.is_begun = number, True
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


def _exact(stamp: bytes) -> tuple[bytes, bytes]:
    """A time of a line that can be compared: its fraction of a second may have any number of digits."""
    seconds, _, fraction = stamp.rstrip(b"Z").partition(b".")
    return seconds, fraction.ljust(9, b"0")


def _event(text: bytes) -> PodEvent | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return cast("PodEvent", found) if isinstance(found, dict) and "event" in found else None


def _rfc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class PodLog:
    """The log of a pod, and how far it has been read: the time of the last line, and how many lines had it.

    By the clock of its node alone, so other nodes may have any other time.
    """

    def __init__(
        self, cluster: Cluster, pod: Pod, job_is_over: threading.Event, *, is_plain: bool, since: float | None = None
    ) -> None:
        self._cluster, self._pod, self._is_plain = cluster, pod, is_plain
        self._begin = None if since is None else _rfc(since)
        self._job_is_over, self._is_closed = job_is_over, threading.Event()
        self.rewind()

    def rewind(self) -> None:
        """Read it from its beginning again."""
        self._parser = Parser(self._pod, is_plain=self._is_plain)
        self._last, self._same = b"", 0

    def close(self) -> None:
        """Follow no more."""
        self._is_closed.set()

    def last(self, wanted: Callable[[Entry], bool], count: int, attempt: int | None) -> list[Entry]:
        """The last lines, and no more read than they take; what is read next comes after them."""
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
        """What is there beyond that."""
        yield from filter(None, map(self._take, self._lines(follow=False)))

    @property
    def is_begun(self) -> bool:
        """Whether enough was read to know `cut`, unless that was all."""
        return self._parser.is_begun

    @property
    def cut(self) -> int:
        """The attempt whose first lines its node has no more; -1 if it has all. Nodes keep the end of a long log."""
        report = self._pod.report
        if not self.is_begun and report.get("started"):
            return int(report.get("attempt") or 0)  # no line at all is left
        return self._parser.cut

    def from_beginning(self) -> PodLog:
        """The same log, of which nothing was read."""
        return PodLog(self._cluster, self._pod, self._job_is_over, is_plain=self._is_plain)

    def without_beginning(self) -> Lost:
        """What to say if the lines of its beginning are wanted."""
        return Lost(
            f"the log of pod {self._pod.name} begins in the middle: its node has kept no more of it; --log-dir on a "
            "volume (--data) keeps all"
        )

    def _lines(self, *, follow: bool, tail: int | None = None) -> Iterator[bytes]:
        """Lines that have not been read."""
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
        skip, last = self._same, _exact(self._last)
        since = self._last.decode() or self._begin
        lines = self._cluster.log(self._pod.name, self._pod.container, follow=follow, since=since, tail=tail)
        for line in lines if skip else ():
            written = _exact(_stamp(line))
            if written > last or (written == last and not skip):  # others were read before: nodes know only seconds
                yield line
                break
            skip -= written == last
        yield from lines

    def _take(self, line: bytes) -> Entry | None:
        """What a line says; it has been read now."""
        stamp = _stamp(line)
        if stamp[:1].isdigit():  # else the kubelet says why it has no line
            self._same = self._same + 1 if stamp == self._last else 1
            self._last = stamp
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
        except Gone:
            return None
        except (ApiError, Unreachable):
            return self._pod


def _stamp(line: bytes) -> bytes:
    return line.partition(b" ")[0]


def _lost(pod: Pod, why: UserError) -> Lost:
    return Lost(f"the logs of node {pod.node or 'without a name'} cannot be read: {why}")
