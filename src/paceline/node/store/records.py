"""The jobs on this machine, as their run directories show them."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from paceline.contract.checkpoint import newest_first
from paceline.contract.nodejob import NodeJob, StoredJob
from paceline.node import tensorboard
from paceline.node.errors import Refused
from paceline.node.files import load_json, read_json
from paceline.node.journal.fold import facts_of, fold, part_of
from paceline.node.journal.records import for_people, read
from paceline.node.journal.state import FINAL, NewerVersion
from paceline.node.machine import processes
from paceline.node.rundir.directory import SAVED, RunDirectory
from paceline.node.rundir.staging import sweep

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paceline.contract.records import CheckpointRecord, EventRecord, JobFacts, JobRecord, ProgressRecord, Report
    from paceline.node.devicequeue.policy import Entry
    from paceline.node.journal.status import AgentRecord, Status

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PERHAPS = (int, float, type(None))
_PROGRESS: Mapping[Any, Any] = {
    "epoch": int, "epochs": _PERHAPS, "step": int, "steps": _PERHAPS, "samples_per_second": _PERHAPS,
    "epoch_seconds_left": _PERHAPS, "seconds_left": _PERHAPS, "began": _PERHAPS, "steps_per_minute": _PERHAPS,
    "metrics": {...: _PERHAPS}, "trial": (dict, type(None)),
    "sync": {"method": str, "sent_bytes": (int, float), "sync_seconds": (int, float), "step_seconds": (int, float)},
    "replicas": {"compared": int, "step": int},
}  # fmt: skip
_MOST_SECONDS = 2.0**36  # since the epoch; the dates of `datetime` end somewhat later


def names(jobs: Path) -> dict[str, int]:
    """The jobs in a folder of run directories, each with a number that no other job of its name has.

    Removes what killed clients have left.
    """
    return {entry.name: _identity(entry) for entry in sweep(jobs)}


def _identity(entry: os.DirEntry[str]) -> int:
    """When its lock was made: a new folder often has the inode of one that was removed."""
    try:
        return os.stat(f"{entry.path}/lock").st_mtime_ns
    except OSError:
        return 0 if entry.is_symlink() and not os.path.exists(entry.path) else entry.inode()


def is_job(path: Path) -> bool:
    """Whether there is a job, or the rest of one."""
    if path.is_symlink() and not path.exists():  # a link to a folder elsewhere
        return True
    return any((path / name).exists() for name in ("lock", "spec.json", "job.json", "status.json"))


def find(jobs: Path, name: str) -> RunDirectory | None:
    """The job of this name in a folder of jobs, if there is one."""
    path = jobs / name
    return RunDirectory(path) if _NAME.fullmatch(name) and is_job(path) else None


def queue_of(home: Path) -> Callable[[], list[Entry]]:
    """A function that returns the queue for devices in a home; it reads the queue at its first call."""

    @functools.lru_cache(maxsize=1)
    def queue() -> list[Entry]:
        from paceline.node.devicequeue.ticket import folder_of, overview

        try:
            return overview(folder_of(home))
        except OSError:
            return []

    return queue


def held_here(run: RunDirectory) -> bool | None:
    """The liveness of a job whose agent runs on this machine: True while a process holds its lock, else None.

    If no process holds it, the agent may still be alive.
    """
    return run.is_held or None


def record(path: Path, queue: Callable[[], list[Entry]]) -> JobRecord | None:
    """The record of a job of this machine alone; None if there is no job. See `look`."""
    report = look(path, queue)
    return None if report is None else fold(report["job"], [report["part"]])


def look(
    path: Path, queue: Callable[[], list[Entry]], liveness: Callable[[RunDirectory], bool | None] = held_here
) -> Report | None:
    """What this machine knows of a job; None if there is no job.

    A scheduler can pass its own `liveness`: locks may not work between machines. If that returns None, it is unknown,
    and the job's agent is searched for on this machine.
    """
    if not is_job(path):
        return None
    if not path.exists():
        return _damaged(path, f"its folder {os.path.realpath(path)} is gone; is a disk not mounted?")
    try:
        found = _look(path, queue, liveness)
        fold(found["job"], [found["part"]])  # values that nobody can read are found here, and not where a list is made
    except NewerVersion as error:
        found = _newer(path, str(error))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, OSError) as error:
        found = _damaged(path, f"its folder is damaged ({type(error).__name__}: {error}); see {path}")
    return found if is_job(path) else None  # it may have been removed meanwhile


def _look(path: Path, queue: Callable[[], list[Entry]], liveness: Callable[[RunDirectory], bool | None]) -> Report:
    run = RunDirectory(path)
    alive = liveness(run)  # first: an agent writes its last status before it releases the lock
    why, written, noticed = "", None, None
    stored, status = load_json(run.job), run.load_status()
    node = load_json(run.spec)
    if node is None or stored is None:
        return _damaged(path, f"its folder lacks {'spec.json' if node is None else 'job.json'}; see {path}")
    job = StoredJob.from_json(stored)
    agent = status.get("agent")
    if status.get("state") not in FINAL and alive is None and _runs(agent):
        alive = True
    if status.get("state") not in FINAL and not alive:
        alive, why = _absence(run, job.spec.name, agent, alive)
        written = _last_change(run, job)
        noticed = None if alive is None else _noticed(run)
    for key in ("started", "finished"):
        if status.get(key) is not None:
            _moment(status[key])
    part = part_of(
        status, alive=alive, why=why, written=written, noticed=noticed, job_id=node.get("job_id"),
        host=agent["host"] if agent else os.uname().nodename, hosts=node.get("hosts", ()),
        is_elastic=node.get("least") != node.get("nodes"),
        waiting=_waiting(path.name, status, queue) if alive else None,
        progress=_progress(path / "progress.json"), checkpoint=checkpoint(run),
    )  # fmt: skip
    return {"job": _facts(path, job, node), "part": part}


def facts(path: Path, job: StoredJob, nodes: int, ranks: int, working_dir: str) -> JobFacts:
    """What is known of a job before it runs."""
    return {
        **facts_of(job.spec),
        "name": path.name, "backend": "local", "framework": job.framework, "nodes": nodes, "ranks": ranks,
        "created": _moment(job.created), "working_dir": working_dir, "folder": os.path.realpath(path),
        "code": job.code, "data": list(job.data), "tensorboard": tensorboard.describe(path),
    }  # fmt: skip


def _facts(path: Path, job: StoredJob, node: Mapping[str, Any]) -> JobFacts:
    """The same for a part of a job, with what `spec.json` holds."""
    nodes, ranks = int(node["expected"] or node["nodes"]), int(node["nproc"] * node["nodes"])
    return facts(path, job, nodes, ranks, str(node["working_dir"]))


def _moment(value: Any) -> float:
    """A time, in seconds since the epoch."""
    seconds = float(value)
    if not 0 <= seconds < _MOST_SECONDS:
        raise ValueError(f"{seconds} is not a time")
    return seconds


def _progress(path: Path) -> ProgressRecord | None:
    """The progress of the training; None if there is none that can be read."""
    found = read_json(path)
    try:
        for key in {"time", "began"}.intersection(found or ()):
            _moment((found or {})[key])
    except (TypeError, ValueError, OverflowError):
        return None
    return cast("ProgressRecord", found) if _fits(found, _PROGRESS) else None


def _fits(record: Any, shape: Mapping[Any, Any]) -> bool:
    """Whether a record, which anybody may have written, has values of these types."""
    if not isinstance(record, dict):
        return False
    values = [
        (it, kind) for key, kind in shape.items() for it in (record.values() if key is ... else [record.get(key)])
    ]
    return all(
        (value is None or _fits(value, kind)) if isinstance(kind, dict)
        else isinstance(value, kind) and (not isinstance(value, float) or math.isfinite(value))
        for value, kind in values
    )  # fmt: skip


def checkpoint(run: RunDirectory) -> CheckpointRecord | None:
    """The step and folder that the library has saved last; None if there is none that can be read."""
    found = read_json(run.path / SAVED) or {}
    step, folder = found.get("step"), found.get("folder")
    return {"step": step, "folder": folder} if isinstance(step, int) and isinstance(folder, str) else None


def _damaged(path: Path, why: str) -> Report:
    """What is known of a job whose files cannot be read."""
    then = 0.0
    with contextlib.suppress(OSError):
        then = path.lstat().st_mtime
    held = RunDirectory(path).is_held
    node = read_json(RunDirectory(path).spec) or {}
    part = part_of(
        {"state": "RUNNING"}, alive=held, why=why, written=then, host=os.uname().nodename, job_id=node.get("job_id"),
        hosts=node.get("hosts", ()),
    )  # fmt: skip
    part["error"] = why
    where = os.path.realpath(path)
    known: JobFacts = {**facts_of(NodeJob()), "name": path.name, "backend": "local", "created": then, "folder": where}
    return {"job": known, "part": part}


def _newer(path: Path, why: str) -> Report:
    """What is known of a job of which a newer version has written: perhaps what was asked for, not how it is."""
    run, found = RunDirectory(path), _damaged(path, why)
    found["part"]["alive"] = found["part"]["alive"] or None
    with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError, OverflowError, OSError):
        found["job"] = _facts(path, StoredJob.from_json(load_json(run.job) or {}), load_json(run.spec) or {})
    return found


def _waiting(name: str, status: Status, queue: Callable[[], list[Entry]]) -> str | None:
    """What a job waits for, in one line."""
    waiting = status.get("waiting")
    if not waiting or status["state"] not in ("PENDING", "RESTARTING", "RUNNING", "SUSPENDED"):
        return None
    problem = waiting["problem"]
    if "need" not in waiting:
        return str(problem)
    if problem:
        return f"cannot queue for devices: {problem}"
    from paceline.node.devicequeue.policy import explain

    return explain(queue(), name)


def _runs(agent: AgentRecord | None) -> bool:
    """Whether an agent runs although no process holds its lock: the lock file may have been removed."""
    return (
        agent is not None
        and agent["boot"] == processes.boot_id()
        and agent["host"] == os.uname().nodename
        and processes.start_time(agent["pid"]) == agent["start_time"]
    )


def _absence(run: RunDirectory, name: str, agent: AgentRecord | None, alive: bool | None) -> tuple[bool | None, str]:
    """Whether a job is alive that no process on this machine works on, and why that is not known, or why it is not."""
    is_here = agent is None or agent["host"] == os.uname().nodename
    if agent and not is_here and alive is None:
        return None, f"it runs on {agent['host']}; only there its state is known"
    if not agent:
        why = "it was never started: the client that submitted it was ended"
    elif not is_here:
        why = f"its agent on {agent['host']} was ended, and its ranks with it"
    elif agent["boot"] != processes.boot_id():
        why = "the machine was restarted"
    else:
        guard = (agent.get("guard") or {}).get("pid")
        others = f", or the guard above it (pid {guard})" if guard else ""
        why = f"its agent (pid {agent['pid']} on {agent['host']}) was killed{others}, and its ranks with it"
    return False, f"{why}; {again(name, has_checkpoint(run))}"


def again(name: str, goes_on: bool) -> str:
    """What starts a job of this name again, and whether it goes on from a checkpoint then."""
    return f"paceline resubmit {name} {'goes on from its last checkpoint' if goes_on else 'starts it again'}"


def has_checkpoint(run: RunDirectory) -> bool:
    """Whether the library has saved one for this job, or finds one of a job before it."""
    if (run.path / SAVED).exists():
        return True
    return next(newest_first(_checkpoints(run)), None) is not None


def _checkpoints(run: RunDirectory) -> Path:
    """The folder for the checkpoints of a job."""
    node = read_json(run.spec) or {}
    given = (node.get("env") or {}).get("PACELINE_CHECKPOINT_DIR")
    return Path(str(node.get("working_dir", "/")), str(given)) if given else run.path / "checkpoints"


def _last_change(run: RunDirectory, job: StoredJob) -> float:
    """The time at which a file of a job was last written."""
    times = [float(job.created)]
    written = ("status.json", "*.jsonl", "agent.log", "progress.json", "logs/*/*", "checkpoints*", "checkpoints*/*")
    for pattern in written:
        for path in run.path.glob(pattern):
            with contextlib.suppress(OSError):
                times.append(min(path.stat().st_mtime, time.time()))
    return max(times)


def _noticed(run: RunDirectory) -> float | None:
    """When it was seen first that no process works on a job; None if that cannot be kept."""
    with contextlib.suppress(OSError):
        os.close(os.open(run.noticed, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        return run.noticed.stat().st_mtime
    return None


def events(run: RunDirectory) -> list[EventRecord]:
    """The events of a job."""
    try:
        return sorted(for_people(read(run.journal)[0]), key=lambda event: event["time"])
    except OSError as error:
        raise Refused(f"cannot read {run.journal}: {error.strerror}") from None


def signal_agent(path: Path, numbers: tuple[int, ...]) -> bool | None:
    """Send signals to the agent of a job; returns whether there is one, None if it does not know one of them.

    It handles those that it knows from its first instruction on; another one would end it.
    """
    run = RunDirectory(path)
    agent = (run.read_status() or {}).get("agent")
    if not isinstance(agent, dict) or not _runs(agent):
        return False
    if not all(number < signal.SIGRTMIN or processes.handles(agent["pid"], number) for number in numbers):
        return None
    with contextlib.suppress(ProcessLookupError):
        for number in numbers:
            os.kill(agent["pid"], number)  # that another user may not is an error
    return True


def agent_pid(run: RunDirectory, guard: int) -> int:
    """The pid of a job's agent according to its last status; if there is none, the pid of its guard."""
    agent = (run.read_status() or {}).get("agent")
    pid = agent.get("pid") if isinstance(agent, dict) else None
    return pid if isinstance(pid, int) else guard


def wake_agent(path: Path) -> None:
    """Continue a job's agent and its guard if they are suspended (SIGSTOP), so that the job can end."""
    run = RunDirectory(path)
    agent = (run.read_status() or {}).get("agent")
    if not isinstance(agent, dict) or agent.get("boot") != processes.boot_id():
        return
    for name, process in (("agent", agent), ("agent's guard", agent.get("guard"))):
        if isinstance(process, dict) and isinstance(process.get("pid"), int):
            is_it = processes.start_time(process["pid"]) == process.get("start_time") is not None
            if is_it and processes.is_suspended(process["pid"]):
                run.append({"event": "continued", "what": name, "pid": process["pid"]})
                processes.signal_process(process["pid"], signal.SIGCONT)
