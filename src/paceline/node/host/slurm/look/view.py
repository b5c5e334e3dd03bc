"""The state of a Slurm job: from the run directories of its nodes first, then from Slurm.

The nodes write into the run directories on the shared disk. Whether a node still works on the job is not asked of its
lock, which may not work between machines: Slurm knows it. While Slurm does not answer, and for a job of another cluster
that shares the disk, what the nodes have written last is taken for true.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from paceline.node.errors import Refused
from paceline.node.files import read_json
from paceline.node.journal.fold import fold, order
from paceline.node.store import records

from . import accounts, reasons

if TYPE_CHECKING:
    from paceline.node.host.slurm.job_folder import JobFolder, Life
    from paceline.node.rundir.directory import RunDirectory

    from .queue import Entry, Queue

REQUEUE, CHAIN = "requeue", "chain"  # what the batch script does next, see `finish.py`
_SHORTLY = 5.0  # seconds in which a node that was started writes something
_CLOSING = 30.0  # seconds in which the process that waits for a step says how it ended
_SUBMITTING = 600.0  # seconds that a client may take to submit: it tries again while Slurm does not answer
NEW = "Slurm has just got it"
CLOSING = "it has ended on its nodes; its batch script finds out whether it goes on"
# Slurm's reasons where a node cannot open the output file of a batch script.
_NOT_OPENED = ("JobLaunchFailure", "RaisedSignal:53")
_SUSPENDED = "Slurm has suspended it (Slurm: SUSPENDED)"
STARTING = "its nodes start"


def record(folder: JobFolder, queue: Queue) -> dict[str, Any] | None:
    """The record of a job, with the keys of `records.record`, and `external_id`; None if it is gone."""
    job = read_json(folder.job)
    if job is None:
        return None
    found = _Looked(folder, job, queue).record()
    if found is None:
        return None
    spec = job["spec"]
    return {
        **found,
        "name": folder.name,
        "created": float(job["created"]),
        "queue": found["queue"] or spec["queue"],
        "labels": dict(spec["labels"]),
        "options": dict(spec["options"]),
        "ttl": spec["ttl"],
        "code": job.get("code"),
        "folder": str(folder.path),
        "external_id": (folder.ids or [""])[-1],
        "job_id": job["job_id"],
    }


class _Looked:
    """What is seen of a job at a moment."""

    def __init__(self, folder: JobFolder, job: dict[str, Any], queue: Queue) -> None:
        self._folder, self._job, self._queue = folder, job, queue
        self._is_stopped = folder.is_stopped

    @property
    def _is_allocated(self) -> bool:
        """Whether its Slurm job is an allocation of its user, which does not end with it."""
        return self._job.get("allocation") is not None

    def record(self) -> dict[str, Any] | None:
        lives = self._folder.lives
        while lives and not self._says_something(lives[-1]):
            lives.pop()
        return self._of_life(lives[-1]) if lives else self._unstarted()

    def _says_something(self, life: Life) -> bool:
        folder = self._folder
        return bool(folder.runs(life) or folder.refusals(life) or folder.outcome(life))

    # -- before it has started -----------------------------------------------------------------------------------------

    def _unstarted(self) -> dict[str, Any]:
        """A job of which no node has written anything yet."""
        if self._is_allocated and (outcome := self._any_outcome()) is not None:
            state = "STOPPED" if self._is_stopped else outcome.get("state") or "FAILED"
            return self._plain(state, error=outcome.get("why"), finished=float(outcome["time"]))
        if elsewhere := self._queue.elsewhere(self._job):
            return self._plain("PENDING", waiting=elsewhere)
        entry = self._entry()
        if entry is None:
            if not self._is_known_gone(self._asked_since()):
                return self._plain("PENDING", waiting=NEW)
            return self._never_started()
        if entry.is_pending:
            is_new = entry.reason in ("", "None")
            waiting = NEW if is_new else reasons.waiting(entry.reason, entry.id, entry.start)
            return self._plain("PENDING", entry, waiting=waiting)
        if entry.is_running:
            return self._plain("STARTING", entry, waiting=STARTING)
        accounts.keep(entry.state, self._folder.accounted(self._folder.ids[-1]))
        return self._ended_by_slurm(entry.state, entry)

    def _any_outcome(self) -> dict[str, Any] | None:
        return next(filter(None, map(self._folder.outcome, self._folder.lives)), None)

    def _never_started(self) -> dict[str, Any]:
        if self._is_stopped:
            return self._plain("STOPPED", finished=_time_of(self._folder))
        if not self._folder.ids:
            why = "Slurm never got it: the command that submitted it was ended; submit it again"
        elif word := self._accounted():
            return self._ended_by_slurm(word)
        else:
            why = self._folder.last_words or "Slurm does not know it any more, and no node has started it"
        return self._plain("FAILED", error=why, finished=_time_of(self._folder))

    def _ended_by_slurm(self, word: str, entry: Entry | None = None) -> dict[str, Any]:
        """A job that Slurm has ended before any node wrote something; `word` is Slurm's for how."""
        finished = _time_of(self._folder)
        if self._is_stopped:
            return self._plain("STOPPED", entry, finished=finished)
        if word == "COMPLETED":  # only a job that has succeeded exits with 0
            return self._plain("SUCCEEDED", entry, finished=finished)
        state = "STOPPED" if word == "CANCELLED" else "FAILED"
        why = reasons.ENDED.get(word, f"Slurm says {word}")
        said = "" if state == "STOPPED" else self._folder.last_words
        if entry is not None and word == "FAILED" and not said and entry.reason.startswith(_NOT_OPENED):
            why = f"{entry.host or 'its first node'} could not start its batch script; most likely"
            why = f"{why} {self._folder.unseen_by(['it'])}; paceline check --on the target tries that"
            return self._plain("FAILED", entry, error=why, finished=finished)
        return self._plain(
            state, entry, error=f"{why} before it started{f': {said}' if said else ''}", finished=finished
        )

    # -- once a node has written something -----------------------------------------------------------------------------

    def _of_life(self, life: Life) -> dict[str, Any]:
        outcome = self._folder.outcome(life)
        found = self._merged(life, is_alive=outcome is None)
        if outcome is not None:
            return self._after(life, found, outcome)
        if found["state"] == "SUCCEEDED":
            return found
        if self._queue.elsewhere(self._job):
            is_closing = found["state"] in records.FINAL and not self._is_silent(life)
            return self._closing(found) if is_closing else found
        entry = self._entry()
        if self._is_allocated:
            return self._of_step(life, found, entry)
        if entry is not None and entry.id == life.id and entry.restarts <= life.restarts and not entry.is_over:
            if found["state"] in records.FINAL:
                return self._closing(found)
            return {**found, "waiting": _SUSPENDED} if entry.state == "SUSPENDED" else found
        if entry is not None and not entry.is_over:  # Slurm has requeued it, or another one goes on
            return self._again(found, entry)
        if entry is None and not self._is_known_gone(max(self._begun(life), self._asked_since())):
            return self._closing(found) if found["state"] in records.FINAL else found
        return self._lost(life, entry)

    def _of_step(self, life: Life, found: dict[str, Any], entry: Entry | None) -> dict[str, Any]:
        """A job in an allocation of its user, before its step has ended."""
        over = entry if entry is not None and entry.is_over else None
        if found["state"] in records.FINAL:
            is_late = self._is_silent(life)
            is_ours = found["state"] != "STOPPED" or self._is_stopped  # else it was stopped with Slurm's commands
            if is_ours or (is_late and over is None):
                return found
            return self._lost(life, over) if is_late else {**self._closing(found), "waiting": "its step ends"}
        is_gone = self._is_known_gone(self._begun(life)) if entry is None else entry.restarts > life.restarts
        return self._lost(life, over) if is_gone or over is not None else found

    def _is_silent(self, life: Life) -> bool:
        """Whether its nodes have written nothing for so long that its batch script says nothing any more."""
        last = max((_time_of(self._folder, run.status) for run in self._folder.runs(life)), default=0.0)
        return self._queue.is_past(last, _CLOSING)

    def _after(self, life: Life, found: dict[str, Any], outcome: dict[str, Any]) -> dict[str, Any]:
        """A life that has ended, with what its batch script has decided."""
        follows = outcome.get("next")
        if follows:
            if self._queue.elsewhere(self._job):
                return self._again(found, None, str(outcome["why"]))
            entry, decided = self._entry(), _time_of(self._folder, self._folder.of(life) / "outcome.json")
            is_old = entry is not None and entry.id == life.id and entry.restarts <= life.restarts
            if entry is None and self._is_known_gone(max(decided, self._asked_since())):
                return self._not_again(found, outcome, entry)
            if entry is not None and entry.is_over and (not is_old or self._queue.knows_since(decided)):
                return self._not_again(found, outcome, entry)
            return self._again(found, None if is_old else entry, str(outcome["why"]))
        if outcome.get("state"):
            found = {**found, "state": outcome["state"], "exit_code": outcome.get("exit_code", found["exit_code"])}
        if outcome.get("why"):
            found = {**found, "error": outcome["why"]}
        return {**found, "finished": found["finished"] or float(outcome["time"])}

    def _again(self, found: dict[str, Any], entry: Entry | None, why: str = "Slurm has requeued it") -> dict[str, Any]:
        """A job that Slurm starts again."""
        waiting = why
        if entry is not None and entry.is_pending:
            waiting = f"{why}; {reasons.waiting(entry.reason, entry.id, entry.start)}"
        instances = [{**rank, "state": "STOPPED"} for rank in found["instances"]]
        return {
            **found, "state": "RESTARTING", "waiting": waiting, "finished": None, "exit_code": None, "error": None,
            "instances": instances,
        }  # fmt: skip

    def _not_again(self, found: dict[str, Any], outcome: dict[str, Any], entry: Entry | None) -> dict[str, Any]:
        """A job that was to start again, and was ended in Slurm before."""
        word = entry.state if entry is not None else self._accounted()
        state = "STOPPED" if self._is_stopped or word == "CANCELLED" else "FAILED"
        then = reasons.ENDED.get(word, word) or "Slurm does not know it any more"
        error = None if self._is_stopped else f"{outcome['why']}, then {then}"
        return {
            **found, "state": state, "waiting": None, "error": error,
            "finished": max(found["finished"] or 0.0, float(outcome["time"])),
        }  # fmt: skip

    def _closing(self, found: dict[str, Any]) -> dict[str, Any]:
        """A job that has ended on its nodes, while its batch script decides whether it goes on."""
        return {**found, "state": "RESTARTING", "waiting": CLOSING, "finished": None, "exit_code": None}

    def _lost(self, life: Life, entry: Entry | None) -> dict[str, Any]:
        """A life that ended without a word of its batch script."""
        found = self._merged(life, is_alive=False)
        if self._is_stopped:
            return {**found, "state": "STOPPED", "error": None}
        kept = self._folder.accounted(str(life))
        if entry is not None:
            accounts.keep(entry.state, kept)
        word = entry.state if entry is not None else accounts.state_of(life.id, kept)
        if word == "COMPLETED" and not self._is_allocated:  # only a job that has succeeded exits with 0
            return {**found, "state": "SUCCEEDED", "exit_code": 0, "error": None}
        if word in ("", "COMPLETED", "FAILED"):
            return found
        why = reasons.ENDED.get(word, f"Slurm says {word}")
        if word == "CANCELLED":
            return {**found, "state": "STOPPED", "error": f"{why}, not by paceline"}
        again = f"paceline resubmit {self._folder.name} goes on from its last checkpoint"
        return {**found, "state": "FAILED", "error": f"{why}; {again}"}

    def _merged(self, life: Life, *, is_alive: bool) -> dict[str, Any]:
        """The record of all nodes of a life; FAILED if one refused the job."""
        found = merged_of(self._folder, life, is_alive=is_alive)
        refusals = self._folder.refusals(life)
        if found is not None and not refusals:
            return found
        found = found or self._plain("FAILED", finished=_time_of(self._folder))
        if not refusals:
            return found
        finished = found["finished"] or _time_of(self._folder)
        return {**found, "state": "FAILED", "exit_code": 2, "error": refusals[0], "finished": finished}

    # -- Slurm ---------------------------------------------------------------------------------------------------------

    def _entry(self) -> Entry | None:
        """Its Slurm job, the newest."""
        mine, ids = self._folder.identity(self._job), self._folder.ids
        if not ids:
            task = (self._job.get("task") or [None, None])[1]
            for entry in self._queue.of(mine):  # its client was ended before it noted the number
                if task is not None and not entry.task.endswith(f"_{task}"):
                    continue
                with contextlib.suppress(OSError):
                    self._folder.add_id(entry.number)
                ids.append(entry.number)
        return self._queue.entry(ids[-1], None if self._is_allocated else mine) if ids else None

    def _asked_since(self) -> float:
        """From when on Slurm's answers name its Slurm job, by the clock of the disk."""
        if self._folder.ids:
            return _time_of(self._folder, self._folder.path / "ids")
        return _time_of(self._folder, self._folder.job) + _SUBMITTING

    def _accounted(self) -> str:
        """How its newest Slurm job has ended by Slurm's accounts; "" if they do not say it."""
        ids = self._folder.ids
        return accounts.state_of(ids[-1], self._folder.accounted(ids[-1])) if ids else ""

    def _is_known_gone(self, since: float) -> bool:
        """Whether Slurm has answered later than this, and did not name it."""
        return self._queue.knows_since(since)

    def _begun(self, life: Life) -> float:
        return _time_of(self._folder, self._folder.of(life)) + _SHORTLY

    def _plain(
        self, state: str, entry: Entry | None = None, *, waiting: str | None = None, error: str | None = None,
        finished: float | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """The record of a job of which no node has written anything."""
        spec = self._job["spec"]
        is_final = state in records.FINAL
        return {
            "name": self._folder.name, "state": state, "backend": "", "framework": spec["framework"],
            "nodes": int(str(spec["nodes"]).partition(":")[0]),
            "ranks": _count(spec), "attempt": 0, "exit_code": 1 if state == "FAILED" else None,
            "created": float(self._job["created"]), "started": None,
            "finished": (finished or time.time()) if is_final else None, "instances": [], "error": error,
            "waiting": waiting, "restarts": 0, "max_restarts": int(spec["max_restarts"]), "devices": [],
            "devices_asked": spec["devices"], "priority": 0, "queue": entry.partition if entry else None, "labels": {},
            "options": {}, "ttl": None, "kept_since": finished if is_final else None, "grace": float(spec["grace"]),
            "command": _command(spec), "working_dir": str(self._job["node"]["working_dir"]), "folder": "", "code": None,
            "data": list(self._job["data"]), "tensorboard": None, "progress": None, "checkpoint": None,
        }  # fmt: skip


def is_requeued(folder: JobFolder, life: Life, queue: Queue) -> bool:
    """Whether Slurm has taken a life's nodes away and starts the job again; agents that it killed do not say so."""
    job = read_json(folder.job)
    entry = _Looked(folder, job, queue)._entry() if job is not None else None
    return entry is not None and not entry.is_over and entry.id == life.id and entry.restarts > life.restarts


def merged_of(folder: JobFolder, life: Life, *, is_alive: bool) -> dict[str, Any] | None:
    """The record of the nodes of a life; None if none has written anything.

    Args:
        folder: of the job.
        life: of it.
        is_alive: whether the nodes may still work on it.
    """
    runs, reports = folder.runs(life), []
    for run in _there(runs) if is_alive else runs:
        report = records.look(run.path, list, lambda _: is_alive)
        if report is not None:
            reports.append(report)
    reports.sort(key=lambda report: order(report["part"]))
    return {**fold(reports[0]["job"], [report["part"] for report in reports])} if reports else None


def _there(runs: list[RunDirectory]) -> list[RunDirectory]:
    """Those of the nodes of the last attempt, and of nodes that may be about to take part in it; others are lost."""
    starts = {run.path: start for run in runs if (start := (run.read_status() or {}).get("start")) is not None}
    with contextlib.suppress(KeyError, IndexError, TypeError, ValueError):  # damaged, or none has begun
        last = max(starts.values(), key=lambda start: start["attempt"])
        ids = {node["id"] for node in last["nodes"]}
        lost = {path for path, start in starts.items() if start["nodes"][start["node_rank"]]["id"] not in ids}
        return [run for run in runs if run.path not in lost]
    return runs


def refuse_elsewhere(folder: JobFolder, queue: Queue) -> None:
    """Refuse a job that goes on in another cluster.

    Raises:
        Refused: it does.
    """
    if elsewhere := queue.elsewhere(folder.read()):
        raise Refused(f"job {folder.name} cannot be reached: {elsewhere}; go to a login node of its cluster")


def runs_of(folder: JobFolder) -> list[tuple[Life, list[RunDirectory]]]:
    """The run directories of all lives of a job, the newest life last."""
    return [(life, runs) for life in folder.lives if (runs := folder.runs(life))]


def _count(spec: dict[str, Any]) -> int:
    nodes = int(str(spec["nodes"]).partition(":")[0])
    return nodes * spec["ranks"] if isinstance(spec["ranks"], int) else nodes


def _command(spec: dict[str, Any]) -> str:
    import shlex

    words = [spec["script"] or spec["command"] or "", *spec["args"]]
    if spec["module"]:
        words = ["-m", spec["module"], *spec["args"]]
    return " ".join(map(shlex.quote, map(str, words)))


def _time_of(folder: JobFolder, path: Any = None) -> float:
    """When the last thing happened to a job, or to one of its files, by the clock of the disk."""
    times = [0.0]
    for each in (path,) if path is not None else (folder.path, folder.stop, folder.output):
        with contextlib.suppress(OSError):
            times.append(each.stat().st_mtime)
    return max(times)
