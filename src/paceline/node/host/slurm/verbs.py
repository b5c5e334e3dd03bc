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
from .jobs import Jobs
from .queue import Queue

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.node.store.home import Answer, Home, Request

    from .folder import JobFolder
    from .queue import Entry

_LOOK = 1.0  # seconds between two looks; the kernel does not report what other machines write
_ENDED = re.compile(r"invalid job id|already complet|invalid job step|step .*complet", re.IGNORECASE)
PATIENCE = 30.0  # seconds for which a stop is tried while Slurm does not answer
_AT_ONCE = 8  # jobs that are stopped at the same time: scancel takes 5 s for a task of an array that runs
_PAUSE, _LEAST = 2.0, 5.0  # seconds between two tries, and that a command may take at least


def slurm_describe(home: Home, request: Request) -> Answer:
    """The records of jobs, without those that ended before a time. Removes jobs whose time to live is over, or not."""
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
        has_expired = is_over and record["ttl"] is not None and now - (record["finished"] or now) >= record["ttl"]
        if has_expired and not request.get("keeps"):
            with contextlib.suppress(Refused):  # it is tried again at the next call
                jobs.remove(folder)
        elif not is_over or names is not None or record["finished"] >= since:
            found.append(record)
    problem = None if queue.problem is None else str(queue.problem)
    going = [record["name"] for record in found if record["state"] not in records.FINAL]
    elsewhere = {name: why for name in going if (why := _elsewhere(jobs, queue, name))}
    return {
        "jobs": found, "names": [folder.name for folder in folders], "problem": problem, "elsewhere": elsewhere,
    }  # fmt: skip


def _elsewhere(jobs: Jobs, queue: Queue, name: str) -> str:
    """Why Slurm is not asked for a job here; "" if it is."""
    folder = jobs.find(name)
    return queue.elsewhere(read_json(folder.job) or {}) if folder is not None else ""


def _refuse_elsewhere(folder: JobFolder, queue: Queue) -> None:
    """Refuse a job that goes on in another cluster.

    Raises:
        Refused: it does.
    """
    if elsewhere := queue.elsewhere(folder.read()):
        raise Refused(f"job {folder.name} cannot be reached: {elsewhere}; go to a login node of its cluster")


