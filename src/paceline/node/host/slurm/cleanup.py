"""Removes what nodes have of a job that is deleted, where they share no disk: by a short job on them."""

from __future__ import annotations

import contextlib
import re
import shlex
from typing import TYPE_CHECKING

from paceline.contract import ContractError
from paceline.contract.slurm import expand_hosts
from paceline.node.errors import Refused
from paceline.node.files import read_json

from . import mirror, script
from .commands import Away, batch_environment, call, table
from .parcel import write
from .queue import Queue

if TYPE_CHECKING:
    from pathlib import Path

    from .folder import JobFolder
    from .jobs import Jobs

_BODY = """
[ "$(cat {folder}/id)" != {job_id} ] || mv {folder} {gone}  # at once: another job may get the name
rm -rf {gone}
"""
_KEPT = 50  # identifiers of deleted jobs of one name


class Left(Refused):
    """A job is removed, but some of its nodes keep its files."""


def remove(jobs: Jobs, folder: JobFolder) -> None:
    """Remove a job here, and on its nodes as soon as they are free.

    Raises:
        Left: it is removed, but not on all its nodes.
        Refused: it cannot be removed.
    """
    if why := mirror.out_of_reach(folder, Queue(jobs.root)):
        raise Refused(f"job {folder.name} cannot be deleted from here: {why}")
    left = ""
    if folder.is_broadcast():
        left = _on_nodes(folder)
        _note(jobs, folder)
    jobs.remove(folder)
    if left:
        raise Left(left)


def deleted(jobs: Jobs, name: str) -> list[str]:
    """The identifiers of jobs of this name that were deleted here, the newest last; nodes may have them still."""
    with contextlib.suppress(OSError):
        return [line for line in _notes(jobs, name).read_text().split() if line.isalnum()]
    return []


def _note(jobs: Jobs, folder: JobFolder) -> None:
    """Note that the files of a job may be replaced on its nodes."""
    noted = [*deleted(jobs, folder.name), str((read_json(folder.job) or {})["job_id"])]
    with contextlib.suppress(OSError):
        file = _notes(jobs, folder.name)
        file.parent.mkdir(mode=0o700, exist_ok=True)
        write(file, "".join(f"{job_id}\n" for job_id in noted[-_KEPT:]).encode(), None)


def _notes(jobs: Jobs, name: str) -> Path:
    return jobs.root / "deleted" / name


def _on_nodes(folder: JobFolder) -> str:
    """Order the removal on a job's nodes, each by a job of its own; returns why some keep it, or "".

    Raises:
        Away: Slurm does not answer.
    """
    stored, kept, why = folder.read(), [], ""
    for node in _nodes(folder):
        options = {
            "job-name": "paceline-delete", "nodes": "1", "nodelist": node, "ntasks": "1",
            "output": "/dev/null", "chdir": "/", "time": "5", "deadline": "now+7days", **mirror.places(folder),
        }  # fmt: skip
        gone = folder.path.with_name(f".gone.{stored['job_id']}")
        body = _BODY.format(folder=shlex.quote(str(folder.path)), job_id=stored["job_id"], gone=shlex.quote(str(gone)))
        try:
            text = "#!/bin/sh\n" + "".join(script.lines(options)) + body
            call("sbatch", "--parsable", env=batch_environment({}, None), text=text)
        except Away:
            raise
        except Refused as error:
            kept.append(node)
            why = str(error)
    if not kept:
        return ""
    return f"job {folder.name} is deleted, but {','.join(kept)} keep {folder.path}: {why}; remove it there by hand"


def _nodes(folder: JobFolder) -> list[str]:
    """The nodes on which a job has run."""
    found: dict[str, None] = {}
    for life in folder.lives:
        with contextlib.suppress(ContractError):
            found.update(dict.fromkeys(expand_hosts((folder.outcome(life) or {}).get("nodes") or "")))
        for run in folder.runs(life):
            found.update(dict.fromkeys((read_json(run.spec) or {}).get("hosts") or ()))
    if not found and folder.ids:
        with contextlib.suppress(Refused, ContractError):
            for row in table("squeue", f"--jobs={folder.ids[-1]}", "--states=all", columns={"NodeList": 1024}):
                if re.match(r"[A-Za-z0-9]", row["NodeList"]):
                    found.update(dict.fromkeys(expand_hosts(row["NodeList"])))
    return list(found)
