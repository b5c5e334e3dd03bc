"""What happened in a job's folder, and that its status is what follows from that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.node.journal.records import for_people, read
from paceline.node.journal.state import load, reduce
from paceline.node.rundir.directory import RunDirectory


def events(folder: Path) -> list[dict[str, Any]]:
    """What people see of a job's journal."""
    return for_people(read(RunDirectory(folder).journal)[0])


def check(folder: Path) -> None:
    """Every status.json below a folder is a cache: with what came later it is what follows from the whole journal."""
    for journal in filter(Path.is_file, folder.rglob("journal.jsonl")):
        cache, whole = journal.with_name("status.json"), reduce({}, read(journal)[0])
        status = json.loads(cache.read_text()) if cache.exists() else {}
        if "journal" in status and status["agent"] == whole["agent"]:  # else a test has edited it
            assert load(cache, journal) == whole, journal