def slurm_spec(home: Home, request: Request) -> Answer:
    """What the user of a job asked for."""
    spec = Jobs(home.root).of(request["name"]).read()["spec"]
    options = {name: value for name, value in spec["options"].items() if name != "broadcast"}  # of earlier versions
    return {"spec": {**spec, "options": options}}


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
        Refused: Slurm does not answer, or one is of another cluster; then they go on.
    """
    jobs, queue = Jobs(home.root), Queue(home.root)
    folders = jobs.named(request["names"])
    found = [(folder, view.record(folder, queue)) for folder in folders]
    going = [(folder, it["state"]) for folder, it in found if it is not None and it["state"] not in records.FINAL]
    for folder, _ in going:
        _refuse_elsewhere(folder, queue)
    _stop_all(going, request["now"])
    return {"names": [folder.name for folder in folders]}


def _stop_all(going: list[tuple[JobFolder, str]], now: bool) -> None:
    """Stop jobs, each with its state.

    Raises:
        Refused: Slurm does not answer, or does not stop one.
    """
    slurm, asked = _Tries(PATIENCE), 0
    waiting = [folder for folder, state in going if state == "PENDING"]
    others = [folder for folder, state in going if state != "PENDING"]
    try:
        for folder in waiting:  # first, lest they start in the place of others
            _stop(folder, slurm, now)
            asked += 1
        if len(others) < 2:
            for folder in others:
                _stop(folder, slurm, now)
            return
        from concurrent.futures import ThreadPoolExecutor  # takes long to import

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for done in [pool.submit(_stop, folder, slurm, now) for folder in others]:
                done.result()
                asked += 1
    except Refused as error:
        if not asked:
            raise
        said = f"{asked} of {len(going)} jobs or more were asked to stop, the others go on"
        raise Refused(str(error).replace("nothing was stopped", said)) from None


def stop(folder: JobFolder, now: bool, number: int = signal.SIGTERM, patience: float = PATIENCE) -> None:
    """Ask a job to stop, by this signal unless it is to be at once; one that waits leaves the queue.

    Args:
        folder: the job's.
        now: at once.
        number: of the signal.
        patience: seconds for which it is tried while Slurm does not answer.

    Raises:
        Refused: Slurm does not answer, or the job cannot be asked now.
    """
    _stop(folder, _Tries(patience), now, number)


def _stop(folder: JobFolder, slurm: _Tries, now: bool, number: int = signal.SIGTERM) -> None:
    was_asked = folder.is_stopped
    folder.stop.touch()
    try:
        is_allocated = folder.read().get("allocation") is not None
        if is_allocated:  # the Slurm job is its user's, and goes on
            for step in filter(None, map(folder.step, folder.lives)):
                slurm.cancel(*([] if now else [f"--signal={int(number)}"]), step)
        for entry in slurm.jobs(folder) if not is_allocated else ():
            if now:
                slurm.cancel(entry.number)
                slurm.left_queue(entry)
                continue
            if entry.state == "SUSPENDED":  # scancel would try for ever
                raise Refused(
                    f"job {folder.name} is suspended in Slurm, so it cannot save; end it with paceline stop --now"
                    f" {folder.name}, or stop it after: scontrol resume {entry.number}"
                )
            if not entry.task:
                slurm.cancel("--state=PENDING", entry.number)
                slurm.left_queue(entry)
            elif entry.is_pending:  # with a state, scancel takes all tasks of the array that wait
                slurm.cancel(entry.number)
                slurm.left_queue(entry)
                continue
            slurm.cancel(f"--signal={int(number)}", entry.number)
        if not now:  # agents look at it from time to time: Slurm may lose the signal on its way
            folder.stop.write_text(f"{int(number)}\n")
    except Refused:
        if not was_asked:
            folder.stop.unlink(missing_ok=True)
        raise


def cancel(number: str, patience: float = PATIENCE) -> None:
    """Cancel a Slurm job at once, all of it if it is an array.

    Args:
        number: of the job.
        patience: seconds for which it is tried while Slurm does not answer.

    Raises:
        Refused: Slurm does not answer.
    """
    _Tries(patience).cancel(number)


class _Tries:
    """Slurm's commands, tried again while it does not answer, for so many seconds since it has answered."""

    def __init__(self, patience: float) -> None:
        self._patience, self._until = patience, time.monotonic() + patience
        self._queue: Queue | None = None

    def jobs(self, folder: JobFolder) -> list[Entry]:
        """The Slurm job of a job, if it has not ended: one that is known to be its own, and not just of its number.

        Raises:
            Refused: Slurm does not answer.
        """
        found = self._found(folder, self._queue) if self._queue is not None else []
        if found and not any(entry.task and entry.is_pending for entry in found):  # which may run by now
            return found
        while True:
            queue = Queue(folder.root, 0.0, self._left)
            found = self._found(folder, queue)
            if queue.problem is None:
                self._answered()
                self._queue = queue  # which has other jobs, too
                return found
            self._pause(queue.problem)

    def _found(self, folder: JobFolder, queue: Queue) -> list[Entry]:
        job = folder.read()
        mine, numbers = folder.identity(job), folder.ids[-1:]
        if numbers:
            found = [entry for number in numbers if (entry := queue.entry(number, mine)) is not None]
        else:
            found = [entry for entry in queue.of(mine) if not entry.task or entry.task.endswith(f"_{job['task'][1]}")]
        return [entry for entry in found if not entry.is_over]

    def cancel(self, *args: str) -> None:
        """Call scancel.

        Raises:
            Refused: Slurm does not do it, or does not answer.
        """
        while True:
            try:
                call("scancel", "--quiet", *args, seconds=self._left)
                self._answered()
                return
            except Rejected as error:
                self._answered()
                if error.said and not _ENDED.search(error.said):  # it is quiet about jobs that have ended
                    raise Refused(f"{error}; nothing was stopped") from None
                return  # it has ended, or has no step
            except Away as error:
                self._pause(error)

    def left_queue(self, entry: Entry) -> None:
        """Let all clients ask Slurm anew if a job has waited until now: nothing else says that it waits no longer."""
        if entry.is_pending and self._queue is not None:
            self._queue.forget()

    def _answered(self) -> None:
        self._until = time.monotonic() + self._patience

    @property
    def _left(self) -> float:
        return max(_LEAST, self._until - time.monotonic())

    def _pause(self, error: Refused) -> None:
        """Wait before the next try.

        Raises:
            Refused: there is none.
        """
        if time.monotonic() + _PAUSE > self._until:
            raise Refused(f"{error}; it was tried for {self._patience:g} s, nothing was stopped, try again") from None
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
            _refuse_elsewhere(folder, queue)
            raise Refused(f"job {folder.name} has not ended; stop it first: paceline stop {folder.name}")
        if users := _users(jobs, folder):
            raise Refused(
                f"job {users[0]} keeps its checkpoints in the folder of job {folder.name}; delete {users[0]} first"
            )
    for folder in folders:
        jobs.remove(folder)
    return {"names": [folder.name for folder in folders]}


def slurm_contents(home: Home, request: Request) -> Answer:
    """What the removal of jobs would remove on the disk of this machine."""
    from paceline.node.store.contents import contents_of

    return {"contents": {folder.name: contents_of([folder.path]) for folder in Jobs(home.root).named(request["names"])}}


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
                queue = Queue(home.root)
                record = view.record(folder, queue)
                has_ended = record is None or record["state"] in records.FINAL
                is_over = has_ended or folder.outcome(life) is not None
                if record is not None and not is_over:
                    _refuse_elsewhere(folder, queue)
                    if status.get("state") in records.FINAL or view.is_requeued(folder, life, queue):
                        raise Refused(f"job {folder.name} does not run now: {record['waiting'] or view.STARTING}")
                node = folder.node(life, status.get("node_rank") or 0) or status["agent"]["host"]
                return {"run": str(run.path), "id": life.id, "node": node, "is_over": is_over}
    raise Refused(f"job {folder.name} has no rank {request['rank']} that has started")
