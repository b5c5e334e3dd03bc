"""Why a job failed, hangs or waits, and what makes it slow, in words: `paceline why`, and reports."""

from __future__ import annotations

import os
import re
import time
from typing import TYPE_CHECKING, Any

from paceline.job.quantities import show_duration, show_size, show_time
from paceline.job.text import printable
from paceline.node.telemetry.history import merged
from paceline.node.watching.hang import find, grouped, listed, stood
from paceline.node.watching.live import SECONDS
from paceline.node.watching.slowness import compared as compared  # noqa: PLC0414 - for the screen, too
from paceline.node.watching.slowness import in_words
from paceline.node.watching.typical import ENDED

from .story import failed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.contract.records import EventRecord, Failure, NodeHistory, OtherFailure, Telemetry
    from paceline.contract.stands import Place, Stand
    from paceline.job.job import Job

_MOST_FRAMES = 12
_OWN_NUMBER = re.compile(r"^ *\[rank\d+\]: ?", re.MULTILINE)  # that torch puts before the lines of a traceback
_MOST_TRACEBACK = 30  # lines
RECENT = 600.0  # seconds, of which the use of a job that runs is told
_LEAST_GROWTH = 1.25  # of a rank's memory that is told


def explained(job: Job, happened: Sequence[EventRecord], stands: Sequence[Stand] | None = None) -> list[str]:
    """All that is known of why a job is as it is, in lines."""
    lines = [*_of_end(job, happened), *_of_hangs(job, happened, places=stands is None), *_of_spent(job, happened)]
    return [printable(line) for line in (*lines, *_of_ranks(job, stands))]


def _of_end(job: Job, happened: Sequence[EventRecord]) -> Iterator[str]:
    """How the job is, and what failed."""
    code = "" if job.exit_code is None else f" (exit code {job.exit_code})"
    passed = job.duration(time.time())
    since = "" if passed is None else f" {'after' if job.is_over else 'for'} {show_duration(passed)}"
    yield f"job {job.name}: {job.state}{code}{since}"
    is_told = any(event["event"] == "hang" for event in happened)  # by `_of_hangs`
    if job.waiting and not (is_told and job.waiting.startswith("it hangs")):
        reason = job.waiting.removeprefix("it ")
        yield f"it {reason}" if reason.startswith(("waits ", "hangs")) else f"it waits: {reason}"
    if job.state == "STARTING":
        imports = [event for event in happened if event["event"] in ("importing", "imported")]
        last = imports[-1] if imports else happened[-1]
        is_importing = last["event"] == "importing"
        since = show_duration(time.time() - last["time"])
        yield f"it imports {', '.join(last['what'])}, for {since}" if is_importing else "its ranks have not started yet"
    restarts = [event for event in happened if event["event"] == "restarting"]
    for event in restarts[-3:]:
        why = failed(cause) if (cause := event.get("failure")) else event.get("why") or "it was asked to"
        yield f"{show_time(event['time'])} it started again: {why}"
    failure, rest = _failures(happened)
    if failure is None or job.state != "FAILED":
        if job.error:
            yield job.error
        return
    yield failed(failure)
    if failure.get("advice"):
        yield failure["advice"]
    yield from _last_of(failure, "")
    alike: list[list[Failure | OtherFailure]] = [[failure]]
    for other in rest:
        if (group := next((group for group in alike if _say_the_same(group[0], other)), None)) is not None:
            group.append(other)
        else:
            alike.append([other])
    alike[0] = alike[0][1:]
    for others in filter(None, alike):
        ranks = [other["rank"] for other in others if other["rank"] is not None]
        nodes = [f"node {other['node']}" for other in others if other["rank"] is None]
        who = ", ".join([*([listed(ranks)] if ranks else []), *nodes])
        if others is alike[0]:
            yield f"  after it {who}: the same"
        else:
            yield f"  after it {who}: {others[0]['message']}"
            yield from _last_of(others[0], "    ")


