"""Removes jobs that have ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.node.errors import Refused
from paceline.node.files import read_json
from paceline.node.host.slurm.job_folders import Jobs
from paceline.node.host.slurm.look import job_record
from paceline.node.host.slurm.look.queue import Queue
from paceline.node.journal.state import FINAL

if TYPE_CHECKING:
    from paceline.node.host.slurm.job_folder import JobFolder
    from paceline.node.store.home import Answer, Home, Request


def slurm_delete(home: Home, request: Request) -> Answer:
    """Remove jobs that have ended."""
    jobs, queue = Jobs(home.root), Queue(home.root)
    folders = jobs.named(request["names"])
    for folder in folders:
        record = job_record.record(folder, queue)
        if record is not None and record["state"] not in FINAL:
            raise Refused(f"job {folder.name} has not ended; stop it first: paceline stop {folder.name}")
        if users := _users(jobs, folder):
            raise Refused(
                f"job {users[0]} keeps its checkpoints in the folder of job {folder.name}; delete {users[0]} first"
            )
    for folder in folders:
        jobs.remove(folder)
    return {"names": [folder.name for folder in folders]}


def _users(jobs: Jobs, folder: JobFolder) -> list[str]:
    """Other jobs that save their checkpoints in this one's folder."""
    found = []
    for other in jobs:
        stored: dict[str, Any] = read_json(other.job) or {}
        node: dict[str, Any] = stored.get("node") or {}
        if other.name != folder.name and f"{node.get('checkpoint_dir')}/".startswith(f"{folder.path}/"):
            found.append(other.name)
    return found
