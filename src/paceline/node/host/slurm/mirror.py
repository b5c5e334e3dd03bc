"""Brings what the nodes of a job have written into the job's folder here, where they share no disk with this machine.

A step of srun on the job's nodes sends it (`sender.py`). While a client follows a job, one such step runs, for all
clients on this machine; else one is started when somebody looks, and what it brought is used for a while. How a job
ended is also in the comment of its Slurm job, which squeue shows.
"""

from __future__ import annotations

import contextlib
import shlex
import threading
import time
from typing import TYPE_CHECKING

from paceline.contract import ContractError
from paceline.contract.slurm import expand_hosts
from paceline.node.errors import Refused
from paceline.node.files import read_json, write_json

from . import reasons
from .commands import table
from .folder import Life
from .jobs import disk_time
from .queue import REFUSED, Queue, told_in
from .transfer import COMPLETE, SECONDS, Lifeline, alone, command, pull

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from .folder import JobFolder
    from .queue import Entry

FRESH = 10.0  # seconds for which what was brought is used
FRESH_LIST = 60.0  # the same in a list of all jobs
_NOW = 2.0  # the same for logs and events
_AT_ONCE = 8  # jobs that are looked at together
_PAUSES = (2.0, 4.0, 10.0)  # seconds between two tries to follow a job, as long as that fails
_LOOK = 0.5
_LEAST = 1.0  # seconds that a look at a job needs at least
_CLOSING = 45.0  # seconds in which the step that follows a job ends with it
AWAY = (
    "its checkpoints are on its nodes' own disks, so it does not go on from there; name a disk that all nodes see with"
    " --checkpoint-dir"
)
_LOOKED = "looked"  # a file in a job's folder: when its nodes were looked at, and why that failed


def _running(folder: JobFolder, queue: Queue) -> tuple[Entry, Life] | None:
    """The Slurm job that runs, and its life; None if none does."""
    entry = _entry(folder, queue)
    if entry is None or not entry.is_running or entry.state == "COMPLETING":
        return None
    return entry, Life(entry.id, entry.restarts)


def _entry(folder: JobFolder, queue: Queue) -> Entry | None:
    ids = folder.ids
    job = read_json(folder.job)
    if not ids or job is None or queue.elsewhere(job):
        return None
    return queue.entry(ids[-1], folder.identity(job))


def out_of_reach(folder: JobFolder, queue: Queue) -> str:
    """Why the nodes of a job cannot be asked from here, where they share no disk with it; "" if they can."""
    if not folder.is_broadcast() or not (elsewhere := queue.elsewhere(read_json(folder.job) or {})):
        return ""
    return f"its nodes do not see this disk, and {elsewhere}; go to a login node of its cluster"


# -- looks -------------------------------------------------------------------------------------------------------------


def refresh(folders: Iterable[JobFolder], queue: Queue, fresh: float = FRESH) -> None:
    """Bring what the nodes of those of these jobs have written that run, unless that was done just now.

    Jobs for which there is no time are left as they are.
    """
    threads = []
    gate, until = threading.Semaphore(_AT_ONCE), time.monotonic() + SECONDS
    for folder in folders:
        if folder.is_broadcast() and (found := _running(folder, queue)) is not None:
            life = found[1]
            look = folder.path / _LOOKED
            if folder.outcome(life) is None and _age(folder, look) > fresh:
                threads.append(threading.Thread(target=_look_at, args=(folder, found, gate, until), daemon=True))
                threads[-1].start()
    for thread in threads:
        thread.join()


def _look_at(folder: JobFolder, running: tuple[Entry, Life], gate: threading.Semaphore, until: float) -> None:
    entry, life = running
    with gate, alone(folder) as is_free, contextlib.suppress(Refused, OSError):
        if is_free and (left := until - time.monotonic()) > _LEAST:
            said = pull(folder, life, command(folder, life, "now", *_beside(entry)), seconds=left)
            (folder.path / _LOOKED).write_text(said)


def problem(folder: JobFolder) -> str:
    """Why the last look at a job's nodes failed, or ""."""
    with contextlib.suppress(OSError):
        if said := (folder.path / _LOOKED).read_text():
            return f"srun cannot fetch what its nodes have written: {said}"
    return ""


