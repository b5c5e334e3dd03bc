"""Stops jobs: those that run are asked to save and to end, others leave the queue. Removes those that have ended."""

from __future__ import annotations

import re
import signal
import time
from typing import TYPE_CHECKING

from paceline.node.errors import Refused
from paceline.node.host.slurm.call import Away, Rejected, call
from paceline.node.host.slurm.job_folder import HELD
from paceline.node.host.slurm.job_folders import Jobs
from paceline.node.host.slurm.look import job_record
from paceline.node.host.slurm.look.queue import Queue
from paceline.node.host.slurm.look.scheduler import Reported
from paceline.node.journal.state import FINAL
from paceline.node.readers import at_once
from paceline.node.spec import HOLD

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.contract.messages import Named, OfJobs, Stop, Suspend
    from paceline.node.host.slurm.job_folder import JobFolder
    from paceline.node.host.slurm.look.queue import Entry
    from paceline.node.store.home import Home

_ENDED = re.compile(r"invalid job id|already complet|invalid job step|step .*complet", re.IGNORECASE)
PATIENCE = 30.0  # seconds for which a stop is tried while Slurm does not answer
_AT_ONCE = 8  # jobs that are stopped at the same time: scancel takes 5 s for a task of an array that runs
_PAUSE, _LEAST = 2.0, 5.0  # seconds between two tries, and that a command may take at least


class NotStopped(Refused):
    """A job was not asked to stop: why, what to do, and for how many seconds a Slurm was asked that did not answer."""

    def __init__(self, why: str, do: str = "", tried: float = 0.0, then: str = "nothing was stopped") -> None:
        super().__init__("; ".join(filter(None, (why, f"it was tried for {tried:g} s" if tried else "", then, do))))
        self.why, self.do, self.tried = why, do, tried


def slurm_stop(home: Home, request: Stop) -> Named:
    """Stop jobs: those that run are asked to save and to end, unless it is to be at once; others leave the queue."""
    jobs, queue = Jobs(home.root), Queue(home.root)
    folders = jobs.named(request["names"])
    found = [(folder, job_record.record(folder, queue)) for folder in folders]
    going = [(folder, it["state"]) for folder, it in found if it is not None and it["state"] not in FINAL]
    _stop_all(going, request["now"])
    return {"names": [folder.name for folder in folders]}


def slurm_suspend(home: Home, request: Suspend) -> Named:
    """Have jobs save and give their nodes back, or go on; Slurm holds them until then."""
    jobs, queue = Jobs(home.root), Queue(home.root)
    folders = jobs.named(request["names"])
    found = [(folder, job_record.record(folder, queue)) for folder in folders]
    going = [folder for folder, it in found if it is not None and it["state"] not in FINAL]
    slurm = _Tries(PATIENCE)
    if request["resumes"]:
        for folder in [it for it in going if it.is_suspended]:
            _resume(folder, slurm)
    else:
        entries = {folder: _held_by(folder, slurm) for folder in going if not folder.is_suspended}
        for folder, entry in entries.items():
            _suspend(folder, entry, slurm)
    return {"names": [folder.name for folder in folders]}


def _held_by(folder: JobFolder, slurm: _Tries) -> Entry:
    """The Slurm job of a job that Slurm can hold."""
    name, stop = folder.name, f"paceline stop {folder.name}"
    if folder.read().allocation is not None:
        raise Refused(f"job {name} runs in an allocation, which is not paceline's to give back; end it with {stop}")
    entry = slurm.entry(folder)
    if entry is None:
        raise Refused(f"Slurm does not list job {name} any more; see paceline get {name}")
    _refuse_suspended(name, entry)
    if not entry.is_pending and "Requeue=0" in slurm.call("scontrol", "show", "job", entry.number):
        raise Refused(
            f"job {name} may not be requeued in Slurm, so it cannot keep its place; {stop} saves and ends it, and "
            f"paceline resubmit {name} goes on"
        )
    return entry


def _suspend(folder: JobFolder, entry: Entry, slurm: _Tries) -> None:
    """Ask a job to save and end, and have Slurm hold it; one that waits is held at once."""
    folder.suspended.write_text(HOLD)
    try:
        if entry.is_pending:
            slurm.call("scontrol", "uhold", entry.number)  # also if its user is an administrator
            folder.suspended.write_text(HELD)
            slurm.forget()
        else:
            _cancel(folder.name, entry, slurm, int(signal.SIGTERM))
    except Refused:
        folder.suspended.unlink(missing_ok=True)
        raise


def _resume(folder: JobFolder, slurm: _Tries) -> None:
    """Have Slurm start a job that it holds; one that is still ending is requeued without being held."""
    folder.suspended.write_text("")
    until = time.monotonic() + PATIENCE
    while (entry := slurm.entry(folder)) is not None and not entry.is_pending and time.monotonic() < until:
        slurm.forget()
        time.sleep(_PAUSE)  # its batch script may be about to have it held
    if entry is not None and entry.is_pending:
        slurm.call("scontrol", "release", entry.number)
        folder.suspended.unlink(missing_ok=True)
        slurm.forget()


def slurm_delete(home: Home, request: OfJobs) -> Named:
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
        stored = other.find()
        where = stored and stored.node.checkpoint_dir
        if other.name != folder.name and f"{where}/".startswith(f"{folder.path}/"):
            found.append(other.name)
    return found


