"""How a Slurm job has ended that squeue does not list any more, where the cluster keeps accounts."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

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


def state_of(number: str, kept: Path, seconds: float = _SECONDS) -> str:
    """Slurm's word for the state in which a job ended; "" if it is not known.

    Args:
        number: of the Slurm job.
        seconds: that sacct may take, at most 10.
        kept: the file with the answer: sacct is asked once for each job, and once in a minute for one without.
    """
    with contextlib.suppress(OSError):
        word = kept.read_text().strip()
        if word or disk_time(kept.parent) < kept.stat().st_mtime + _AGAIN:
            return word
    word = _asked(number, min(seconds, _SECONDS))
    with contextlib.suppress(OSError):
        kept.write_text(word)
        kept.touch()  # also if there is nothing in it
    return word


def keep(word: str, kept: Path) -> None:
    """Note what squeue says of a job that has ended: Slurm forgets it, and there may be no accounts."""
    with contextlib.suppress(OSError):
        if not kept.exists() or kept.read_text().strip() != word:
            kept.write_text(word)


def _asked(number: str, seconds: float) -> str:
    if not has("sacct") or time.monotonic() < _Silence.until:
        return ""
    try:
        output = call("sacct", "-n", "-X", "-P", "-o", "State", "-j", number, seconds=seconds)
    except Refused:  # there are no accounts, or it may answer the next time
        _Silence.until = time.monotonic() + _AGAIN
        return ""
    word = output.partition("\n")[0].partition(" ")[0]  # of "CANCELLED by 1000"
    return word if word in reasons.ENDED else ""  # accounts may be late
