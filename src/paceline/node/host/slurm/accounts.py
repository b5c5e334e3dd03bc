"""How a Slurm job has ended that squeue does not list any more, where the cluster keeps accounts."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from paceline.node.errors import Refused

from . import reasons
from .commands import call, has

if TYPE_CHECKING:
    from pathlib import Path

_SECONDS = 10.0  # that sacct may take


def state_of(number: str, kept: Path) -> str:
    """Slurm's word for the state in which a job ended; "" if it is not known.

    Args:
        number: of the Slurm job.
        kept: the file with the answer: sacct is asked once for each job.
    """
    with contextlib.suppress(OSError):
        return kept.read_text().strip()
    said = ""
    if has("sacct"):
        with contextlib.suppress(Refused):  # there are no accounts, or it may answer the next time
            said = call("sacct", "-n", "-X", "-P", "-o", "State", "-j", number, seconds=_SECONDS)
    lines = said.split("\n")
    word = lines[0].partition(" ")[0]  # of "CANCELLED by 1000"
    word = word if word in reasons.ENDED else ""  # accounts may be late
    if word:
        with contextlib.suppress(OSError):
            kept.write_text(word)
    return word
