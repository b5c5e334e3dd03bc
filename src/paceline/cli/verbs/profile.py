"""`paceline profile`: some steps of a running job, recorded by torch.profiler in its ranks."""

from __future__ import annotations

import contextlib
import gzip
import json
import statistics
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

import click

from paceline.backends.traces import Operator, Sum, add, file_name
from paceline.cli.flags.option import Option, SectionedCommand, Whole
from paceline.cli.flags.selection import known, rank_of, runs
from paceline.cli.flags.where import OF_JOBS, backend, where_options
from paceline.cli.terminal.tables import Column, show
from paceline.cli.terminal.write import ended_by_signals, say
from paceline.contract.stands import NODE_SIDE
from paceline.job.errors import UserError
from paceline.job.quantities import show_instant

from .show import _seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.backends.base import Shell
    from paceline.contract.stands import Profiled

_QUICK = 1  # of gzip's levels
_MOST = 10  # operators that are shown
_ENDING = 5.0  # seconds for the ranks to stop their profilers when this is interrupted


class _Profile(NamedTuple):
    """What a rank has answered, and its trace, still packed."""

    said: Profiled
    trace: bytes


class _Row(NamedTuple):
    rank: int
    host: str
    steps: Sequence[float]  # seconds of each
    file: Path


def _profile(name: str, steps: int, ranks: str, output: str | None, timeout: str) -> int:
    """Record some steps of JOB, which runs, with torch.profiler, and show what takes the time.

    The script is unchanged. The traces go to a folder, for ui.perfetto.dev, chrome://tracing and TensorBoard.
    """
    patience = _seconds("--timeout", timeout, "s")
    (job,) = known([name], warns=True)
    runs(job, f"see paceline why{backend().where_of(name)} {name}")
    every = ranks == "all"
    chosen = sorted({*range(job.ranks)} if every else {rank_of(job, it, "--ranks") for it in ranks.split(",")})
    folder = Path(output or f"profile-{name}")
    with _cannot(f"write to {folder}", "choose another folder with -o"):
        folder.mkdir(parents=True, exist_ok=True)
    with ended_by_signals():
        found = _ask(name, chosen, [NODE_SIDE, "profile", str(steps), f"{patience:g}"])
    rows, total = [], Sum()
    for rank, profile in found.items():
        said = profile.said
        if "error" not in said:
            try:
                trace, seconds = add(gzip.decompress(profile.trace), said, total)
                file = folder / file_name(said, time.time_ns())
            except (ValueError, TypeError, EOFError, KeyError, gzip.BadGzipFile):
                said = {"error": "its trace has not arrived as a whole"}
            else:
                _write(file, trace)
                rows.append(_Row(rank, said["host"], seconds, file))
                if said["why"]:
                    say(f"rank {rank}: {len(seconds)} of {steps} steps: {said['why']}")
        if "error" in said:
            say(f"rank {rank}: {said['error']}")
    if not rows:
        return 2
    show(rows, _RANKS, "table", lambda row: row._asdict())
    click.echo()
    top = sorted(total.operators.items(), key=lambda it: (it[1].device, it[1].cpu), reverse=True)[:_MOST]
    show(top, _columns(total), "table", lambda it: vars(it[1]))
    say(f"open the traces in https://ui.perfetto.dev, or see tensorboard --logdir {folder}")
    return 0 if len(rows) == len(found) else 1


