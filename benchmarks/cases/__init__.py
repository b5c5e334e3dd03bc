"""The rows of the table: one module per group, with its rows in `CASES`. A new group needs a file and a name here."""

from __future__ import annotations

import importlib

from ..case import Case

GROUPS = (
    "start",
    "restart",
    "rehearse",
    "cli",
    "jobs",
    "web",
    "ddp",
    "sync",
    "shard",
    "gpu",
    "horovod",
    "horovod_tensorflow",
    "epoch",
    "checkpoint",
    "logs",
    "handshakes",
    "hosts",
    "hosts_elastic",
    "hosts_silent",
    "kubernetes",
    "slurm",
)  # in the order of the table


def load() -> dict[str, list[Case]]:
    """The rows of each group, by its name."""
    return {name: list(importlib.import_module(f"{__name__}.{name}").CASES) for name in GROUPS}
