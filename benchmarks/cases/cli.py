"""The command line itself."""

from __future__ import annotations

from ..case import Case, Goal, Side
from ..lab import installed, timed

CASES = [
    Case(
        "help",
        "--help of the command line",
        Side("paceline --help", timed(installed("paceline"), "--help")),
        Side("torchx --help", timed(installed("torchx"), "--help")),
        Goal(0.7),
    ),
]
