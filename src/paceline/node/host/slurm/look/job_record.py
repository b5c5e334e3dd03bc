"""The record of a Slurm job: its nodes' run directories and what Slurm reports, folded.

The nodes write into the run directories on the shared disk. Whether a node still works on the job is not asked of its
lock, which may not work between machines: Slurm knows it. While Slurm does not answer, what the nodes have written last
is taken for true.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from paceline.contract.nodejob import StoredJob
from paceline.node.journal.fold import fold, order, part_of
from paceline.node.store import records

from .scheduler import Reported

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.contract.records import JobFacts, JobRecord, Part, Report
    from paceline.node.host.slurm.job_folder import JobFolder, SlurmJob, Start
    from paceline.node.rundir.directory import RunDirectory

    from .queue import Queue

    class SlurmRecord(JobRecord):
        """The record of a Slurm job, with Slurm's number of it."""

        external_id: str


_REFUSED = 2  # the exit code of a node that refuses the job


def record(folder: JobFolder, queue: Queue) -> SlurmRecord | None:
    """The record of a job; None if it is gone."""
    job = folder.find()
    if job is None:
        return None
    slurm, start = Reported(folder, job, queue), _last(folder)
    if start is None:
        facts, entry = _facts(folder, job, []), slurm.entry()
        facts["queue"] = facts["queue"] if entry is None else entry.partition
        found = fold(facts, [], slurm.unstarted())
    else:
        found = _of_start(folder, job, start, slurm)
        if found["checkpoint"] is None:  # the starts before this one may have saved one
            before = (run for other, runs in reversed(runs_of(folder)) if other != start for run in runs)
            found["checkpoint"] = next(filter(None, map(records.checkpoint, before)), None)
    return {**found, "external_id": (folder.ids or [""])[-1]}


def _of_start(folder: JobFolder, job: SlurmJob, start: Start, slurm: Reported) -> JobRecord:
    """The record of a job that has started, by its last start."""
    reports, refusals = _reports(folder, start, alive=folder.outcome(start) is None)
    facts = _facts(folder, job, reports)
    parts = _parts(reports, refusals)
    word = slurm.started(start, fold(facts, parts))
    if word is not None and word.state == "ended":  # then no agent runs any more
        parts = _parts(_reports(folder, start, alive=False)[0], refusals)
    return fold(facts, parts, word)


def _last(folder: JobFolder) -> Start | None:
    """The last start of which a node, or its batch script, has written something."""
    starts = reversed(folder.starts)
    return next((it for it in starts if folder.runs(it) or folder.refusals(it) or folder.outcome(it)), None)


def ended(folder: JobFolder, start: Start) -> JobRecord | None:
    """The record of a start whose agents have ended, by its nodes alone; None if none has written anything."""
    reports, _ = _reports(folder, start, alive=False)
    return fold(reports[0]["job"], [report["part"] for report in reports]) if reports else None


def _reports(folder: JobFolder, start: Start, *, alive: bool) -> tuple[list[Report], list[tuple[str, float]]]:
    """What the nodes of a start have written, and why others refused the job."""
    runs = folder.runs(start)
    lost = _lost(runs)
    found = [records.look(run.path, list, lambda run: alive and run.path not in lost) for run in runs]
    reports = [report for report in found if report is not None]
    return sorted(reports, key=lambda report: order(report["part"])), folder.refusals(start)


def _parts(reports: list[Report], refusals: list[tuple[str, float]]) -> list[Part]:
    """The parts of nodes, those that refused the job among them."""
    attempt = max((report["part"]["attempt"] for report in reports), default=0)
    parts = [report["part"] for report in reports]
    for why, when in refusals:
        part = part_of(
            {"state": "FAILED", "exit_code": _REFUSED, "attempt": attempt, "finished": when}, alive=False, host=""
        )
        parts.append({**part, "error": why, "cause": "refused"})
    return parts


def _lost(runs: list[RunDirectory]) -> set[Path]:
    """The run directories of nodes that are not in the last attempt, although they were in one: they are lost."""
    starts = {run.path: start for run in runs if (start := (run.read_status() or {}).get("start")) is not None}
    with contextlib.suppress(KeyError, IndexError, TypeError, ValueError):  # damaged, or none has begun
        last = max(starts.values(), key=lambda start: start["attempt"])
        ids = {node["id"] for node in last["nodes"]}
        return {path for path, start in starts.items() if start["nodes"][start["node_rank"]]["id"] not in ids}
    return set()


def _facts(folder: JobFolder, job: SlurmJob, reports: list[Report]) -> JobFacts:
    """What is known of a job: what its user asked for, and what its nodes made of it."""
    ranks = job.spec.ranks if isinstance(job.spec.ranks, int) else 1
    stored = StoredJob(job.spec, job.spec.framework, job.created, job.data, job.code)
    plain = records.facts(folder.path, stored, job.spec.node_range[0], ranks, job.node.working_dir)
    if not reports:
        return plain
    of_nodes = reports[0]["job"]
    return {
        **of_nodes, "created": plain["created"], "labels": plain["labels"], "options": plain["options"],
        "ttl": plain["ttl"], "folder": plain["folder"], "code": plain["code"], "resume_from": plain["resume_from"],
        "environment": plain["environment"], "time_limit": plain["time_limit"], "user": plain["user"],
        "queue": of_nodes["queue"] or plain["queue"],
    }  # fmt: skip


def is_requeued(folder: JobFolder, start: Start, queue: Queue) -> bool:
    """Whether Slurm has taken the nodes of a start and starts the job again; agents that it killed do not say so."""
    job = folder.find()
    entry = Reported(folder, job, queue).entry() if job is not None else None
    return entry is not None and not entry.is_over and entry.id == start.id and entry.restarts > start.restarts


def runs_of(folder: JobFolder) -> list[tuple[Start, list[RunDirectory]]]:
    """The run directories of all starts of a job, the newest start last."""
    return [(start, runs) for start in folder.starts if (runs := folder.runs(start))]