def _beside(entry: Entry) -> list[str]:
    count = [f"--nodes={entry.nodes}", f"--ntasks={entry.nodes}", "--ntasks-per-node=1"]
    return [f"--jobid={entry.id}", "--overlap", *count, "--job-name=paceline-mirror"]


def _age(folder: JobFolder, file: Path) -> float:
    """How long ago a file of a job was written, by the clock of the disk."""
    try:
        return abs(disk_time(folder.root) - file.stat().st_mtime)
    except OSError:
        return float("inf")


def absorb(folder: JobFolder, queue: Queue) -> None:
    """Write down how a life ended that Slurm has the word of, once nothing more comes from its nodes."""
    entry = _entry(folder, queue)
    if entry is None:
        return
    try:
        if entry.said.startswith(REFUSED):  # its batch script could not begin
            why = entry.said[len(REFUSED) :]
            outcome = {"next": None, "state": "FAILED", "exit_code": 1, "why": why, "time": time.time()}
            life = Life(entry.id, entry.restarts)
        else:
            outcome = told_in(entry.said)
            number, _, restarts = str(outcome["life"]).partition(".")
            life = Life(number, int(restarts))
    except (ValueError, KeyError):  # the site's own words
        return
    if folder.outcome(life) is not None or not (entry.is_over or life.restarts < entry.restarts or outcome.get("next")):
        return
    with alone(folder, queue.left(_CLOSING)) as is_free:
        if is_free and folder.outcome(life) is None:
            with contextlib.suppress(OSError):
                folder.of(life).mkdir(mode=0o700, parents=True, exist_ok=True)
                write_json(folder.of(life) / "outcome.json", outcome)


# -- following ---------------------------------------------------------------------------------------------------------


