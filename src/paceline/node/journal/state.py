"""The state of a node's part of a job, from the records of its journal. status.json is a cache of it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, cast

from paceline.node.files import load_json

from .records import VERSION, has_newer, read

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from .records import Record
    from .status import CachedStatus, Status

FINAL = ("SUCCEEDED", "FAILED", "STOPPED")


class NewerVersion(ValueError):
    """A newer version of paceline has written what this one cannot read."""

    def __init__(self) -> None:
        super().__init__("it was written by a newer version of paceline; update paceline here to see how it is")


def reduce(status: Status, records: Iterable[Record]) -> Status:
    """The status after these records; {} before the first one. Records that make no sense are skipped."""
    for record in records:
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
            status = _after(status, record)
    return status


def _after(status: Status, record: Record) -> Status:
    """The status after one record."""
    if record["event"] == "state":
        return {**status, **record["status"]}
    if record["event"] == "ranks":
        ranks = {rank["local_rank"]: rank for rank in status.get("ranks", ())}
        ranks.update((rank["local_rank"], rank) for rank in record["ranks"])
        return {**status, "ranks": list(ranks.values())}
    if record["event"] == "finished":
        return {
            **status, "state": record["state"], "exit_code": record["exit_code"], "failure": record["failure"],
            "others": record["others"], "finished": record["time"], "waiting": None,
        }  # fmt: skip
    if record["event"] == "started":
        return {**status, "started": status.get("started") or record["time"]}
    return {} if record["event"] == "reopened" else status


def cached(status: Status, offset: int) -> CachedStatus:
    """The content of status.json."""
    return {**status, "v": VERSION, "journal": offset}


def load(cache: Path, journal: Path) -> Status:
    """The status of a part, from its status.json and what its journal has after that; {} if there is none yet."""
    damage, stored = None, None
    try:
        stored = load_json(cache)
    except ValueError as error:
        damage = error
    offset = stored.pop("journal", None) if stored is not None else 0
    if stored is None or stored.pop("v", None) != VERSION or type(offset) is not int or offset < 0:
        stored, offset = {}, 0
    status = cast("Status", stored)
    if status.get("state") not in FINAL:
        status = reduce(status, read(journal, offset)[0])
    if not status and has_newer(journal):
        raise NewerVersion
    if damage is not None and "agent" not in status:
        raise damage
    return status
