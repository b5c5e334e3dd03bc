"""The rows of the table: a module a group, each with its rows in `CASES`. A new group is a file and a line here."""

from __future__ import annotations

import importlib

from ..case import Case

GROUPS = (
    "start",
    "restart",
    "cli",
    "jobs",
    "ddp",
    "epoch",
    "checkpoint",
    "logs",
    "handshakes",
    "hosts",
    "hosts_elastic",
    "hosts_silent",
)  # in the order of the table


def load() -> dict[str, list[Case]]:
    """Group → its rows."""
    return {name: list(importlib.import_module(f"{__name__}.{name}").CASES) for name in GROUPS}