def _say_the_same(one: Failure | OtherFailure, other: Failure | OtherFailure) -> bool:
    """Whether two failures say the same, but for numbers of ranks: the other one has perhaps only its last lines.

    Of very many failures, nodes send the messages alone.
    """
    message, text, collectives = _said(one)
    own_message, own_text, own_collectives = _said(other)
    if "traceback" not in other:
        return message == own_message
    return (message, collectives) == (own_message, own_collectives) and (
        text == own_text or (bool(own_text) and text.endswith(f"\n{own_text}"))
    )


def _said(failure: Failure | OtherFailure) -> tuple[str, str, str]:
    """The message, the lines without their margin, and the collectives, without the number of the rank."""
    texts = (failure["message"], failure.get("traceback"), failure.get("collectives"))
    message, text, collectives = (_OWN_NUMBER.sub("", str(text or "")).strip() for text in texts)
    return message, "\n".join(line.strip() for line in text.split("\n")), collectives


def _failures(happened: Sequence[EventRecord]) -> tuple[Failure | None, Sequence[OtherFailure]]:
    """The first failure of the last end of the job that had one, and the others."""
    for event in reversed(happened):
        if event["event"] == "finished" and (failure := event.get("failure")):
            return failure, event["others"]
    return None, ()


def _last_of(failure: Failure | OtherFailure, indent: str) -> Iterator[str]:
    """What a rank that failed has entered and written last."""
    if failure.get("collectives"):
        yield f"{indent}the last collective that it had entered: {failure['collectives']}"
    text = str(failure.get("traceback") or "").rstrip("\n").split("\n")
    if text != [""]:
        yield f"{indent}it wrote last:"
        yield from (f"{indent}  {line}" for line in text[-_MOST_TRACEBACK:])


def _of_hangs(job: Job, happened: Sequence[EventRecord], *, places: bool) -> Iterator[str]:
    """The last hang of the last attempt, or else where ranks were when they were stopped."""
    begun = max((number for number, event in enumerate(happened) if event["event"] == "started"), default=0)
    found = [event for event in happened[begun:] if event["event"] == "hang"]
    stood = [event for event in happened[begun:] if event["event"] == "stacks"]
    first, others = _failures(happened)
    own = {failure["rank"] for failure in (first, *others) if failure is not None}  # ended by themselves
    for event in stood if places and not found else ():
        if stopped := [it for it in event["places"] if it["why"] != ENDED and not own.issuperset(it["ranks"])]:
            yield ""
            yield f"{show_time(event['time'])} where the ranks were that were stopped:"
            yield from _of_places(stopped)
    if found:
        yield ""
        hang = found[-1]["hang"]
        begun_at = found[-1]["time"] - hang["seconds"]
        if job.waiting and job.waiting.endswith(hang["line"]):
            yield f"it hangs for {show_duration(time.time() - begun_at)} now: {hang['line']}"
        else:
            yield f"{show_time(begun_at)} it hung: {hang['line']}"
        yield from _of_places(hang["places"] if places else ())


def _of_spent(job: Job, happened: Sequence[EventRecord]) -> Iterator[str]:
    """What the ranks spent their time on, and what of that can be less; of each node the same, once it has ended."""
    found = [event for event in happened if event["event"] == "spent"]
    if not found and job.slow and not (job.waiting or "").startswith("it hangs"):  # then it is no exchange that is slow
        yield ""
        yield from job.slow
    for event in found:
        host = f" on {event['host']}" if len(found) > 1 and event.get("host") else ""
        yield ""
        yield f"time{host}: {in_words(event['spent'])}"
        yield from event["causes"]
    if over := compared([event["spent"] for event in found]):
        yield ""
        yield from over


def _of_ranks(job: Job, stands: Sequence[Stand] | None) -> Iterator[str]:
    """Where the ranks are now."""
    if stands is None:
        return
    yield ""
    if (hang := find(stands, SECONDS)) is not None:
        yield f"in {SECONDS:g} s nothing has moved: {hang['line']}"
        yield from _of_places(hang["places"])
        return
    busy = sum(stand["idle"] < SECONDS for stand in stands)
    moving = sum(stand["still"] < SECONDS for stand in stands)
    yield f"in {SECONDS:g} s: {busy} of {len(stands)} ranks busy, {moving} entered a collective"
    if len(stands) < job.ranks:
        yield f"{job.ranks - len(stands)} ranks have ended, or their machines do not answer"
    yield from _of_places(grouped(stands))


