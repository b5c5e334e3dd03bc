"""What Slurm starts, by the name of its role on the command line."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import NoReturn

_MODULES = {
    "slurm": "place.task", "slurm-step": "place.step", "slurm-finish": "end.finish", "slurm-check": "place.check_task",
}  # fmt: skip


def main(role: str, *args: str) -> NoReturn:
    """Run a role with its arguments."""
    sys.exit(importlib.import_module(f"paceline.node.host.slurm.{_MODULES[role]}").main(*args))