class Following:
    """Brings what the nodes of a job write as they write it, in a thread, until the block ends."""

    def __init__(self, root: Path, folder: JobFolder, is_wanted: bool = True) -> None:
        """Nothing runs yet; nothing ever does for a job whose nodes share the disk."""
        self._root, self._folder, self._lifeline = root, folder, Lifeline()
        self._is_needed = is_wanted and folder.is_broadcast()

    def __enter__(self) -> Following:
        if self._is_needed:
            threading.Thread(target=self._run, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._lifeline.cut()

    def _run(self) -> None:
        failures = 0
        while not self._lifeline.is_cut.wait(_LOOK):
            running = _running(self._folder, Queue(self._root))
            if running is None or self._folder.outcome(running[1]) is not None:
                continue
            with alone(self._folder) as is_free, contextlib.suppress(Refused, OSError):
                if not is_free:  # another client follows it
                    continue
                entry, life = running
                step = command(self._folder, life, "follow", *_beside(entry))
                failed = pull(self._folder, life, step, self._lifeline)
                failures = failures + 1 if failed else 0
            if failures:
                self._lifeline.is_cut.wait(_PAUSES[min(failures, len(_PAUSES)) - 1])


def how_to_go_on(folder: JobFolder) -> str:
    """What leads a job on that was ended from outside."""
    spec = folder.read()["spec"]
    if folder.is_broadcast() and spec["checkpoint_dir"] is None:
        return AWAY
    return f"paceline resubmit {folder.name} goes on from its last checkpoint"


def ended(folder: JobFolder, word: str) -> tuple[str, str | None]:
    """The state of a job that has ended, and why, from Slurm's word for it alone; "" if Slurm has none any more."""
    if word == "COMPLETED":
        return "SUCCEEDED", None
    if word == "CANCELLED":
        return "STOPPED", f"{reasons.ENDED[word]}, not by paceline"
    if not word:
        return "FAILED", f"Slurm does not know any more how it ended; what it wrote is on its nodes in {folder.path}"
    why = reasons.ENDED.get(word, f"Slurm says {word}")
    return "FAILED", why if word == "FAILED" else f"{why}; {how_to_go_on(folder)}"


# -- afterwards --------------------------------------------------------------------------------------------------------


def bring(folder: JobFolder, root: Path) -> str:
    """Bring all that the nodes of a job have written; returns why that is not all, or ""."""
    if not folder.is_broadcast():
        return ""
    queue = Queue(root)
    if why := out_of_reach(folder, queue):
        is_all = folder.lives and all((folder.of(life) / COMPLETE).exists() for life in folder.lives)
        return "" if is_all else f"job {folder.name} may have printed more: {why}"
    refresh([folder], queue, _NOW)
    absorb(folder, queue)
    return _fetch(folder, queue) or (problem(folder) if _running(folder, queue) else "")


def _fetch(folder: JobFolder, queue: Queue) -> str:
    """Bring what the nodes of lives still have that are over, by short jobs there; returns why not, or ""."""
    for life in _over(folder, queue):
        if (folder.of(life) / COMPLETE).exists():
            continue
        hosts = _hosts(folder, life, queue)
        path = shlex.quote(str(folder.of(life)))
        if not hosts:
            if folder.outcome(life) is None and life in folder.lives:
                return f"what job {folder.name} printed last is on its nodes in {path}; it is not known any more which"
            continue
        with alone(folder, queue.left(_CLOSING)) as is_free:
            if not is_free or (folder.of(life) / COMPLETE).exists():
                continue
            until = time.monotonic() + 2 * SECONDS
            for host in hosts:
                step = command(folder, life, "all" if host == hosts[0] else "others", *_short_job(folder, host))
                if failed := pull(folder, life, step, seconds=max(_LEAST, until - time.monotonic())):
                    return f"what job {folder.name} printed is on {host} in {path}, and was not fetched: {failed}"
            folder.of(life).mkdir(mode=0o700, parents=True, exist_ok=True)
            (folder.of(life) / COMPLETE).touch()
    return ""


def _over(folder: JobFolder, queue: Queue) -> list[Life]:
    """The lives that are over: those with an outcome, and those that Slurm has ended without one."""
    lives, entry = folder.lives, _entry(folder, queue)
    if entry is not None and entry.is_over and Life(entry.id, entry.restarts) not in lives:  # nobody has looked at it
        lives.append(Life(entry.id, entry.restarts))

    def is_over(life: Life) -> bool:
        if folder.outcome(life) is not None:
            return True
        if entry is None:  # Slurm has forgotten it, or does not list it yet
            return queue.knows_since(folder.of(life).stat().st_mtime)
        return entry.is_over or (entry.id, entry.restarts) != life

    return [life for life in lives if is_over(life)]


def _hosts(folder: JobFolder, life: Life, queue: Queue) -> list[str]:
    """The nodes that still have what a life has written, the first one first: at its end that one gathers all."""
    outcome, entry = folder.outcome(life), _entry(folder, queue)
    if outcome is not None:
        return [host for host in (outcome.get("host") or folder.node(life, 0),) if host]
    for run in folder.runs(life):
        if hosts := (read_json(run.spec) or {}).get("hosts"):
            return list(hosts)
    if entry is not None and (entry.id, entry.restarts) == life:
        with contextlib.suppress(Refused, ContractError):
            for row in table("squeue", f"--jobs={entry.id}", "--states=all", columns={"NodeList": 1024}):
                if row["NodeList"][:1].isalnum():  # else it has never had nodes
                    return expand_hosts(row["NodeList"])
    return []


PLACES = (
    "account", "constraint", "mcs-label", "partition", "qos", "reservation", "wckey",
)  # fmt: skip


def _short_job(folder: JobFolder, host: str) -> list[str]:
    given = [f"--{name}={value}" for name, value in places(folder).items()]
    return [
        f"--nodelist={host}",
        "--nodes=1",
        "--ntasks=1",
        "--immediate=20",
        "--time=5",
        "--job-name=paceline-fetch",
        *given,
    ]


def places(folder: JobFolder) -> dict[str, str]:
    """The options that say where in the cluster a short job runs on the nodes of a job."""
    stored = folder.read()
    given = {name: str(value) for name, value in stored["options"]["slurm"].items() if name in PLACES}
    if stored["spec"]["queue"] is not None:
        given["partition"] = stored["spec"]["queue"]
    return given
