"""How fast the output of ranks reaches the screen."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

from ..case import Case, Goal, Side
from ..lab import SCRIPTS, Lab, free_port, installed
from ..lines import Reader, check, gates, reading
from ..sample import Sample

WRITE_LINES, WRITE_TIMES = str(SCRIPTS / "write_lines.py"), str(SCRIPTS / "write_times.py")
RANKS, LINES = 64, 10_000
TIMES = 60


@contextlib.contextmanager
def _followed(lab: Lab, run: Sequence[str]) -> Iterator[Reader]:
    """Start a job, and read the output of `paceline logs --all -f`."""
    name = f"job-{time.monotonic_ns()}"
    with lab.started([*run[:2], "--name", name, *run[2:]]):
        folder = lab.folder / "paceline_home" / "jobs" / name
        for _ in range(1000):
            if folder.exists():
                break
            time.sleep(0.01)
        with reading(lab, [run[0], "logs", name, "--all", "-f"]) as reader:
            yield reader


def _flood(command: Callable[[str], Sequence[str]], follow: bool = False) -> Callable[[Lab], Sample]:
    """The time until all lines of all ranks have arrived, none lost or torn; the ranks begin at the same time."""

    def measure(lab: Lab) -> Sample:
        path = lab.folder / "gate"
        with gates(path) as gate:
            line = [*command(str(path)), WRITE_LINES, str(path), str(LINES)]
            with _followed(lab, line) if follow else reading(lab, line) as reader:
                seconds = gate.measure(reader, RANKS, LINES)
        check(reader.text, RANKS, LINES)
        return Sample(seconds)

    return measure


def _latency(value: Callable[[list[float]], float]) -> Callable[[Lab], Sample]:
    """The time from when a rank writes a line until `logs -f` writes it."""

    def measure(lab: Lab) -> Sample:
        late: list[float] = []
        with _followed(lab, [installed("paceline"), "run", WRITE_TIMES, str(TIMES)]) as reader:
            while len(late) < TIMES:
                lines = reader.take().split()
                late += [time.time() - float(line) for line in lines]
        return Sample(value(late[TIMES // 4 :]))  # the first lines were written before the reader started

    return measure


def _p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


def _paceline(_: str) -> list[str]:
    return [installed("paceline"), "run", "-n", str(RANKS), "--tee", "all"]


def _torchrun(_: str) -> list[str]:
    return [installed("torchrun"), f"--nproc-per-node={RANKS}", f"--master-port={free_port()}", "--tee", "3"]


WORK = f"{RANKS * LINES:,} lines of {RANKS} ranks come through a pipe"
TORCHRUN = Side("torchrun --tee 3", _flood(_torchrun))
SOON = Goal(seconds=0.1)
CASES = [
    Case("lines-run", WORK, Side("run --tee all", _flood(_paceline)), TORCHRUN, Goal(0.33)),
    Case("lines-follow", WORK, Side("logs --all -f", _flood(_paceline, follow=True)), TORCHRUN, Goal(0.33)),
    Case("follow-median", "from a write to logs -f, median", Side("logs", _latency(statistics.median)), None, SOON),
    Case("follow-p95", "from a write to logs -f, 95 % of them", Side("logs", _latency(_p95)), None, SOON),
]
