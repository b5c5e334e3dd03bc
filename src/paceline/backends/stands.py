"""Where the ranks of a job are now, as the machines that run it have answered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.node.watching.hang import find, grouped, stood
from paceline.node.watching.live import SECONDS
from paceline.node.watching.slowness import compared, in_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.contract.stands import Hang, Stand

__all__ = ["SECONDS", "compared", "grouped", "hang_of", "in_words", "stood"]


def hang_of(stands: Sequence[Stand]) -> Hang | None:
    """Why no rank has gone on while they were asked; None if one has, or works."""
    return find(stands, SECONDS)