def _stop_all(going: Sequence[tuple[JobFolder, str]], now: bool) -> None:
    """Stop jobs, each with its state."""
    slurm = _Tries(PATIENCE)
    asked: list[str] = []
    problems: list[NotStopped] = []

    def ask(folder: JobFolder) -> None:
        if any(problem.tried for problem in problems):  # Slurm does not answer
            return
        try:
            _stop(folder, slurm, now)
            asked.append(folder.name)
        except NotStopped as error:
            problems.append(error)
        except Refused as error:
            problems.append(NotStopped(str(error)))

    for folder, state in going:
        if state == "PENDING":  # first, lest they start in the place of others
            ask(folder)
    at_once(ask, [folder for folder, state in going if state != "PENDING"], _AT_ONCE)
    if problems and asked:
        then = f"asked to stop: {len(asked)} of {len(going)} jobs, the others go on"
        raise NotStopped(problems[0].why, problems[0].do, problems[0].tried, then)
    if problems:
        raise problems[0]


def stop(folder: JobFolder, now: bool, number: int = signal.SIGTERM, patience: float = PATIENCE) -> None:
    """Ask a job to stop, by this signal unless it is to be at once; one that waits leaves the queue."""
    _stop(folder, _Tries(patience), now, number)


def _stop(folder: JobFolder, slurm: _Tries, now: bool, number: int = signal.SIGTERM) -> None:
    was_asked = folder.is_stopped
    folder.stop.touch()
    try:
        if folder.read().allocation is not None:  # the Slurm job is its user's, and goes on
            for step in filter(None, map(folder.step, folder.starts)):
                slurm.cancel(*([] if now else [f"--signal={int(number)}"]), step)
        elif (entry := slurm.entry(folder)) is not None:
            _cancel(folder.name, entry, slurm, None if now else int(number))
        if not now:  # agents look at it from time to time: Slurm may lose the signal on its way
            folder.stop.write_text(f"{int(number)}\n")
    except Refused:
        if not was_asked:
            folder.stop.unlink(missing_ok=True)
        raise


def _cancel(name: str, entry: Entry, slurm: _Tries, number: int | None) -> None:
    """Send a signal to a Slurm job that runs; one that waits, or without a signal each, is cancelled."""
    if number is not None:
        _refuse_suspended(name, entry)
    is_waiting_task = bool(entry.task) and entry.is_pending
    if number is None or is_waiting_task:
        slurm.cancel(entry.number)
    elif not entry.task:  # with a state, scancel takes all tasks of an array that wait
        slurm.cancel("--state=PENDING", entry.number)
    if entry.is_pending:
        slurm.forget()
    if number is not None and not is_waiting_task:
        slurm.cancel(f"--signal={number}", entry.number)


def _refuse_suspended(name: str, entry: Entry) -> None:
    """Refuse a job to which scancel would try to send a signal for ever."""
    if entry.state == "SUSPENDED":
        raise NotStopped(
            f"job {name} is suspended in Slurm, so it cannot save",
            f"end it with paceline stop --now {name}, or let it go on first: scontrol resume {entry.number}",
        )


def cancel(number: str, patience: float = PATIENCE) -> None:
    """Cancel a Slurm job at once, all of it if it is an array."""
    _Tries(patience).cancel(number)


class _Tries:
    """Slurm's commands, tried again while it does not answer, for so many seconds since it has answered."""

    def __init__(self, patience: float) -> None:
        self._patience, self._until = patience, time.monotonic() + patience
        self._queue: Queue | None = None

    def entry(self, folder: JobFolder) -> Entry | None:
        """The Slurm job of a job, if it has not ended: one that is known to be its own, and not just of its number."""
        found = _entry(folder, self._queue) if self._queue is not None else None
        if found is not None and not (found.task and found.is_pending):  # which may run by now
            return found
        while True:
            queue = Queue(folder.root, 0.0, self._remaining)
            found = _entry(folder, queue)
            if queue.problem is None:
                self._answered()
                self._queue = queue  # which has other jobs, too
                return found
            self._pause(queue.problem)

    def cancel(self, *args: str) -> None:
        """Call scancel."""
        try:
            self.call("scancel", "--quiet", *args)
        except Rejected as error:
            if error.output and not _ENDED.search(error.output):  # it is quiet about jobs that have ended
                raise NotStopped(str(error)) from None

    def call(self, *command: str) -> str:
        """What a command of Slurm prints."""
        while True:
            try:
                printed = call(*command, seconds=self._remaining)
                self._answered()
                return printed
            except Rejected:
                self._answered()
                raise
            except Away as error:
                self._pause(error)

    def forget(self) -> None:
        """Let all clients ask Slurm anew: nothing else says that a job waits no longer."""
        if self._queue is not None:
            self._queue.forget()

    def _answered(self) -> None:
        self._until = time.monotonic() + self._patience

    @property
    def _remaining(self) -> float:
        return max(_LEAST, self._until - time.monotonic())

    def _pause(self, error: Refused) -> None:
        """Wait before the next try."""
        if time.monotonic() + _PAUSE > self._until:
            raise NotStopped(str(error), "try again", self._patience) from None
        time.sleep(_PAUSE)  # nothing says when the controller is back


def _entry(folder: JobFolder, queue: Queue) -> Entry | None:
    entry = Reported(folder, folder.read(), queue).entry()
    return None if entry is None or entry.is_over else entry
