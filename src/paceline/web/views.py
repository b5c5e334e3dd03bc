"""What a job's view shows, as JSON: pure functions of what its backend gives.

The report puts these dictionaries into its file, and the page asks for them. Keys are those of `-o json` where there
are such. Series are columns over a common `time`; None is what is not known.
"""

from __future__ import annotations

import base64
import math
import re
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, TypedDict

from paceline.backends.story import details, sentence
from paceline.backends.why import explained, use_in_words
from paceline.job.job import hangs
from paceline.job.quantities import replicas_in_words, show_time
from paceline.job.shown import share

from .stacks import blocks
from .timeline import timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from paceline.backends.base import History
    from paceline.contract.records import EventRecord, MetricsRecord, NodeHistory, Telemetry
    from paceline.job.job import Job

    from .stacks import Block
    from .timeline import Timeline

    Column = list[float | None]
    _Figure = Callable[[Telemetry], Any]
    _Summary = Callable[[list[float]], float]

POINTS = 200  # of a curve
CELLS = 120  # of a row of the heat map, at most
_MOST_CELLS = 6000
_MOST_ROWS = 128  # of the heat map; of more ranks, several share a row
_MOST_INSTANCES = 128
_MOST_EVENTS = 200
_MOST_METRICS = 200
_MOST_NODES = 16  # with curves of their own
_NUMBERS = 6000  # of these curves
_FEWEST = 24  # points of such a curve
SHARES = ("data", "compute", "exchange", "checkpoint", "evaluation", "logging", "script", "idle", "other")


class Curves(TypedDict):
    """Figures over time, of a node or of all nodes together; `of` says whose they are."""

    of: str
    values: dict[str, Column]


class Ranks(TypedDict):
    """What each rank has spent its time on, over time."""

    rank: list[int]  # the first rank of each row; a row has several if there are very many
    node: list[str]  # the host of that rank; "" if it is unknown
    time: list[float]  # the end of each column, in seconds since the epoch
    # share of the time → base64 of a byte for each cell, row by row: 0 to 254 for 0 to 1; 255 is unknown
    shares: dict[str, str]
    cpu: Column  # means of each rank over all the time: cores, and bytes
    memory: Column
    steps: Column  # per second


class Use(TypedDict):
    """What a job has used over time."""

    time: list[float]  # the ends of the spans, in seconds since the epoch
    total: Curves  # of all nodes together
    node_time: list[float]
    # of each node, by node rank, over `node_time`; none if there is only one, or if they are very many
    nodes: list[Curves]
    ranks: Ranks | None  # None if nothing is known of them


class Event(TypedDict):
    """What happened to a job."""

    time: str | None
    event: str
    host: str
    details: str  # in words
    sentence: tuple[str, dict[str, str]] | None  # the same for a translation: with what stands in it


class LastLines(TypedDict):
    """The last lines of a rank."""

    rank: int
    lines: list[str]


class JobView(TypedDict):
    """A job as its report shows it."""

    # as `paceline get -o json`; of very many instances those whose state differs from most, and some others
    job: dict[str, Any]
    events: list[Event]  # what happened to it
    hangs: bool
    timeline: Timeline  # what it did when
    done: float | None  # the share of its epochs; None if that is not known
    why: list[str]  # the lines of `paceline why`
    told: list[Block]  # these lines, but for what `job` says itself
    metrics: MetricsRecord | None  # what the script has logged; None if it has logged nothing
    use: Use | None  # None if nothing was recorded
    logs: list[LastLines]
    file: str  # the job as a job file (YAML); "" if it cannot be read
    settings: dict[str, str]  # the same as names and values, which are compared with those of other jobs
    software: dict[str, str]  # name → version, or the versions on several nodes
    # the commit and the difference to it, of the code that was run; None if that is not known
    origin: dict[str, str] | None
    missing: list[str]  # lines about what could not be read


