"""The requests of a client that look at Slurm jobs, and that end and remove them."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING

from paceline.node.errors import Refused
from paceline.node.host.protocol import end_with_stdin
from paceline.node.host.queries import is_shown
from paceline.node.host.slurm.job_folders import Jobs
from paceline.node.journal.state import FINAL
from paceline.node.store import records

from . import job_record
from .queue import QUICK, Queue
from .scheduler import STARTING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.contract import messages
    from paceline.contract.records import EventRecord
    from paceline.node.store.home import Home


_LOOK = 1.0  # seconds between two looks; the kernel does not report what other machines write


def slurm_describe(home: Home, request: messages.Describe) -> messages.SlurmDescribed:
    """The records of jobs, without those that ended before a time. Removes jobs whose time to live is over, or not."""
    jobs, queue = Jobs(home.root), Queue(home.root, seconds=request.get("seconds") or QUICK)
    if request["names"] is None:
        jobs.sweep()
    folders = list(jobs) if request["names"] is None else jobs.named(request["names"])
    found = []
    for folder in folders:
        record = job_record.record(folder, queue)
        if record is None:
            continue
        if request["names"] is None:
            record["traceback"] = None  # a list has none
        if is_shown(record, request, functools.partial(jobs.remove, folder)):
            found.append(record)
    problem = None if queue.problem is None else str(queue.problem)
    return {"jobs": found, "names": [folder.name for folder in folders], "problem": problem}


def slurm_events(home: Home, request: messages.OfJob) -> messages.Events:
    """The events of a job on all its nodes, in the order of time."""
    folder = Jobs(home.root).of(request["name"])
    found: list[EventRecord] = []
    for start, runs in job_record.runs_of(folder):
        for run in runs:
            host = ((run.read_status() or {}).get("agent") or {"host": None})["host"]
            for event in records.events(run):
                if len(runs) > 1:
                    event["host"] = host
                found.append(event)
        outcome = folder.outcome(start) or {}
        if outcome.get("next"):
            found.append({"time": outcome["time"], "event": "requeued", "why": outcome["why"]})
    return {"events": sorted(found, key=lambda event: event["time"])}


def slurm_history(home: Home, request: messages.HistoryOf) -> messages.Histories:
    """What a job has used and logged on all its nodes; what of that a start wrote before, the next one goes on with."""
    from paceline.node.telemetry.history import history

    folder = Jobs(home.root).of(request["name"])
    return {"nodes": [history(run, request["since"]) for _, runs in job_record.runs_of(folder) for run in runs]}


def slurm_losses(home: Home, request: messages.OfJobs) -> messages.Losses:
    """Some of the losses that jobs have logged: in their last start, which goes on with what was written before."""
    from paceline.node.telemetry.history import losses

    found: dict[str, list[float]] = {}
    for folder in Jobs(home.root).named(request["names"]):
        starts = job_record.runs_of(folder)
        found[folder.name] = next((it for run in (starts[-1][1] if starts else ()) if (it := losses(run))), [])
    return {"losses": {name: it for name, it in found.items() if it}}


def slurm_usage(home: Home, request: messages.OfJobs) -> messages.Usages:
    """What jobs use now, as their nodes have written it last; those that do not run are left out."""
    from paceline.node.telemetry.history import usage

    starts = {folder.name: job_record.runs_of(folder) for folder in Jobs(home.root).named(request["names"])}
    found = {name: usage(those[-1][1] if those else ()) for name, those in starts.items()}
    return {"usage": {name: use for name, use in found.items() if use is not None}}


def slurm_wait(home: Home, request: messages.OfJobs) -> Iterator[messages.Ended]:
    """One line per job when it has ended, and a last line."""
    end_with_stdin()
    jobs = Jobs(home.root)
    remaining = jobs.named(request["names"])
    while remaining:
        queue = Queue(home.root)
        for folder in list(remaining):
            record = job_record.record(folder, queue)
            if record is None or record["state"] in FINAL:
                remaining.remove(folder)
                yield {"ended": folder.name}
        if remaining:
            time.sleep(_LOOK)
    yield {"end": True}


def slurm_shell(home: Home, request: messages.Shell) -> messages.ShellPlace:
    """Where a command beside a rank runs: the run directory on the rank's node, and the step that has it."""
    folder = Jobs(home.root).of(request["name"])
    for start, runs in reversed(job_record.runs_of(folder)):
        for run in runs:
            status = run.read_status() or {}
            ranks = [entry["rank"] for entry in status.get("ranks", ())]
            if request["rank"] in ranks or (not ranks and request["rank"] == 0):
                queue = Queue(home.root)
                record = job_record.record(folder, queue)
                has_ended = record is None or record["state"] in FINAL
                is_over = has_ended or folder.outcome(start) is not None
                has_no_node = status.get("state") in FINAL or job_record.is_requeued(folder, start, queue)
                if record is not None and not is_over and has_no_node:
                    raise Refused(f"job {folder.name} does not run now: {record['waiting'] or STARTING}")
                node = folder.node(start, status.get("node_rank") or 0) or status["agent"]["host"]
                return {"run": str(run.path), "id": start.id, "node": node, "is_over": is_over}
    raise Refused(f"job {folder.name} has no rank {request['rank']} that has started")
