"""Errors of checkpoints."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or loaded; the message is one line that says what, where and why.

    Attributes:
        by_disk: whether the reason is the disk, which may be full, so that a later save may succeed.
    """

    __module__ = "paceline"  # where users find it

    def __init__(self, message: str, *, by_disk: bool = False) -> None:
        super().__init__(message)
        self.by_disk = by_disk


class CheckpointFolderTaken(CheckpointError):
    """Another job saves checkpoints into the folder; the message says which one."""

    __module__ = "paceline"  # where users find it


class DamagedCheckpoint(Exception):
    """This checkpoint cannot be used; the message names the file and the reason."""
