"""The state of a Slurm job: from the run directories of its nodes first, then from Slurm.

The nodes write into the run directories on the shared disk. Whether a node still works on the job is not asked of its
lock, which may not work between machines: Slurm knows it. While Slurm does not answer, what the nodes have written
last is taken for true.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from paceline.node.files import read_json
from paceline.node.store import records
from paceline.node.store.home import with_ids
from paceline.node.store.parts import merged

from . import accounts, reasons

if TYPE_CHECKING:
    from paceline.node.rundir.directory import RunDirectory

    from .folder import JobFolder, Life
    from .queue import Entry, Queue

REQUEUE, CHAIN = "requeue", "chain"  # what the batch script does next, see `finish.py`
_SHORTLY = 5.0  # seconds in which a node that was started writes something
_CLOSING = 30.0  # seconds in which the process that waits for a step says how it ended
_SUBMITTING = 600.0  # seconds that a client may take to submit: it tries again while Slurm does not answer
NEW = "Slurm has just got it"
CLOSING = "it has ended on its nodes; its batch script finds out whether it goes on"
_STARTING = "its nodes start"


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
        self._is_stopped = folder.stop.exists()

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
            return self._plain("STARTING", entry, waiting=_STARTING)
        return self._ended_by_slurm(entry)

    def _any_outcome(self) -> dict[str, Any] | None:
        return next(filter(None, map(self._folder.outcome, self._folder.lives)), None)

    def _never_started(self) -> dict[str, Any]:
        if self._is_stopped:
            return self._plain("STOPPED", finished=_time_of(self._folder))
        if not self._folder.ids:
            why = "Slurm never got it: the command that submitted it was ended; submit it again"
        else:
            why = self._folder.last_words or "Slurm does not know it any more, and no node has started it"
        return self._plain("FAILED", error=why, finished=_time_of(self._folder))

    def _ended_by_slurm(self, entry: Entry) -> dict[str, Any]:
        """A job that Slurm has ended before any node wrote something."""
        finished = _time_of(self._folder)
        if self._is_stopped:
            return self._plain("STOPPED", entry, finished=finished)
        state = "STOPPED" if entry.state == "CANCELLED" else "FAILED"
        why = reasons.ENDED.get(entry.state, f"Slurm says {entry.state}")
        said = "" if state == "STOPPED" else self._folder.last_words
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
        entry = self._entry()
        if self._is_allocated:
            return self._of_step(life, found, entry)
        if entry is not None and entry.id == life.id and entry.restarts <= life.restarts and not entry.is_over:
            return self._closing(found) if found["state"] in records.FINAL else found
        if entry is not None and not entry.is_over:  # Slurm has requeued it, or another one goes on
            return self._again(found, entry)
        if entry is None and not self._is_known_gone(max(self._begun(life), self._asked_since())):
            return self._closing(found) if found["state"] in records.FINAL else found
        return self._lost(life, entry)

    def _of_step(self, life: Life, found: dict[str, Any], entry: Entry | None) -> dict[str, Any]:
        """A job in an allocation of its user, before its step has ended."""
        over = entry if entry is not None and entry.is_over else None
        if found["state"] in records.FINAL:
            is_late = time.time() > float(found["finished"]) + _CLOSING
            is_ours = found["state"] != "STOPPED" or self._is_stopped  # else it was stopped with Slurm's commands
            if is_ours or (is_late and over is None):
                return found
            return self._lost(life, over) if is_late else {**self._closing(found), "waiting": "its step ends"}
        is_gone = self._is_known_gone(self._begun(life)) if entry is None else entry.restarts > life.restarts
        return self._lost(life, over) if is_gone or over is not None else found

    def _after(self, life: Life, found: dict[str, Any], outcome: dict[str, Any]) -> dict[str, Any]:
        """A life that has ended, with what its batch script has decided."""
        follows = outcome.get("next")
        if follows:
            entry = self._entry()
            is_old = entry is not None and entry.id == life.id and entry.restarts <= life.restarts
            if entry is None and self._is_known_gone(max(float(outcome["time"]), self._asked_since())):
                return self._not_again(found, outcome, entry)
            if entry is not None and entry.is_over and (not is_old or self._queue.knows_since(float(outcome["time"]))):
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
        state = "STOPPED" if self._is_stopped or (entry is not None and entry.state == "CANCELLED") else "FAILED"
        then = reasons.ENDED.get(entry.state, entry.state) if entry is not None else "Slurm does not know it any more"
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
        word = entry.state if entry is not None else accounts.state_of(life.id, self._folder.of(life) / "sacct")
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
        ids = self._folder.ids
        if not ids:
            array, task = (self._job.get("task") or [self._job["job_id"], None])[:2]
            for entry in self._queue.of(array):  # its client was ended before it noted the number
                if task is not None and not entry.task.endswith(f"_{task}"):
                    continue
                with contextlib.suppress(OSError):
                    self._folder.add_id(entry.task or entry.id)
                ids.append(entry.task or entry.id)
        found = self._queue.entry(ids[-1]) if ids else None
        mine = (self._job.get("task") or [self._job["job_id"]])[0]
        return found if found is None or self._is_allocated or found.job_id == mine else None

    def _asked_since(self) -> float:
        """From when on Slurm's answers name its Slurm job."""
        if self._folder.ids:
            return _time_of(self._folder, self._folder.path / "ids")
        return float(self._job["created"]) + _SUBMITTING

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
            "ttl": None, "kept_since": finished if is_final else None, "grace": float(spec["grace"]),
            "command": _command(spec), "working_dir": str(self._job["node"]["working_dir"]), "folder": "", "code": None,
            "data": list(self._job["data"]), "tensorboard": None, "progress": None, "checkpoint": None,
        }  # fmt: skip


def merged_of(folder: JobFolder, life: Life, *, is_alive: bool) -> dict[str, Any] | None:
    """The record of the nodes of a life; None if none has written anything.

    Args:
        folder: of the job.
        life: of it.
        is_alive: whether the nodes may still work on it.
    """
    parts = []
    for run in folder.runs(life):
        part = records.record(run.path, list, lambda _: is_alive)
        if part is not None:
            parts.append(with_ids(run, part))
    return merged(parts)[0] if parts else None


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
    """When the last thing happened to a job."""
    times = [0.0]
    for each in (path,) if path is not None else (folder.path, folder.stop, folder.output):
        with contextlib.suppress(OSError):
            times.append(each.stat().st_mtime)
    return max(times)
