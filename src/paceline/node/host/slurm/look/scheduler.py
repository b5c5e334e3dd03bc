"""What Slurm reports of a job: squeue first, then the accounts, and what the batch script has decided at its end."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, NamedTuple

from paceline.node.errors import Refused
from paceline.node.host.slurm.call import call, has
from paceline.node.host.slurm.job_folders import disk_time
from paceline.node.journal.fold import Scheduler
from paceline.node.journal.records import until_resumed
from paceline.node.journal.state import FINAL
from paceline.node.store import records

from . import reasons

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.contract.records import FinalState, JobRecord, SlurmOutcome
    from paceline.node.host.slurm.job_folder import JobFolder, SlurmJob, Start

    from .queue import Entry, Queue

REQUEUE, CHAIN = "requeue", "chain"  # what the batch script does next, see `end/finish.py`
_SHORTLY = 5.0  # seconds in which a node that was started writes something
_CLOSING = 30.0  # seconds in which the process that waits for a step says how it ended
_SUBMITTING = 600.0  # seconds that a client may take to submit: it tries again while Slurm does not answer
_SACCT = 10.0  # seconds that sacct may take
_AGAIN = 60.0  # seconds until sacct is asked again for a job that it did not know, or when it failed
NEW = "Slurm has just got it"
STARTING = "its nodes start"
_SUSPENDED = "Slurm has suspended it (Slurm: SUSPENDED)"
_REQUEUED = "Slurm has requeued it"
# Slurm's reasons where a node cannot open the output file of a batch script.
_NOT_OPENED = ("JobLaunchFailure", "RaisedSignal:53")


class Reported:
    """A job, and its newest Slurm job."""

    def __init__(self, folder: JobFolder, job: SlurmJob, queue: Queue) -> None:
        """Ask nothing yet."""
        self._folder, self._job, self._queue = folder, job, queue
        self._is_stopped = folder.is_stopped
        self._is_allocated = job.allocation is not None  # its Slurm job is its user's, and does not end with it

    def entry(self) -> Entry | None:
        """The Slurm job; None if Slurm does not list it."""
        mine, ids = self._folder.identity(self._job), self._folder.ids
        if not ids:
            task = None if self._job.task is None else self._job.task[1]
            for entry in self._queue.of(mine):  # its client was ended before it noted the number
                if task is not None and not entry.task.endswith(f"_{task}"):
                    continue
                with contextlib.suppress(OSError):
                    self._folder.add_id(entry.number)
                ids.append(entry.number)
        return self._queue.entry(ids[-1], None if self._is_allocated else mine) if ids else None

    # -- before a node has written something ---------------------------------------------------------------------------

    def unstarted(self) -> Scheduler:
        """The report if no node has written anything yet."""
        outcomes = map(self._folder.outcome, self._folder.starts)
        if self._is_allocated and (outcome := next(filter(None, outcomes), None)) is not None:
            result: FinalState = "STOPPED" if self._is_stopped else outcome.get("state") or "FAILED"
            return Scheduler("ended", outcome.get("why"), result, _code(result), float(outcome["time"]))
        entry = self.entry()
        if entry is None:
            return self._never_listed() if self._is_known_gone(self._asked_since()) else Scheduler("queued", NEW)
        if entry.is_pending and self._folder.is_suspended:
            return self._held()
        if entry.is_pending:
            is_new = entry.reason in ("", "None")
            return Scheduler("queued", NEW if is_new else reasons.waiting(entry.reason, entry.id, entry.start))
        if entry.is_running:
            return Scheduler("running", STARTING)
        end = End(entry.state, entry.end)
        _keep(end, self._folder.accounted(self._folder.ids[-1]))
        return self._never_started(end, entry)

    def _never_listed(self) -> Scheduler:
        """Slurm does not list the job any more, and no node has written anything."""
        if self._is_stopped:
            return Scheduler("ended", result="STOPPED", finished=self._last_change())
        if not self._folder.ids:
            why = "Slurm never got it: the command that submitted it was ended; submit it again"
        elif (end := self._accounted()).word:
            return self._never_started(end)
        else:
            why = self._folder.last_words or "Slurm does not know it any more, and no node has started it"
        return Scheduler("ended", why, "FAILED", 1, self._last_change())

    def _never_started(self, end: End, entry: Entry | None = None) -> Scheduler:
        """Slurm has ended the job before any node wrote something."""
        word, finished = end.word, end.time or self._last_change()
        ended = reasons.ended(word)._replace(finished=finished)
        if self._is_stopped:
            return Scheduler("ended", result="STOPPED", finished=finished)
        if ended.result == "SUCCEEDED":
            return ended._replace(exit_code=0)
        printed = "" if ended.result == "STOPPED" else self._folder.last_words
        why = f"{ended.reason} before it started{f': {printed}' if printed else ''}"
        if entry is not None and word == "FAILED" and not printed and entry.reason.startswith(_NOT_OPENED):
            why = f"{entry.host or 'its first node'} could not start its batch script; most likely"
            why = f"{why} {self._folder.unseen_by(['it'])}; paceline check --on the target tries that"
        return ended._replace(reason=why, exit_code=_code(ended.result))

    # -- once a node has written something -----------------------------------------------------------------------------

    def started(self, start: Start, seen: JobRecord) -> Scheduler | None:
        """The report of a job that has started; None if Slurm says nothing that the nodes do not know better."""
        outcome = self._folder.outcome(start)
        if outcome is not None:
            return self._decided(start, outcome)
        if seen["state"] == "SUCCEEDED":
            return None
        over = seen["state"] in FINAL
        entry = self.entry()
        if self._is_allocated:
            return self._of_step(start, seen, entry)
        if entry is not None and entry.id == start.id and entry.restarts <= start.restarts and not entry.is_over:
            return Scheduler("suspended", _SUSPENDED) if entry.state == "SUSPENDED" else Scheduler("running")
        if entry is not None and not entry.is_over:  # Slurm has requeued it, or another one goes on
            return self._again(entry)
        if entry is None and not self._is_known_gone(max(self._begun(start), self._asked_since())):
            return Scheduler("running") if over else None
        return self._gone(start, entry)

    def _of_step(self, start: Start, seen: JobRecord, entry: Entry | None) -> Scheduler | None:
        """The report of a job in an allocation of its user, before its step has ended."""
        over = entry if entry is not None and entry.is_over else None
        if seen["state"] in FINAL:
            is_late = self._is_silent(start)
            is_ours = seen["state"] != "STOPPED" or self._is_stopped  # else it was stopped with Slurm's commands
            if is_ours or (is_late and over is None):
                return None
            return self._gone(start, over) if is_late else Scheduler("running", "its step ends")
        is_gone = self._is_known_gone(self._begun(start)) if entry is None else entry.restarts > start.restarts
        return self._gone(start, over) if is_gone or over is not None else None

    def _is_silent(self, start: Start) -> bool:
        """Whether its nodes have written nothing for so long that its batch script says nothing any more."""
        last = max((_time(run.status) for run in self._folder.runs(start)), default=0.0)
        return disk_time(self._folder.root) > last + _CLOSING

    def _decided(self, start: Start, outcome: SlurmOutcome) -> Scheduler:
        """The report of a start that has ended, with what its batch script has decided."""
        moment = float(outcome["time"])
        if not outcome.get("next"):
            code, cause = outcome.get("exit_code"), outcome.get("cause")
            return Scheduler("ended", outcome.get("why"), outcome.get("state"), code, moment, cause)
        why = str(outcome["why"])
        entry, decided = self.entry(), _time(self._folder.of(start) / "outcome.json")
        is_old = entry is not None and entry.id == start.id and entry.restarts <= start.restarts
        if entry is None and not self._is_known_gone(max(decided, self._asked_since())):
            return Scheduler("restarting", why)
        if entry is not None and (not entry.is_over or (is_old and not self._queue.knows_since(decided))):
            return self._again(None if is_old else entry, why)
        word, finished = End(entry.state, entry.end) if entry is not None else self._accounted()
        if self._is_stopped:
            stopped = max(moment, _time(self._folder.stop))
            return Scheduler("ended", result="STOPPED", finished=finished or stopped, was_to_go_on=True)
        then = reasons.ENDED.get(word, word) or "Slurm does not know it any more"
        result: FinalState = "STOPPED" if word == "CANCELLED" else "FAILED"
        return Scheduler("ended", f"{why}, then {then}", result, finished=finished or moment, was_to_go_on=True)

    def _again(self, entry: Entry | None, why: str = _REQUEUED) -> Scheduler:
        """The report of a job that Slurm starts again."""
        if entry is not None and entry.is_pending and self._folder.is_suspended:
            return self._held()
        if entry is not None and entry.is_pending:
            why = f"{why}; {reasons.waiting(entry.reason, entry.id, entry.start)}"
        return Scheduler("restarting", why)

    def _held(self) -> Scheduler:
        return Scheduler("held", until_resumed(self._folder.name))

    def _gone(self, start: Start, entry: Entry | None) -> Scheduler:
        """The report of a start that ended, and whose batch script could not say anything."""
        kept = self._folder.accounted(str(start))
        if entry is not None:
            _keep(End(entry.state, entry.end), kept)
        word, finished = end_of(start.id, kept, self._queue.remaining)
        if self._is_stopped:
            return Scheduler("ended", result="STOPPED", finished=finished)
        if word in ("", "FAILED") or (word == "COMPLETED" and self._is_allocated):
            return Scheduler("ended", finished=finished)
        ended = reasons.ended(word)._replace(finished=finished)
        if ended.result == "SUCCEEDED":
            return ended._replace(exit_code=0)
        if ended.result == "STOPPED":
            return ended._replace(reason=f"{ended.reason}, not by paceline")
        return ended._replace(reason=f"{ended.reason}; {again(self._folder)}")

    # -- times ---------------------------------------------------------------------------------------------------------

    def _asked_since(self) -> float:
        """From when on Slurm's answers name its Slurm job, by the clock of the disk."""
        if self._folder.ids:
            return _time(self._folder.path / "ids")
        return _time(self._folder.job) + _SUBMITTING

    def _accounted(self) -> End:
        """How its newest Slurm job has ended by Slurm's"""
        ids = self._folder.ids
        asked = self._folder.accounted(ids[-1]) if ids else None
        return End("") if asked is None else end_of(ids[-1], asked, self._queue.remaining)

    def _is_known_gone(self, since: float) -> bool:
        """Whether Slurm has said later than this that it does not know its Slurm job."""
        mine, number = self._folder.identity(self._job), next(reversed(self._folder.ids), None)
        return self._queue.has_lost(mine, number, since, is_shared=self._is_allocated)

    def _begun(self, start: Start) -> float:
        return _time(self._folder.of(start)) + _SHORTLY

    def _last_change(self) -> float:
        """When the last thing happened to the job, by the clock of the disk."""
        return max(map(_time, (self._folder.path, self._folder.stop, self._folder.output)))


