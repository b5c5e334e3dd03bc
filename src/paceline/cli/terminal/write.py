"""Writing what ranks wrote, as bytes, and what paceline itself says."""

from __future__ import annotations

import os
import select

import click

from paceline.job.text import printable


def write(target: int, data: bytes) -> None:
    """Write all of `data`, unchanged, to a descriptor."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(target, view) :]
        except BlockingIOError:  # the parent process made it non-blocking
            select.select([], [target], [])


def say(text: str) -> None:
    """Print a line of paceline's own on stderr; control characters of what it cites are escaped."""
    click.echo(f"paceline: {printable(text)}", err=True)