def events(happened: Sequence[EventRecord]) -> list[Event]:
    """The events with their details in words, as `paceline events` shows them; of very many the first and last ones."""
    few = list(happened)
    if len(few) > _MOST_EVENTS:
        half, end = _MOST_EVENTS // 2, few[-_MOST_EVENTS // 2 :]
        few = [*few[:half], {"time": end[0]["time"], "event": "…", "left_out": len(few) - 2 * half}, *end]
    return [
        {
            "time": show_time(it["time"]), "event": it["event"], "host": it.get("host") or "", "details": details(it),
            "sentence": sentence(it),
        }
        for it in few
    ]  # fmt: skip


def last_lines(lines: Iterable[tuple[int, bytes]], most: int) -> list[LastLines]:
    """The last lines of each rank."""
    import collections

    found: dict[int, collections.deque[str]] = {}
    for rank, text in lines:
        kept = found.setdefault(rank, collections.deque(maxlen=most))
        kept.extend(text.decode(errors="replace").splitlines())
    return [{"rank": rank, "lines": list(kept)} for rank, kept in sorted(found.items())]


def job_view(
    job: Job,
    happened: Sequence[EventRecord],
    history: History,
    *,
    logs: Sequence[LastLines] = (),
    file: str = "",
    settings: Mapping[str, str] | None = None,
    missing: Sequence[str] = (),
    now: float | None = None,
) -> JobView:
    """The view of a job."""
    nodes = history.nodes
    of_nodes = [f"{node['host'] or 'a node'}: {line}" if len(nodes) > 1 else line
                for node in nodes for line in node["missing"]]  # fmt: skip
    shown = job.to_dict()
    if len(job.instances) > _MOST_INSTANCES:
        usual = Counter(it.state for it in job.instances).most_common(1)[0][0]
        odd_first = sorted(shown["instances"], key=lambda it: (it["state"] == usual, it["rank"]))
        shown["instances"] = sorted(odd_first[:_MOST_INSTANCES], key=lambda it: int(it["rank"]))
        missing = [*missing, f"{_MOST_INSTANCES} of {len(job.instances)} ranks are listed"]
    logged = next((node["metrics"] for node in reversed(nodes) if node["metrics"]), None)
    if logged is not None and len(logged["values"]) > _MOST_METRICS:
        missing = [
            *missing,
            f"{_MOST_METRICS} of {len(logged['values'])} metrics are shown, those that were logged first",
        ]
        few = list(logged["values"])[:_MOST_METRICS]
        logged = {
            **logged,
            "values": {name: logged["values"][name] for name in few},
            "last": {name: logged["last"].get(name) for name in few},
        }
    why = [*explained(job, happened), *replicas_in_words(job.progress), *use_in_words(job, nodes)]
    return {
        "job": shown,
        "events": events(happened),
        "hangs": hangs(job),
        "timeline": timeline(job, happened, time.time() if now is None else now),
        "done": share(job),
        "why": why,
        "told": blocks(_untold(job, why)),
        "metrics": logged,
        "use": use(nodes),
        "logs": [*logs],
        "file": file,
        "settings": dict(settings or {}),
        "software": software(nodes),
        "origin": next((origin for node in nodes if (origin := node.get("origin"))), None),
        "missing": [*missing, *history.warnings, *of_nodes],
    }


def _untold(job: Job, why: Sequence[str]) -> list[str]:
    """What `why` says that is not in the fields of the job, which the page shows first."""
    waiting = (job.waiting or "").removeprefix("it ")
    fields = {job.error, job.advice, *job.slow, f"it {waiting}", f"it waits: {waiting}"} - {None}
    message = (job.error or "").partition(": ")[2]  # it begins with the rank, `why` says its host, too
    same = [rf"(rank|node) \d+( on \S+)?: {re.escape(message)}( \(what to do: .*\))?"] if message else []
    if waiting.startswith("hangs: "):
        same.append(rf"it hangs for .* now: {re.escape(waiting.removeprefix('hangs: '))}")
    said = [line for line in why[1:] if line not in fields and not any(re.fullmatch(it, line) for it in same)]
    first = next((number for number, line in enumerate(said) if line.strip()), len(said))
    if message and said[first:] and (others := re.fullmatch(r"  after it (.*): the same", said[first])):
        said[first] = f"  after it {others[1]}: {message}"  # no line is left that it would be the same as
    return said[first:]


