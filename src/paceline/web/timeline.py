"""The life of a job as one bar of time: what it did when, and what marks it; of its story, which has all in words."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, TypedDict

from paceline.backends.story import failed
from paceline.job.job import hangs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from paceline.contract.records import EventRecord
    from paceline.job.job import Job

_MOST = 120  # parts and marks of a kind; of more, those are left out that nobody could tell apart
_LONGEST = 200  # letters about a mark
_BEGINS = ("queued", "granted", "importing", "started", "restarting", "resuming", "requeued", "waiting")
_GOES_ON = ("checkpoint", "resumed")  # what only ranks that run do


class Part(TypedDict):
    """What the job did for a while. Seconds count from its beginning."""

    kind: str  # waiting, starting, running, hung, suspended; unknown after the last news of a job that is lost
    at: float
    seconds: float
    attempt: int  # from 0


class Mark(TypedDict):
    """A moment."""

    kind: str  # checkpoint, restart, stop
    at: float
    about: str  # the step of the checkpoint, or why it started again
    count: int  # how many stand here, if they are too close to each other


class Timeline(TypedDict):
    """The bar."""

    begin: float  # when the job was submitted, and when it ended; of one that has not ended, now
    end: float
    is_over: bool
    seconds: float
    parts: list[Part]
    marks: list[Mark]
    totals: dict[str, float]  # kind → seconds, in the order of `KINDS`
    attempts: int
    counts: dict[str, int]  # kind of mark → how many there were


KINDS = ("waiting", "starting", "running", "hung", "suspended", "unknown")


def timeline(job: Job, happened: Sequence[EventRecord], now: float) -> Timeline:
    """The bar of a job, of its story; whatever that lacks, the bar ends at the job's end, or `now`."""
    told = _Told(job.created)
    for event in happened:
        told.take(event)
    last = max((float(event["time"]) for event in happened), default=job.created)
    end = max(job.created, (job.finished or last) if job.is_over else now)
    told.end(last if job.state == "LOST" else end, is_hung=hangs(job) or (job.is_over and job.state != "SUCCEEDED"))
    if job.state == "LOST":
        told.parts.append(("unknown", last, end, told.attempt))
    parts = [it for it in told.parts if it[2] > it[1]]
    seconds = max(end - job.created, 1e-3)
    totals: dict[str, float] = {}
    for kind, begin, until, _ in parts:
        totals[kind] = totals.get(kind, 0.0) + until - begin
    return {
        "begin": job.created, "end": end, "is_over": job.is_over, "seconds": round(seconds, 3),
        "parts": [
            {"kind": kind, "at": round(begin - job.created, 3), "seconds": round(until - begin, 3), "attempt": attempt}
            for kind, begin, until, attempt in _fewer(parts, seconds)
        ],
        "marks": [
            {**mark, "at": round(min(max(mark["at"] - job.created, 0.0), seconds), 3)}
            for mark in _apart(told.marks, seconds)
        ],
        "totals": {kind: round(totals[kind], 1) for kind in KINDS if kind in totals},
        "attempts": len({attempt for kind, _, _, attempt in parts if kind == "running"}),
        "counts": dict(Counter(mark["kind"] for mark in told.marks)),
    }  # fmt: skip


_Span = tuple[str, float, float, int]  # kind, begin, end, attempt