def again(folder: JobFolder) -> str:
    """What starts a job again that ended before its time, and from where it goes on then."""
    runs = (run for start in folder.starts for run in folder.runs(start))
    return records.again(folder.name, any(map(records.has_checkpoint, runs)))


def _code(result: str | None) -> int | None:
    """The exit code of a job of which no node has written anything."""
    return 1 if result == "FAILED" else None


def _time(path: Path) -> float:
    """When a file was written; 0 if it is not there."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


# -- where the cluster keeps accounts ----------------------------------------------------------------------------------


class _Silence:
    """After sacct has failed it is not asked for other jobs before this time."""

    until = 0.0


class End(NamedTuple):
    """How a Slurm job has ended."""

    word: str  # Slurm's for the state; "" if it is not known
    time: float | None = None  # in seconds since the epoch; None if it is not known


def end_of(number: str, kept: Path, seconds: float = _SACCT) -> End:
    """How a job has ended; `kept` has the answer: sacct is asked once, and once in a minute while it has none."""
    with contextlib.suppress(OSError):
        end = _read_end(kept)
        if end.word or disk_time(kept.parent) < kept.stat().st_mtime + _AGAIN:
            return end
    end = _accounted(number, min(seconds, _SACCT))
    with contextlib.suppress(OSError):
        _write_end(end, kept)
    return end


def _keep(end: End, kept: Path) -> None:
    """Note what squeue says of a job that has ended: Slurm forgets it, and there may be no accounts."""
    with contextlib.suppress(OSError):
        if not kept.exists() or _read_end(kept) != end:
            _write_end(end, kept)


def _read_end(kept: Path) -> End:
    word, _, when = kept.read_text().strip().partition(" ")
    return End(word, float(when) if when.isdecimal() else None)


def _write_end(end: End, kept: Path) -> None:
    kept.write_text(end.word if end.time is None else f"{end.word} {end.time:.0f}")
    kept.touch()  # also if there is nothing in it


def _accounted(number: str, seconds: float) -> End:
    if not has("sacct") or time.monotonic() < _Silence.until:
        return End("")
    try:
        output = call("sacct", "-n", "-X", "-P", "-o", "State,End", "-j", number, seconds=seconds)
    except Refused:  # there are no accounts, or it may answer the next time
        _Silence.until = time.monotonic() + _AGAIN
        return End("")
    state, _, end = output.partition("\n")[0].partition("|")
    word = state.partition(" ")[0]  # of "CANCELLED by 1000"
    return End(word, float(end) if end.isdecimal() else None) if word in reasons.ENDED else End("")  # it may be late