def _of_places(places: Sequence[Place]) -> Iterator[str]:
    for place in places:
        yield ""
        yield stood(place)
        yield from (f"    {_frame(frame)}" for frame in place["stack"][:_MOST_FRAMES])
        if len(place["stack"]) > _MOST_FRAMES:
            yield f"    … and {len(place['stack']) - _MOST_FRAMES} more"
        for thread in place["threads"]:
            if thread["frames"]:
                yield f"  thread {thread['name']}: {_frame(thread['frames'][0])}"


def _frame(frame: Sequence[Any]) -> str:
    file, line, function = frame
    short = re.sub(r".*/(site|dist)-packages/", "", file)
    return f"{short}:{line} in {function}" if line else f"{os.path.basename(file)} in {function}"


# -- what it uses ------------------------------------------------------------------------------------------------------


def use_in_words(job: Job, nodes: Sequence[NodeHistory]) -> Iterator[str]:
    """Lines about a job that runs, and about one that ran out of memory."""
    if job.cause == "out of memory":
        yield from _growth(nodes)
    if job.is_over:
        return
    now = max((node["telemetry"][-1]["time"] for node in nodes if node["telemetry"]), default=0.0)
    recent = [[line for line in node["telemetry"] if line["time"] > now - RECENT] for node in nodes]
    means = [merged(lines) for lines in recent if lines]
    if means:
        yield f"use in the last {show_duration(max(it['seconds'] for it in means))}: {_summary(means)}"


def _summary(means: Sequence[Telemetry]) -> str:
    def total(group: str, key: str) -> float:
        found: list[Any] = [it[group].get(key) or 0 for it in means]  # type: ignore[literal-required]
        return float(sum(found))

    def size(group: str, key: str) -> str:
        return show_size(int(total(group, key)))

    parts = [
        f"{total('job', 'cpu'):.1f} of {total('machine', 'cores'):g} cores",
        f"{size('job', 'memory')} of {size('machine', 'memory')} memory ({size('machine', 'memory_used')} in use)",
        f"{size('job', 'read')}/s read and {size('job', 'written')}/s written",
        f"{size('machine', 'received')}/s received and {size('machine', 'sent')}/s sent",
    ]
    gpus: list[Any] = [it["gpus"] for it in means if "gpus" in it]
    use, memory, used, power = (
        [value for it in gpus for value in it.get(key) or () if value is not None]
        for key in ("use", "memory", "memory_used", "power")
    )
    if use:
        of = f", {show_size(int(sum(used)))} of {show_size(int(sum(memory)))}" if used and memory else ""
        parts.insert(0, f"GPUs {sum(use) / len(use):.0f} % busy{of}" + (f", {sum(power):.0f} W" if power else ""))
    return "; ".join(parts)


def _growth(nodes: Sequence[NodeHistory]) -> Iterator[str]:
    """The rank whose memory has grown most, if one's has."""
    ranks: dict[int, list[tuple[float, int]]] = {}
    for node in nodes:
        for line in node["telemetry"]:
            columns = line["ranks"]
            for rank, memory in zip(columns.get("rank", ()), columns.get("memory", ()), strict=False):
                if memory:
                    ranks.setdefault(rank, []).append((line["time"], memory))
    if not ranks:
        return
    rank, seen = max(ranks.items(), key=lambda it: it[1][-1][1] - it[1][0][1])
    (begin, first), (end, last) = seen[0], seen[-1]
    if last >= _LEAST_GROWTH * first:
        took = show_duration(max(1, int(end - begin)))
        yield f"the memory of rank {rank} grew from {show_size(first)} to {show_size(last)} in {took}"