def _write(file: Path, trace: bytes) -> None:
    with _cannot(f"write {file}", "make room, or choose another folder with -o"):
        try:
            with gzip.open(file, "wb", compresslevel=_QUICK) as written:
                written.write(trace)
        except OSError:
            file.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def _cannot(what: str, hint: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot {what}: {error.strerror}; {hint}") from None


def _ask(name: str, ranks: Sequence[int], command: Sequence[str]) -> dict[int, _Profile]:
    """Have all ranks profiled at the same time; when this is left, they stop."""
    here = backend()
    shells = {rank: here.shell(name, rank, command) for rank in ranks}
    if any(shell.command[0] == NODE_SIDE for shell in shells.values()):  # of a backend without the node side
        raise UserError(f"job {name} cannot be profiled there; start a profiler beside a rank with paceline attach")
    found: dict[int, _Profile] = {}

    def receive(rank: int, process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
        found[rank] = _received(process, errors)

    with _started(shells) as started:
        threads = [threading.Thread(target=receive, args=(rank, *it), daemon=True) for rank, it in started.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return {rank: found[rank] for rank in ranks}


@contextlib.contextmanager
def _started(shells: dict[int, Shell]) -> Iterator[dict[int, tuple[subprocess.Popen[bytes], IO[bytes]]]]:
    """The commands of these ranks, which end when this is left."""
    with contextlib.ExitStack() as opened:
        started: dict[int, tuple[subprocess.Popen[bytes], IO[bytes]]] = {}
        opened.callback(_end, started)
        for rank, shell in shells.items():
            errors = opened.enter_context(tempfile.TemporaryFile())
            with _cannot(f"run {shell.command[0]} in {shell.folder}", "check that both are there"):
                process = subprocess.Popen(
                    shell.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=shell.env,
                    cwd=shell.folder, start_new_session=True,
                )  # fmt: skip
            started[rank] = process, errors
        yield started


def _end(started: dict[int, tuple[subprocess.Popen[bytes], IO[bytes]]]) -> None:
    """Have the ranks stop, if they still record."""
    for process, _ in started.values():
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
    for process, _ in started.values():
        try:
            process.wait(_ENDING)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _received(process: subprocess.Popen[bytes], errors: IO[bytes]) -> _Profile:
    assert process.stdout is not None
    line, trace = process.stdout.readline(), process.stdout.read()
    with contextlib.suppress(ValueError):
        return _Profile(json.loads(line), trace)
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().split("\n")
    ours = [line.removeprefix("paceline: ") for line in lines if line.startswith("paceline: ")]
    return _Profile({"error": (ours or lines)[-1] or "its machine gives no answer"}, b"")


_RANKS: list[Column[_Row]] = [
    Column("RANK", lambda row: str(row.rank)),
    Column("HOST", lambda row: row.host),
    Column("STEPS", lambda row: str(len(row.steps))),
    Column("MIN", lambda row: show_instant(min(row.steps)) if row.steps else None),
    Column("MEDIAN", lambda row: show_instant(statistics.median(row.steps)) if row.steps else None),
    Column("MAX", lambda row: show_instant(max(row.steps)) if row.steps else None),
    Column("TRACE", lambda row: str(row.file), is_text=True),
]


def _columns(total: Sum) -> list[Column[tuple[str, Operator]]]:
    """Per step and rank; the device only where one was used."""

    def each(micros: float) -> str | None:
        return show_instant(micros / total.steps / 1e6) if micros else None

    def share(micros: float) -> str | None:
        return f"{100 * micros / total.time:.1f} %" if micros and total.time else None

    return [
        Column("OPERATOR", lambda it: it[0], is_text=True, least=24),
        Column("SELF DEVICE", lambda it: each(it[1].device), is_optional=True),
        Column("OF STEP", lambda it: share(it[1].device), is_optional=True),
        Column("SELF CPU", lambda it: each(it[1].cpu)),
        Column("OF STEP", lambda it: share(it[1].cpu)),
        Column("CALLS", lambda it: f"{it[1].calls / total.steps:.3g}" if it[1].calls else None),
    ]


profile = SectionedCommand(
    "profile",
    callback=_profile,
    params=[
        click.Argument(["name"], metavar="JOB", **OF_JOBS),
        *where_options(),
        Option(["--steps"], section="What to record", type=Whole(1), default=20, metavar="N",
               help="Steps of the optimizer.  [default: 20]"),
        Option(["--ranks"], section="What to record", default="0", metavar="RANK,…|all",
               help="The ranks to record.  [default: 0]"),
        Option(["-o", "--output"], section="What to record", metavar="FOLDER",
               help="Where the traces go.  [default: profile-JOB]"),
        Option(["-t", "--timeout"], section="What to record", default="60s", metavar="10s",
               help="When to end with fewer steps; without any, 2 seconds are recorded then.  [default: 60s]"),
    ],
)  # fmt: skip