def software(nodes: Iterable[NodeHistory]) -> dict[str, str]:
    """Name → version; several where nodes differ."""
    found: dict[str, dict[str, None]] = {}
    for node in nodes:
        for name, version in node["software"].items():
            found.setdefault(name, {})[version] = None
    return {name: ", ".join(versions) for name, versions in found.items()}


# -- use ---------------------------------------------------------------------------------------------------------------


class _Grid:
    """Spans of time, all as long, from the first to the last line of any node."""

    def __init__(self, nodes: Sequence[NodeHistory], points: int) -> None:
        lines = [line for node in nodes for line in (node["telemetry"][0], node["telemetry"][-1])]
        self.begin = min(line["time"] - line["seconds"] for line in lines)
        self.end = max(line["time"] for line in lines)
        shortest = min((line["seconds"] for node in nodes for line in node["telemetry"]), default=10.0)
        self.count = max(1, min(points, math.ceil((self.end - self.begin) / max(shortest, 10.0))))
        self.span = max((self.end - self.begin) / self.count, 1e-9)

    def times(self) -> list[float]:
        """The ends of the spans."""
        return [round(self.begin + (number + 1) * self.span, 1) for number in range(self.count)]

    def places(self, line: Telemetry) -> range:
        """The spans that a line stands for."""
        first = int((line["time"] - line["seconds"] - self.begin) / self.span + 0.5)
        last = math.ceil((line["time"] - self.begin) / self.span - 0.5)
        place = min(self.count - 1, max(0, int((line["time"] - line["seconds"] / 2 - self.begin) / self.span)))
        return range(max(0, first), min(self.count, last)) if last > first else range(place, place + 1)

    def stretched(self, lines: Sequence[Telemetry]) -> list[Telemetry]:
        """Lines that begin or end less than a line from the ends of the grid stand for the time to these as well.

        Each node writes at times of its own; without it, totals would fall by its part there, as if it had left.
        """
        found = list(lines)
        late = found[0]["time"] - found[0]["seconds"] - self.begin
        if late <= max(found[0]["seconds"], self.span):
            found[0] = {**found[0], "seconds": found[0]["seconds"] + late}
        early = self.end - found[-1]["time"]
        if early <= max(found[-1]["seconds"], self.span):
            found[-1] = {**found[-1], "time": self.end, "seconds": found[-1]["seconds"] + early}
        return found

    def columns(self, lines: Iterable[Telemetry], figures: Mapping[str, _Figure]) -> dict[str, Column]:
        """Means over the spans; a span without a line has None."""
        sums = {name: [0.0] * self.count for name in figures}
        counts = {name: [0] * self.count for name in figures}
        for line in lines:
            places = self.places(line)
            for name, figure in figures.items():
                value = figure(line)
                if value is not None:
                    for place in places:
                        sums[name][place] += value
                        counts[name][place] += 1
        return {name: _means(sums[name], counts[name]) for name in figures if any(counts[name])}


def _means(sums: Sequence[float], weights: Sequence[float]) -> Column:
    return [_short(total / weight) if weight else None for total, weight in zip(sums, weights, strict=True)]


def _short(value: float) -> float:
    """A number with four digits, which a curve needs no more of."""
    return round(value) if abs(value) >= 10000 else float(f"{value:.4g}")


def _gpus(name: str, total: _Summary) -> _Figure:
    def figure(line: Telemetry) -> float | None:
        gpus: Mapping[str, Any] = line.get("gpus") or {}
        column = gpus.get(name) or ()
        known = [value for value in column if value is not None]
        return total(known) if known else None

    return figure


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


FIGURES: dict[str, _Figure] = {
    "cpu": lambda line: line["job"].get("cpu"),
    "load": lambda line: line["machine"].get("load"),
    "memory": lambda line: line["job"].get("memory"),
    "memory_used": lambda line: line["machine"].get("memory_used"),
    "received": lambda line: line["machine"].get("received"),
    "sent": lambda line: line["machine"].get("sent"),
    "read": lambda line: line["job"].get("read"),
    "written": lambda line: line["job"].get("written"),
    "gpu": _gpus("use", _mean),
    "gpu_memory": _gpus("memory_used", sum),
    "power": _gpus("power", sum),
    "temperature": _gpus("temperature", max),
}
_MEANS: dict[str, _Summary] = {"gpu": _mean, "temperature": max}  # of nodes; other figures are summed


