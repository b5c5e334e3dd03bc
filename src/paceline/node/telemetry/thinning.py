"""Merges lines of telemetry, so that their number is bounded: the older a line, the more seconds it may stand for.

Pure functions. With `FINENESS` 256, a line that is a day old stands for at most 338 seconds. A job of an hour has 360
lines, a job of 8 hours some 1,200, and one of a month 3,000; the number grows with the logarithm of the time.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from paceline.contract.records import Telemetry

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
        return {key: _mean([group.get(key) for group in groups], weights) for key in keys}
    rows = sorted({row for group in groups for row in group.get(name, ())})
    is_same = all(group.get(name) == rows for group in groups)
    places = [{row: place for place, row in enumerate(group.get(name, ()))} for group in groups]

    def values(key: str) -> Iterable[Sequence[Any]]:
        """The values of each row in all groups."""
        if is_same and all(key in group for group in groups):
            return zip(*(group[key] for group in groups))
        return (
            [group[key][at[row]] if key in group and row in at else None for group, at in zip(groups, places)]
            for row in rows
        )

    return {name: rows, **{key: [_mean(it, weights) for it in values(key)] for key in keys}}


def _mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    if None in values:
        pairs = [(value, weight) for value, weight in zip(values, weights) if value is not None]
        if not pairs:
            return None
        values, weights = zip(*pairs)
    total = sum(weights)
    mean = sum(map(operator.mul, values, weights)) / total if total else values[-1]
    return round(mean) if abs(mean) >= 1000 else round(mean, 3)
