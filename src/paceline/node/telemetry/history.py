"""What a node has written about its part of a job while that ran: telemetry, and what the script has logged."""

from __future__ import annotations

import json
import math
import operator
import os
import sys
import time
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from paceline.node.files import read_json, regular
from paceline.node.journal.state import FINAL
from paceline.node.machine.environments import packages_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from typing_extensions import TypeGuard

    from paceline.contract.records import MetricsRecord, NodeHistory, Telemetry, UsageRecord
    from paceline.node.rundir.directory import RunDirectory

    _Line = dict[str, Any]  # an object of a file of which nothing is known, or of metrics, whose names the script gives

POINTS = 240  # of each series
_NUMBERS, _FEWEST = 6000, 48  # of all metrics together, and points of each
_MOST_BYTES = 64 << 20  # of a file; of a longer one, the end is read
_LONGEST = 1 << 18  # bytes of the end of telemetry.jsonl that is looked at for its last line
SKETCH = 40  # points of the losses of a job in a list
_SHORT = 1 << 16  # bytes of metrics.jsonl up to which all of it is read for them
_RECENT = 30.0  # seconds, beside those for which a line stands, in which it is of now
_MOST_STEPS = 1 << 53  # what JavaScript can count
_ABSURD = 1e30  # for any figure of a machine
_FIGURES = ("job", "machine")
_OF_LINE = {"time", "epoch", "step", "attempt", "sync_method"}  # keys of a line that are no metrics


def history(run: RunDirectory, since: float = 0.0, points: int = POINTS) -> NodeHistory:
    """The history in a run directory."""
    status = run.read_status() or {}
    agent = status.get("agent")
    missing: list[str] = []
    found: NodeHistory = {
        "host": agent.get("host", "") if agent else "",
        "node_rank": status.get("node_rank") or 0,
        "telemetry": [],
        "metrics": None,
        "software": {},
        "missing": missing,
    }
    origin = read_json(run.origin) or {}
    python = (read_json(run.spec) or {}).get("python") or [""]
    versions = origin.get("software") or packages_of(python[0])  # the first is not known in a job's first seconds
    if isinstance(versions, dict):
        found["software"] = {str(name): str(version) for name, version in versions.items()}
    if origin.get("commit"):
        found["origin"] = {key: str(origin.get(key) or "") for key in ("commit", "branch", "diff")}
    try:
        lines = sorted(telemetry(run.telemetry), key=operator.itemgetter("time"))  # a clock may have been set back
        found["telemetry"] = reduced([it for it in lines if it["time"] > since], points)
    except FileNotFoundError:
        if status.get("state") in (None, *FINAL):  # else it comes
            missing.append("no telemetry was recorded: the job has run for less than 3 s")
    except OSError as error:
        missing.append(f"its telemetry cannot be read: {error.strerror}")
    try:
        found["metrics"] = metrics(run.path / "metrics.jsonl", since, points)
    except FileNotFoundError:  # a script without the library has none, and nodes but the first one
        pass
    except OSError as error:
        missing.append(f"its metrics cannot be read: {error.strerror}")
    return found


def usage(runs: Iterable[RunDirectory]) -> UsageRecord | None:
    """What a job uses now, as its nodes have written it last into these run directories; None if that is not known."""
    now = [it for it in map(_latest, runs) if it is not None]
    gpus = [it["gpus"] for it in now if "gpus" in it]
    rows = [row for it in gpus for row in zip(*(it.get(key, ()) for key in ("index", "use", "memory_used")))]
    return {
        "processes": sum(it["job"].get("processes") or 0 for it in now),
        "cpu": round(sum(it["job"].get("cpu") or 0.0 for it in now), 3),
        "memory": sum(it["job"].get("memory") or 0 for it in now),
        "gpus": tuple({"device": str(index), "use": use, "memory": memory} for index, use, memory in rows),
    } if now else None  # fmt: skip


def _latest(run: RunDirectory) -> Telemetry | None:
    """The last line of telemetry, if it is of now."""
    try:
        with open(run.telemetry, "rb", opener=regular) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LONGEST))
            lines = reversed(file.read(_LONGEST).splitlines())
            last = next((it for it in map(_object, lines) if _is_telemetry(it)), None)
    except OSError:
        return None
    is_now = last is not None and time.time() - last["time"] < _RECENT + last["seconds"]
    return last if is_now else None


def telemetry(path: Path) -> Iterator[Telemetry]:
    """The lines of telemetry.jsonl; what is no such line is left out."""
    yield from filter(_is_telemetry, _lines(path))


