"""What is true of the jobs on this machine, read from their run directories.

Nothing here trusts a state that somebody wrote and could no longer take back: a job whose agent is gone without a last
word is FAILED, whatever status.json says.
"""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import processes, tensorboard
from .queue import explain, folder_of, overview
from .run_directory import RunDirectory, abandoned, read_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from .queue import Entry

FINAL = ("SUCCEEDED", "FAILED", "STOPPED")


def names(jobs: Path) -> dict[str, int]:
    """The jobs whose run directories lie in a folder, with the inode of each entry; makes that are left over go."""
    found = {}
    try:
        entries = list(os.scandir(jobs))
    except OSError:
        return {}
    for entry in entries:
        if not entry.name.startswith("."):
            found[entry.name] = entry.inode()
        elif abandoned(Path(entry.path)):
            shutil.rmtree(entry.path, ignore_errors=True)
    return found


def line_of(home: Path) -> Callable[[], list[Entry]]:
    """A function that gives the queue for devices in a home, read when it is called for the first time."""

    @functools.lru_cache(maxsize=1)
    def line() -> list[Entry]:
        try:
            return overview(folder_of(home))
        except OSError:
            return []

    return line


def record(path: Path, line: Callable[[], list[Entry]]) -> dict[str, Any] | None:
    """What is true of a job; None where there is none.

    Args:
        path: its run directory.
        line: gives the queue, see `line_of`.

    The keys are those of a job as the verbs show it: name, state, backend, framework, nodes, ranks, attempt, exit_code,
    created, started, finished (seconds since the epoch), instances, error, and more.
    """
    run = RunDirectory(path)
    held = run.is_held  # asked first: an agent writes its last status before it lets go
    job, status = read_json(run.job), run.read_status() or {}
    node = read_json(run.spec)
    if node is None or job is None:
        return None
    spec, agent = job["spec"], status.get("agent") or {}
    state, error = status.get("state", "PENDING"), _error(status)
    finished = status.get("finished")
    if state not in FINAL and not held:
        state, error = _died(job, agent)
        finished = finished or _last_word(run)
    host = agent.get("host", socket.gethostname())
    return {
        "name": path.name,
        "state": state,
        "backend": "local",
        "framework": node["framework"],
        "nodes": node["nodes"],
        "ranks": status.get("world_size") or node["nproc"] * node["nodes"],
        "attempt": status.get("attempt", 0),
        "exit_code": status.get("exit_code") if state in FINAL else None,
        "created": job["created"],
        "started": status.get("started"),
        "finished": finished if state in FINAL else None,
        "instances": [_instance(rank, host, state) for rank in status.get("ranks", ())],
        "error": error,
        "waiting": _waiting(path.name, status, line) if state == "PENDING" else None,
        "restarts": status.get("restarts", 0),
        "max_restarts": node["max_restarts"],
        "devices": status.get("devices") or [],
        "devices_asked": spec.get("devices"),
        "priority": spec["priority"],
        "queue": spec["queue"],
        "labels": spec["labels"],
        "ttl": spec["ttl"],
        "command": _command(node["program"]),
        "working_dir": node["working_dir"],
        "folder": os.path.realpath(path),
        "code": job.get("code"),
        "data": job.get("data", []),
        "tensorboard": tensorboard.describe(path),
        "progress": read_json(path / "progress.json"),
    }


def _error(status: dict[str, Any]) -> str | None:
    failure = status.get("failure")
    if failure is None:
        return None
    message = str(failure["message"])
    return message if failure.get("rank") is None else f"rank {failure['rank']}: {message}"


def _waiting(name: str, status: dict[str, Any], line: Callable[[], list[Entry]]) -> str | None:
    """What a job waits for, in one line."""
    if not status.get("waiting"):
        return None
    problem = status["waiting"]["problem"]
    return f"cannot queue for devices: {problem}" if problem else explain(line(), name)


def _died(job: dict[str, Any], agent: dict[str, Any]) -> tuple[str, str]:
    """State and error of a job that nobody works on although it has not ended."""
    if agent.get("host", socket.gethostname()) != socket.gethostname():
        return "LOST", f"it runs on {agent['host']}, which can be asked there alone"
    again = f"paceline resubmit {job['spec']['name']} goes on from its last checkpoint"
    if agent.get("boot", "") != processes.boot_id() and agent:
        return "FAILED", f"the machine was restarted; {again}"
    if not agent:
        return "FAILED", f"it was never started: whoever submitted it was ended; {again}"
    return "FAILED", f"its agent (pid {agent['pid']}) was killed, and its ranks with it; {again}"


def _last_word(run: RunDirectory) -> float | None:
    times = []
    for path in (run.status, run.events, run.agent_log):
        try:
            times.append(path.stat().st_mtime)
        except OSError:
            continue
    return max(times, default=None)


def _instance(rank: dict[str, Any], host: str, state: str) -> dict[str, Any]:
    over = state in FINAL and rank["state"] in ("STARTING", "RUNNING")  # they died with the agent
    return {
        "name": rank["name"],
        "node": host,
        "rank": rank["rank"],
        "state": "FAILED" if over else rank["state"],
        "pid": rank["pid"] or None,
        "exit_code": rank["exit_code"],
    }


def _command(program: dict[str, Any]) -> str:
    words = [*(["-m"] if program["kind"] == "module" else []), program["target"], *program["args"]]
    return " ".join(map(shlex.quote, words))


def signal_agent(path: Path, numbers: tuple[int, ...]) -> bool:
    """Send signals to the agent of a job; returns whether there was one to send them to."""
    run = RunDirectory(path)
    agent = (run.read_status() or {}).get("agent")
    if agent is None or not run.is_held or processes.start_time(agent["pid"]) != agent["start_time"]:
        return False
    for number in numbers:
        processes.signal_process(agent["pid"], number)
    return True