class _Told:
    """What the events until now say. Several hosts may tell of the same; the first one counts."""

    def __init__(self, created: float) -> None:
        self.parts: list[_Span] = []
        self.marks: list[Mark] = []
        self.attempt = 0
        self._kind, self._since = "waiting", created
        self._ended: float | None = None  # by a node; others may go on
        self._importing: set[str] = set()  # hosts
        self._hung_until = 0.0  # a hang was seen until then at least
        self._restarts: set[int | None] = set()

    def take(self, event: EventRecord) -> None:
        """Go on with an event."""
        name, time = event["event"], float(event["time"])
        if self._ended is not None and name in _BEGINS:
            self._to("waiting", self._ended)
        if name in _BEGINS or name in _GOES_ON:
            self._ended = None
        if name in _STEPS:
            _STEPS[name](self, event, time)

    def end(self, time: float, *, is_hung: bool) -> None:
        """The story is over; `is_hung`: it hangs still, or did when it ended."""
        if self._kind == "hung" and not is_hung:
            self._to("running", self._hung_until)
        self._to("", time if self._ended is None else min(time, self._ended))

    def _to(self, kind: str, time: float) -> None:
        if kind != self._kind:
            time = max(time, self._since)
            self.parts.append((self._kind, self._since, time, self.attempt))
            self._kind, self._since = kind, time

    def _mark(self, kind: str, time: float, about: str) -> None:
        self.marks.append({"kind": kind, "at": time, "about": about[:_LONGEST], "count": 1})

    def _wait(self, _: EventRecord, time: float) -> None:
        self._to("waiting", time)

    def _suspend(self, _: EventRecord, time: float) -> None:
        self._to("suspended", time)

    def _grant(self, _: EventRecord, time: float) -> None:
        if self._kind != "running":
            self._to("starting", time)

    def _import(self, event: EventRecord, time: float) -> None:
        self._importing.add(str(event.get("host") or ""))
        self._grant(event, time)

    def _imported(self, event: EventRecord, time: float) -> None:
        self._importing.discard(str(event.get("host") or ""))
        if not self._importing and self._kind == "starting":
            self._to("running", time)

    def _hang(self, event: EventRecord, time: float) -> None:
        hang = event.get("hang")
        self._to("hung", time - float((hang.get("seconds") or 0.0) if hang else 0.0))
        self._hung_until = time

    def _stop(self, _: EventRecord, time: float) -> None:
        if not any(mark["kind"] == "stop" and time - mark["at"] < 1 for mark in self.marks):
            self._mark("stop", time, "")

    def _finish(self, _: EventRecord, time: float) -> None:
        self._ended = time

    def _started(self, event: EventRecord, time: float) -> None:
        number = event.get("attempt")
        if self._kind in ("running", "hung") and number in (None, self.attempt):
            return
        self._to("starting", time)
        self.attempt = max(self.attempt, int(number or 0))
        if not self._importing:
            self._to("running", time)

    def _restarting(self, event: EventRecord, time: float) -> None:
        number = event.get("attempt", event.get("restarts"))
        if number is None or number not in self._restarts:
            self._restarts.add(number)
            failure = event.get("failure")
            self._mark("restart", time, failed(failure) if failure else str(event.get("why") or ""))
            self._to("starting", time)

    def _go_on(self, event: EventRecord, time: float) -> None:
        if self._kind != "suspended":
            self._importing.clear()
            self._to("running", time)
        if event["event"] == "checkpoint":
            self._mark("checkpoint", time, str(event.get("step", "")))


_STEPS: dict[str, Callable[[_Told, EventRecord, float], None]] = {
    "queued": _Told._wait, "waiting": _Told._wait, "resuming": _Told._wait, "requeued": _Told._wait,
    "granted": _Told._grant, "importing": _Told._import, "imported": _Told._imported, "started": _Told._started,
    "restarting": _Told._restarting, "hang": _Told._hang, "suspended": _Told._suspend, "checkpoint": _Told._go_on,
    "resumed": _Told._go_on, "stopping": _Told._stop, "finished": _Told._finish,
}  # fmt: skip


def _fewer(parts: Sequence[_Span], seconds: float) -> Iterable[_Span]:
    """The parts; if they are very many, those that are too short to be seen belong to the one before."""
    if len(parts) <= _MOST:
        return parts
    found: list[_Span] = []
    for part in parts:
        if found and part[2] - part[1] < seconds / _MOST:
            found[-1] = (*found[-1][:2], part[2], found[-1][3])
        else:
            found.append(part)
    return found


def _apart(marks: Iterable[Mark], seconds: float) -> list[Mark]:
    """The marks; of those of a kind that are too close to each other the last one, which counts the others."""
    found: dict[tuple[str, int], Mark] = {}
    for mark in marks:
        place = (mark["kind"], int(mark["at"] / max(seconds / _MOST, 1e-9)))
        before = found.get(place)
        found[place] = {**mark, "count": before["count"] + 1} if before else mark
    return list(found.values())
