"""The output: the machine, the table, and the same as JSON."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Sequence
from typing import Any

from .row import Row, Spread
from .sample import Sample

COLUMNS = ("name", "work", "paceline", "against", "ratio (min-max)", "goal", "pairs")
PACKAGES = ("torch", "torchx", "paceline")
NONE = "-"


def machine() -> dict[str, Any]:
    """The properties of the machine on which times depend."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def headline(facts: dict[str, Any]) -> str:
    """The machine in one line."""
    versions = ", ".join(f"{name} {facts[name]}" for name in PACKAGES)
    return f"{facts['cores']} cores, load {facts['load']} at the start, Python {facts['python']}, {versions}"


def table(rows: Sequence[Row]) -> str:
    """A table that is readable as text and as Markdown, followed by the errors, and by why rows are skipped."""
    cells = [COLUMNS, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(COLUMNS))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    errors = [f"{row.case.name}: {row.error or row.skipped}" for row in rows if row.error or row.skipped]
    return "\n\n".join(["\n".join(lines), *errors])


def _cells(row: Row) -> tuple[str, ...]:
    case = row.case
    goal = NONE
    why = "error" if row.error else "skipped" if row.skipped else ""
    if case.goal is not None:
        goal = str(case.goal) + ("" if why else ", met" if row.is_goal_met else ", missed")
        delay = None if case.goal.beyond is None else Spread.of(row.delays)
        goal += "" if delay is None else f": {delay.median:.2f} s ({delay.low:.2f}-{delay.high:.2f})"
        goal += "" if case.goal.apart is None or row.apart is None else f": {row.apart:.1g}"
    if why:
        return case.name, case.work, NONE, case.other.label if case.other else NONE, why, goal, str(row.pairs)
    against = f"{case.other.label}: {_time(row.other)}" if case.other else NONE
    ratio = _ratio(row.ratios)
    return case.name, case.work, _time(row.paceline), against, ratio, goal, str(row.pairs)


def _ratio(ratios: Sequence[float]) -> str:
    spread = Spread.of(ratios)
    if spread is None:
        return NONE
    digits = 3 if spread.high >= 0.01 else 6
    return f"{spread.median:.{digits}f} ({spread.low:.{digits}f}-{spread.high:.{digits}f})"


def _time(samples: Sequence[Sample]) -> str:
    """The median wall time, and the median CPU time, memory and number of requests if known."""
    wall = Spread.of([sample.seconds for sample in samples])
    cpu = Spread.of([sample.cpu for sample in samples if sample.cpu is not None])
    memory = Spread.of([sample.megabytes for sample in samples if sample.megabytes is not None])
    requests = Spread.of([sample.requests for sample in samples if sample.requests is not None])
    if wall is None:
        return NONE
    more = [f"CPU {cpu.median:.2f} s"] if cpu else []
    more += [f"{memory.median:.1f} MB"] if memory else []
    more += [f"{requests.median:g} requests"] if requests else []
    return _duration(wall.median) + (f" ({', '.join(more)})" if more else "")


def _duration(seconds: float) -> str:
    """A time in seconds, or in milliseconds if that is easier to read."""
    return f"{seconds:.3f} s" if seconds >= 0.1 else f"{seconds * 1000:.2f} ms"


def as_json(facts: dict[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """Everything that was measured, sample by sample."""
    return {"machine": facts, "rows": [_row_as_json(row) for row in rows]}


def _row_as_json(row: Row) -> dict[str, Any]:
    case, spread = row.case, Spread.of(row.ratios)
    return {
        "name": case.name,
        "work": case.work,
        "against": case.other.label if case.other else None,
        "paceline": [vars(sample) for sample in row.paceline],
        "other": [vars(sample) for sample in row.other],
        "ratios": row.ratios,
        "ratio": vars(spread) if spread else None,
        "goal": vars(case.goal) if case.goal else None,
        "goal_met": None if row.error else row.is_goal_met,
        "error": row.error or None,
        "skipped": row.skipped or None,
    }
