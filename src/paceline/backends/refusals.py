"""Turns refusals of a node into errors of the command line."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from paceline.job.errors import UserError
from paceline.node.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Raise a node's `Refused` as `UserError`."""
    try:
        yield
    except Refused as refused:
        raise UserError(str(refused)) from None


def kind_of_program(target: str, folder: Path) -> str:
    """Whether a file is a Python "script" or another "command"; refuses what is neither."""
    from paceline.node.planning.script import program_kind  # most verbs need no more than the above

    with refusals():
        return program_kind(target, folder)
