"""Errors of checkpoints."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or loaded; the message is one line that says what, where and why."""

    __module__ = "paceline"  # where users find it


class CheckpointFolderTaken(CheckpointError):
    """Another job saves checkpoints into the folder; the message says which one."""

    __module__ = "paceline"  # where users find it


class DamagedCheckpoint(Exception):
    """This checkpoint cannot be used; the message names the file and the reason."""