def _is_telemetry(line: _Line | None) -> TypeGuard[Telemetry]:
    return (
        line is not None
        and all(_is_number(line.get(key)) for key in ("time", "seconds"))
        and line["seconds"] > 0
        and all(isinstance(group := line.get(name), dict) and _are_figures(group.values()) for name in _FIGURES)
        and all(_are_columns(line.get(group, {}), of) for group, of in (("ranks", "rank"), ("gpus", "index")))
    )


def _are_columns(group: Any, of: str) -> bool:
    columns: list[Any] = list(group.values()) if isinstance(group, dict) else [None]
    return (
        all(isinstance(it, list) and _are_figures(it) for it in columns)
        and len(set(map(len, columns))) <= 1
        and set(map(type, group.get(of, ()))) <= {int}
    )


def _are_figures(values: Collection[Any]) -> bool:
    """Whether each is a number, or None, and not absurdly large."""
    kinds = {*map(type, values)}
    return kinds <= {int, float, type(None)} and all(-_ABSURD < it < _ABSURD for it in values if it)


def metrics(path: Path, since: float = 0.0, points: int = POINTS) -> MetricsRecord:
    """The values in metrics.jsonl: means over `points` spans of steps. Of steps done again, the last attempt counts."""
    lines: list[_Line] = []
    for line in _lines(path):
        step = line.get("step")
        if type(step) is not int or abs(step) > _MOST_STEPS or not _is_number(line.get("time")):
            continue
        while lines and lines[-1]["step"] >= step and lines[-1].get("attempt") != line.get("attempt"):
            lines.pop()
        lines.append(line)
    lines = [line for line in lines if line["time"] > since]
    names = list(dict.fromkeys(key for line in lines for key in line if key not in _OF_LINE))
    most = min(points, max(_FEWEST, _NUMBERS // max(1, len(names))))
    spans = _spans(lines, most)
    return {
        "time": [round(group[-1]["time"], 3) for group in spans],
        "step": [group[-1]["step"] for group in spans],
        "values": {name: [_mean([line.get(name) for line in group]) for group in spans] for name in names},
        "last": {name: next(_known([next(it[name] for it in reversed(lines) if name in it)]), None) for name in names},
    }


def losses(run: RunDirectory, points: int = SKETCH) -> list[float]:
    """Some losses over all steps; of a long file, only lines at equal distances are read. Empty without any."""
    try:
        with open(run.path / "metrics.jsonl", "rb", opener=regular) as file:
            size = os.fstat(file.fileno()).st_size
            if size <= _SHORT:
                every = file.read().splitlines()
                places = sorted({at * (len(every) - 1) // (points - 1) for at in range(points)}) if every else []
                lines = [every[at] for at in places]
            else:
                lines = [_line_at(file, at * (size - _SHORT // 16) // (points - 1)) for at in range(points)]
    except OSError:
        return []
    found = (next((it for key, it in (_object(line) or {}).items() if "loss" in key.lower()), None) for line in lines)
    return [float(f"{value:.4g}") for value in _known(found)]


def _line_at(file: BinaryIO, place: int) -> bytes:
    """The first whole line from a place on."""
    file.seek(place)
    if place:
        file.readline(_LONGEST)
    return file.readline(_LONGEST)


def _spans(lines: Sequence[_Line], points: int) -> list[list[_Line]]:
    """The lines in groups, each of about as many steps; of two trainings of one process, each has its own."""
    if len(lines) <= points:
        return [[line] for line in lines]
    changes = [line["step"] - before["step"] for before, line in zip(lines, lines[1:])]
    steps = sum(change for change in changes if change > 0)
    are_apart = sum(change < 0 for change in changes) < points  # a chart has no place for more
    groups: dict[tuple[int, int], list[_Line]] = {}
    training = done = 0
    for line, change in zip(lines, [0, *changes]):
        training, done = training + (change < 0 and are_apart), done + max(0, change)
        groups.setdefault((training, min(points - 1, done * points // max(1, steps))), []).append(line)
    return list(groups.values())


def _mean(values: Sequence[Any]) -> float | None:
    known = [float(value) for value in values if _is_number(value)]
    if not known:
        return None
    mean = sum(known) / len(known)
    return float(f"{mean if math.isfinite(mean) else sum(it / len(known) for it in known):.6g}")


def _known(values: Iterable[Any]) -> Iterator[float]:
    return filter(_is_number, values)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _lines(path: Path) -> Iterator[_Line]:
    """The objects in a file with one a line."""
    with open(path, "rb", opener=regular) as file:
        size = os.fstat(file.fileno()).st_size
        if size > _MOST_BYTES:
            file.seek(size - _MOST_BYTES)
            file.readline()
        lines = file.read(_MOST_BYTES).splitlines()
    if all(line.startswith(b"{") and line.endswith(b"}") for line in lines):
        try:  # all at once takes half the time
            found = json.loads(b"[" + b",".join(lines) + b"]")
        except (ValueError, RecursionError):
            pass
        else:
            yield from (it for it in found if isinstance(it, dict))
            return
    yield from filter(None, map(_object, lines))


def _object(line: bytes) -> _Line | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):  # it is not whole
        return None
    return found if isinstance(found, dict) else None


# -- merging lines, so that their number is bounded: the older a line, the more seconds it may stand for ---------------

# With `FINENESS` 256, a line that is a day old stands for at most 338 seconds. A job of an hour has 360 lines, a job of
# 8 hours some 1,200, and one of a month 3,000; the number grows with the logarithm of the time.
FINENESS = 256  # the age of a line over the seconds that it may stand for
_NAMES = {"rank", "index"}  # columns that say what the others are of


def thinned(lines: Iterable[Telemetry], now: float) -> list[Telemetry]:
    """The lines with neighbours merged, as far as their age allows."""
    return _merged(lines, lambda first, line: line["time"] - _begin(first) <= (now - first["time"]) / FINENESS)


def reduced(lines: Sequence[Telemetry], most: int) -> list[Telemetry]:
    """At most `most` lines, each for the same time."""
    if len(lines) <= most:
        return list(lines)
    begin = _begin(lines[0])
    span = (lines[-1]["time"] - begin) / most

    def place(line: Telemetry) -> int:
        return min(most - 1, int((line["time"] - begin) / span))

    return _merged(lines, lambda first, line: place(first) == place(line))


def _begin(line: Telemetry) -> float:
    return line["time"] - line["seconds"]


def _merged(lines: Iterable[Telemetry], fits: Callable[[Telemetry, Telemetry], bool]) -> list[Telemetry]:
    """Lines, each merged with those that follow it and fit to it."""
    groups: list[list[Telemetry]] = []
    for line in lines:
        if groups and fits(groups[-1][0], line):
            groups[-1].append(line)
        else:
            groups.append([line])
    return [merged(group) for group in groups]


def merged(lines: Sequence[Telemetry]) -> Telemetry:
    """One line for several: the mean of each figure, by the seconds of each line; None counts for none."""
    if len(lines) == 1:
        return lines[0]
    weights = [line["seconds"] for line in lines]
    groups = {
        name: _group([cast("Mapping[str, Any]", line.get(name) or {}) for line in lines], weights)
        for name in ("job", "machine", "ranks", "gpus")
        if any(line.get(name) for line in lines)
    }
    return cast("Telemetry", {"time": lines[-1]["time"], "seconds": round(sum(weights), 3), **groups})


def _group(groups: Sequence[Mapping[str, Any]], weights: Sequence[float]) -> dict[str, Any]:
    """A group of figures, or of columns of figures; rows have the name that the column `rank` or `index` gives them."""
    name = next((key for key in _NAMES if any(key in group for group in groups)), None)
    keys = dict.fromkeys(key for group in groups for key in group if key != name)
    if name is None:
        return {key: _weighted_mean([group.get(key) for group in groups], weights) for key in keys}
    rows = sorted({row for group in groups for row in group.get(name, ())})
    is_same = all(group.get(name) == rows for group in groups)
    places = [{row: place for place, row in enumerate(group.get(name, ()))} for group in groups]

    def values(key: str) -> Iterable[Sequence[Any]]:
        """Of each row, its values in all groups."""
        if is_same and all(key in group for group in groups):
            return zip(*(group[key] for group in groups))
        return (
            [group[key][at[row]] if key in group and row in at else None for group, at in zip(groups, places)]
            for row in rows
        )

    return {name: rows, **{key: [_weighted_mean(it, weights) for it in values(key)] for key in keys}}


def _weighted_mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    if None in values:
        pairs = [(value, weight) for value, weight in zip(values, weights) if value is not None]
        if not pairs:
            return None
        values, weights = zip(*pairs)
    total = sum(weights)
    mean = sum(map(operator.mul, values, weights)) / total if total else values[-1]
    return round(mean) if abs(mean) >= 1000 else round(mean, 3)
