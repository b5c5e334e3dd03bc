"""How a Slurm job has ended that squeue does not list any more, where the cluster keeps accounts."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, NamedTuple

from paceline.node.errors import Refused
from paceline.node.host.slurm.call import call, has
from paceline.node.host.slurm.job_folders import disk_time

from . import reasons

if TYPE_CHECKING:
    from pathlib import Path

_SECONDS = 10.0  # that sacct may take
_AGAIN = 60.0  # seconds until sacct is asked again for a job that it did not know, or when it failed


class _Silence:
    """After sacct has failed it is not asked for other jobs before this time."""

    until = 0.0


class End(NamedTuple):
    """How a Slurm job has ended.

    Attributes:
        word: Slurm's for the state; "" if it is not known.
        time: when, in seconds since the epoch; None if that is not known.
    """

    word: str
    time: float | None = None


def end_of(number: str, kept: Path, seconds: float = _SECONDS) -> End:
    """How a job has ended."""
    with contextlib.suppress(OSError):
        end = _read(kept)
        if end.word or disk_time(kept.parent) < kept.stat().st_mtime + _AGAIN:
            return end
    end = _asked(number, min(seconds, _SECONDS))
    with contextlib.suppress(OSError):
        _write(end, kept)
    return end


def keep(end: End, kept: Path) -> None:
    """Note what squeue says of a job that has ended: Slurm forgets it, and there may be no accounts."""
    with contextlib.suppress(OSError):
        if not kept.exists() or _read(kept) != end:
            _write(end, kept)


def _read(kept: Path) -> End:
    word, _, time = kept.read_text().strip().partition(" ")
    return End(word, float(time) if time.isdecimal() else None)


def _write(end: End, kept: Path) -> None:
    kept.write_text(end.word if end.time is None else f"{end.word} {end.time:.0f}")
    kept.touch()  # also if there is nothing in it


def _asked(number: str, seconds: float) -> End:
    if not has("sacct") or time.monotonic() < _Silence.until:
        return End("")
    try:
        output = call("sacct", "-n", "-X", "-P", "-o", "State,End", "-j", number, seconds=seconds)
    except Refused:  # there are no accounts, or it may answer the next time
        _Silence.until = time.monotonic() + _AGAIN
        return End("")
    state, _, end = output.partition("\n")[0].partition("|")
    word = state.partition(" ")[0]  # of "CANCELLED by 1000"
    return End(word, float(end) if end.isdecimal() else None) if word in reasons.ENDED else End("")  # it may be late
