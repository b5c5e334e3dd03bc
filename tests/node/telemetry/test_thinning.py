"""Lines of telemetry are merged as they age: their number is bounded, and what they say stays true."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.node.telemetry.history import FINENESS, merged, reduced, thinned

START = 1_700_000_000.0


def line(time: float, seconds: float = 10.0, cpu: float | None = 1.0, **more: Any) -> Any:
    return {"time": time, "seconds": seconds, "job": {"cpu": cpu}, "machine": {"load": cpu}, "ranks": {}, **more}


def written(hours: float, every: int = 1) -> list[Any]:
    """The lines of a job, or each `every`-th."""
    return [line(START + 10.0 * number, cpu=number % 7) for number in range(every, int(hours * 360) + 1, every)]


def aged(hours: float) -> list[Any]:
    """What is left when old lines are merged each 256 lines, as the agent does."""
    found: list[Any] = []
    for number, one in enumerate(written(hours), 1):
        found.append(one)
        if number % 256 == 0:
            found = thinned(found, one["time"])
    return found


@pytest.mark.parametrize(("hours", "most"), [(1, 400), (8, 1200), (24 * 7, 2600)])
def test_the_number_of_lines_is_bounded(hours: float, most: int) -> None:
    found = aged(hours)
    assert len(found) <= most
    assert sum(it["seconds"] for it in found) == pytest.approx(hours * 3600)
    end = found[-1]["time"]
    for before, after in itertools.pairwise(found):
        assert before["time"] < after["time"]
        assert after["seconds"] <= max(10.0, (end - before["time"]) / FINENESS + 10.0)
    assert sum(it["job"]["cpu"] * it["seconds"] for it in found) == pytest.approx(
        sum(it["job"]["cpu"] * 10 for it in written(hours)), rel=1e-3
    )


ranks = st.dictionaries(st.integers(0, 5), st.one_of(st.none(), st.floats(0, 900)), min_size=1)
lines = st.lists(st.tuples(st.floats(0.1, 1e4), ranks), min_size=1, max_size=60)


@given(lines, st.integers(1, 20), st.floats(0, 1e6))
def test_what_is_merged_keeps_order_time_and_means(given_lines: Any, most: int, later: float) -> None:
    now, several = START, []
    for seconds, values in given_lines:
        now += seconds
        rows = sorted(values)
        several.append(line(now, seconds, ranks={"rank": rows, "cpu": [values[row] for row in rows]}))
    few = reduced(several, most)
    assert len(few) <= max(most, 1)
    for found in (few, thinned(several, now + later)):
        assert [it["time"] for it in found] == sorted({it["time"] for it in found})
        assert found[-1]["time"] == several[-1]["time"]
        assert sum(it["seconds"] for it in found) == pytest.approx(sum(it["seconds"] for it in several), abs=0.1)
        for it in found:
            for value in it["ranks"]["cpu"]:
                assert value is None or 0 <= value <= 900
    known = [value for _, values in given_lines for value in values.values() if value is not None]
    (one,) = reduced(several, 1)
    assert all(value is None or min(known) - 1 <= value <= max(known) + 1 for value in one["ranks"]["cpu"])


def test_a_rank_that_is_unknown_counts_for_none() -> None:
    first = line(START, 10, ranks={"rank": [0, 1], "cpu": [1.0, None], "memory": [4096, 8192]})
    second = line(START + 30, 30, cpu=2.0, ranks={"rank": [1, 2], "cpu": [3.0, 0.5]}, gpus={"index": [0], "use": [50]})
    assert merged([first, second]) == {
        "time": START + 30, "seconds": 40, "job": {"cpu": 1.75}, "machine": {"load": 1.75},
        "ranks": {"rank": [0, 1, 2], "cpu": [1.0, 3.0, 0.5], "memory": [4096, 8192, None]},
        "gpus": {"index": [0], "use": [50]},
    }  # fmt: skip


def test_a_year() -> None:
    """The bound grows with the logarithm of the time."""
    bound = 2 * FINENESS * (1 + math.log(365 * 86400 / (10 * FINENESS)))
    assert len(thinned(written(24 * 365, every=100), START + 365 * 86400)) < bound
