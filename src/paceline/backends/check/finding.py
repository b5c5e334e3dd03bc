"""One thing that would go wrong with a job on a machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One thing that would go wrong: an error if no run here can work, else a warning.

    Attributes:
        where: the part of the machine.
        what: what is wrong with it, and the consequence.
        do: what to do.
    """

    level: Literal["error", "warning"]
    where: str
    what: str
    do: str