def use(nodes: Sequence[NodeHistory], points: int = POINTS) -> Use | None:
    """What a job has used, of the lines of its nodes."""
    known = [node for node in nodes if node["telemetry"]]
    if not known:
        return None
    grid = _Grid(known, points)
    each = [grid.columns(grid.stretched(node["telemetry"]), FIGURES) for node in known]
    total: dict[str, Column] = {}
    for name in FIGURES:
        columns = [values[name] for values in each if name in values]
        if columns:
            total[name] = [_together(row, _MEANS.get(name, sum)) for row in zip(*columns, strict=True)]
    found: Use = {
        "time": grid.times(), "total": {"of": "", "values": total}, "node_time": [], "nodes": [], "ranks": ranks(known),
    }  # fmt: skip
    if 1 < len(known) <= _MOST_NODES:
        coarse = _Grid(known, max(_FEWEST, min(points, _NUMBERS // (len(total) * len(known)))))
        found["node_time"] = coarse.times()
        found["nodes"] = [{"of": node["host"], "values": coarse.columns(node["telemetry"], FIGURES)} for node in known]
    return found


def _together(values: Sequence[float | None], how: _Summary) -> float | None:
    known = [value for value in values if value is not None]
    return _short(how(known)) if known else None


def ranks(nodes: Sequence[NodeHistory], cells: int = CELLS) -> Ranks | None:
    """What each rank has spent its time on, and its means."""
    numbers = sorted({rank for node in nodes for line in node["telemetry"] for rank in line["ranks"].get("rank", ())})
    if not numbers:
        return None
    each = math.ceil(len(numbers) / _MOST_ROWS)
    grid = _Grid(nodes, min(cells, _MOST_CELLS // math.ceil(len(numbers) / each)))
    rows = {rank: place // each for place, rank in enumerate(numbers)}
    hosts = {
        rank: node["host"] for node in nodes for line in node["telemetry"] for rank in line["ranks"].get("rank", ())
    }
    heights = max(rows.values()) + 1
    sums = {name: [0.0] * (heights * grid.count) for name in SHARES}
    counts = [0] * (heights * grid.count)
    means = {name: ([0.0] * heights, [0.0] * heights) for name in ("cpu", "memory", "steps")}
    for node in nodes:
        for line in node["telemetry"]:
            places = grid.places(line)
            of_ranks: Mapping[str, Any] = line["ranks"]
            columns = [(sums[name], of_ranks[name]) for name in SHARES if name in of_ranks]
            for number, rank in enumerate(of_ranks.get("rank", ())):
                row = rows[rank]
                for name, (total, weights) in means.items():
                    column: Any = of_ranks.get(name)
                    if column is not None and column[number] is not None:
                        total[row] += column[number] * line["seconds"]
                        weights[row] += line["seconds"]
                if not columns or columns[0][1][number] is None:
                    continue
                cells_of_row = range(row * grid.count + places.start, row * grid.count + places.stop)
                for cell in cells_of_row:
                    counts[cell] += 1
                for sum_of_share, values in columns:
                    if value := values[number]:
                        for cell in cells_of_row:
                            sum_of_share[cell] += value
    return {
        "rank": [rank for place, rank in enumerate(numbers) if place % each == 0],
        "node": [hosts[rank] for place, rank in enumerate(numbers) if place % each == 0],
        "time": grid.times(),
        "shares": {name: _packed(sums[name], counts) for name in SHARES if any(sums[name])},
        "cpu": _means(*means["cpu"]),
        "memory": _means(*means["memory"]),
        "steps": _means(*means["steps"]),
    }


def _packed(sums: Sequence[float], counts: Sequence[int]) -> str:
    cells = bytes(
        max(0, min(254, round(254 * total / count))) if count else 255
        for total, count in zip(sums, counts, strict=True)
    )
    return base64.b64encode(cells).decode()
