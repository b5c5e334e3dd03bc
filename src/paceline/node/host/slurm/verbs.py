"""The requests of a client that look at Slurm jobs, and that end and remove them."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from typing import TYPE_CHECKING, Any

from paceline.node.errors import Refused
from paceline.node.files import read_json
from paceline.node.host.protocol import end_with_stdin
from paceline.node.store import records

from . import view
from .commands import Away, Rejected, call
from .folder import Jobs
from .queue import Queue

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.node.store.home import Answer, Home, Request

    from .folder import JobFolder

_LOOK = 1.0  # seconds between two looks; the kernel does not report what other machines write
_ENDED = re.compile(r"invalid job id|already complet|invalid job step|step .*complet", re.IGNORECASE)
_TRIES, _PAUSE = 5, 2.0  # of scancel, while Slurm does not answer


def slurm_describe(home: Home, request: Request) -> Answer:
    """The records of jobs, without those that ended before a time. Removes jobs whose time to live is over."""
    jobs, queue = Jobs(home.root), Queue(home.root)
    names, since, now = request["names"], request["since"] or 0.0, time.time()
    if names is None:
        jobs.sweep()
    folders = list(jobs) if names is None else jobs.named(names)
    found = []
    for folder in folders:
        record = view.record(folder, queue)
        if record is None:
            continue
        is_over = record["state"] in records.FINAL
        if is_over and record["ttl"] is not None and now - (record["finished"] or now) >= record["ttl"]:
            with contextlib.suppress(Refused):  # it is tried again at the next call
                jobs.remove(folder)
        elif not is_over or names is not None or record["finished"] >= since:
            found.append(record)
    problem = None if queue.problem is None else str(queue.problem)
    return {"jobs": found, "names": [folder.name for folder in folders], "problem": problem}


def slurm_spec(home: Home, request: Request) -> Answer:
    """What the user of a job asked for."""
    return {"spec": Jobs(home.root).of(request["name"]).read()["spec"]}


def slurm_events(home: Home, request: Request) -> Answer:
    """The events of a job on all its nodes, in the order of time."""
    folder = Jobs(home.root).of(request["name"])
    found: list[dict[str, Any]] = []
    for life, runs in view.runs_of(folder):
        for run in runs:
            host = ((run.read_status() or {}).get("agent") or {"host": None})["host"]
            found += [{**it, **({"host": host} if len(runs) > 1 else {})} for it in records.events(run)]
        outcome = folder.outcome(life) or {}
        if outcome.get("next"):
            found.append({"time": outcome["time"], "event": "requeued", "why": outcome["why"]})
    return {"events": sorted(found, key=lambda event: event["time"])}


def slurm_wait(home: Home, request: Request) -> Iterator[Answer]:
    """One line per job when it has ended, and a last line."""
    end_with_stdin()
    jobs = Jobs(home.root)
    left = jobs.named(request["names"])
    while left:
        queue = Queue(home.root)
        for folder in list(left):
            record = view.record(folder, queue)
            if record is None or record["state"] in records.FINAL:
                left.remove(folder)
                yield {"ended": folder.name}
        if left:
            time.sleep(_LOOK)
    yield {"end": True}


def slurm_stop(home: Home, request: Request) -> Answer:
    """Stop jobs: those that run are asked to save and to end, unless it is to be at once; others leave the queue.

    Raises:
        Refused: Slurm does not answer; then they go on.
    """
    jobs, queue = Jobs(home.root), Queue(home.root)
    folders = jobs.named(request["names"])
    for folder in folders:
        record = view.record(folder, queue)
        if record is not None and record["state"] not in records.FINAL:
            stop(folder, request["now"])
    return {"names": [folder.name for folder in folders]}


def stop(folder: JobFolder, now: bool, number: int = signal.SIGTERM) -> None:
    """Ask a job to stop, by this signal unless it is to be at once; one that waits leaves the queue.

    Raises:
        Refused: Slurm does not answer.
    """
    was_asked = folder.stop.exists()
    folder.stop.touch()
    try:
        if folder.read().get("allocation") is not None:  # which is its user's, and goes on
            for step in filter(None, map(folder.step, folder.lives)):
                _cancel(*([] if now else [f"--signal={int(number)}"]), step)
            return
        for job in folder.ids[-1:] or [
            entry.task or entry.id for entry in Queue(folder.path.parent.parent, 0.0).of(folder.read()["job_id"])
        ]:
            if now:
                _cancel(job)
                continue
            if "_" not in job:
                _cancel("--state=PENDING", job)
            elif _waits(folder, job):  # with a state, scancel takes all tasks of the array that wait
                _cancel(job)
                continue
            _cancel(f"--signal={int(number)}", job)
    except Refused:
        if not was_asked:
            folder.stop.unlink(missing_ok=True)
        raise


def _waits(folder: JobFolder, number: str) -> bool:
    entry = Queue(folder.path.parent.parent, 0.0).entry(number)
    return entry is not None and entry.is_pending


def _cancel(*args: str) -> None:
    for left in range(_TRIES - 1, -1, -1):
        try:
            call("scancel", "--quiet", *args)
            return
        except Rejected as error:
            if error.said and not _ENDED.search(error.said):  # it is quiet about jobs that have ended
                raise Refused(f"{error}; nothing was stopped") from None
            return  # it has ended, or has no step
        except Away as error:
            if not left:
                raise Refused(f"{error}; nothing was stopped, try again") from None
            time.sleep(_PAUSE)  # nothing says when the controller is back


def slurm_delete(home: Home, request: Request) -> Answer:
    """Remove jobs that have ended.

    Raises:
        Refused: one has not ended.
    """
    jobs, queue = Jobs(home.root), Queue(home.root)
    folders = jobs.named(request["names"])
    for folder in folders:
        record = view.record(folder, queue)
        if record is not None and record["state"] not in records.FINAL:
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


def slurm_shell(home: Home, request: Request) -> Answer:
    """Where a command beside a rank runs: the run directory on the rank's node, and the step that has it."""
    folder = Jobs(home.root).of(request["name"])
    for life, runs in reversed(view.runs_of(folder)):
        for run in runs:
            status = run.read_status() or {}
            ranks = [entry["rank"] for entry in status.get("ranks", ())]
            if request["rank"] in ranks or (not ranks and request["rank"] == 0):
                record = view.record(folder, Queue(home.root))
                has_ended = record is None or record["state"] in records.FINAL
                is_over = has_ended or folder.outcome(life) is not None
                node_rank = status.get("node_rank") or 0
                return {"run": str(run.path), "id": life.id, "node_rank": node_rank, "is_over": is_over}
    raise Refused(f"job {folder.name} has no rank {request['rank']} that has started")
