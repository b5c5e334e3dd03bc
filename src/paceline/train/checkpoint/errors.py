"""What goes wrong with checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or loaded; the message is one line that says what, where and why."""

    __module__ = "paceline"  # where users find it


class DamagedCheckpoint(Exception):
    """This checkpoint does not count; the message names the file and the reason."""
