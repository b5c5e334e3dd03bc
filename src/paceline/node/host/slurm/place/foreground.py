"""Follows a Slurm job for a client in the foreground: its output and events. The job ends with the client."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
from typing import TYPE_CHECKING

from paceline.node.errors import Refused
from paceline.node.host.protocol import next_order
from paceline.node.host.slurm.end import stop as stopping
from paceline.node.host.slurm.look import job_record
from paceline.node.host.slurm.look.queue import Queue
from paceline.node.host.slurm.look.scheduler import NEW
from paceline.node.journal.fold import ENDED_ON_NODES
from paceline.node.journal.state import FINAL
from paceline.node.logs.following import answer_of, shown_by, updates
from paceline.node.readers import Ended, Readers
from paceline.node.signals import PASSED_ON

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from paceline.contract.messages import JobAnswer
    from paceline.contract.nodejob import RankStreams
    from paceline.contract.records import JobRecord
    from paceline.node.host.slurm.job_folder import JobFolder
    from paceline.node.logs.following import Update
    from paceline.node.rundir.directory import RunDirectory
    from paceline.node.store.home import Home

_LOOK = 0.5  # seconds between two looks; the kernel does not report what other machines write
_LAST = 300.0  # seconds for which a job is stopped whose client is gone, while Slurm does not answer
_TRY, _LONGEST_TRY = 10.0, 60.0  # seconds for which Slurm is asked to stop a job, at first and at most
_AGAIN = 10.0  # seconds until it is asked again
_IDLE = ("PENDING", "RESTARTING", "SUSPENDED")  # without ranks, so that it is said why


def follow(
    home: Home, folder: JobFolder, rank_streams: RankStreams, close: Callable[[], object] = lambda: None
) -> Iterator[JobAnswer]:
    """The output and events of a job, and at last its record.

    Orders follow on stdin: `signal N` stops it, or reaches its ranks.

    The end of stdin stops it too: its client is gone.
    """
    has_ended = threading.Event()
    refused: queue.SimpleQueue[str] = queue.SimpleQueue()
    orders: queue.SimpleQueue[str] = queue.SimpleQueue()
    obeying = threading.Thread(target=_obey, args=(folder, orders, has_ended, refused), daemon=True)
    obeying.start()
    threading.Thread(target=_listen, args=(orders,), daemon=True).start()
    try:
        yield from _Following(home, folder, rank_streams, refused).answers()
    except GeneratorExit:  # nobody reads the answers any more, so stdin has ended, too
        obeying.join(_LAST)  # it stops the job
        raise
    has_ended.set()
    close()
    yield {"ended": job_record.record(folder, Queue(home.root))}
    yield {"end": True}


def _listen(orders: queue.SimpleQueue[str]) -> None:
    """Take the orders from stdin, while another thread may be busy with the one before; "" at its end."""
    while order := next_order():
        orders.put(order)
    orders.put("")


def _obey(
    folder: JobFolder, orders: queue.SimpleQueue[str], has_ended: threading.Event, refused: queue.SimpleQueue[str]
) -> None:
    """Stop the job as stdin says, unless it has ended; why that fails goes into `refused`, and it is tried again."""
    asked = owed = now = False
    number, patience = int(signal.SIGTERM), _TRY
    last = ""
    while True:
        with contextlib.suppress(queue.Empty):
            order = orders.get(timeout=_AGAIN if owed else None)
            if not order:
                break
            number = int(order.split()[-1])
            if number in PASSED_ON:
                folder.pass_on(number)
                continue
            now = now or asked or number == signal.SIGQUIT
            asked = owed = True
        if has_ended.is_set():
            owed = False
            continue
        try:
            stopping.stop(folder, now, number, patience)
            owed = False
        except (Refused, OSError) as error:
            why = error.why if isinstance(error, stopping.NotStopped) and error.tried else str(error)
            if why != last:
                refused.put(f"{why}; paceline tries again to stop the job")
            last, patience = why, min(2 * patience, _LONGEST_TRY)
            number = signal.SIGTERM  # if a SIGINT has arrived all the same, a second one would end the ranks at once
    if not has_ended.is_set():
        for now in (asked, True):  # one that is suspended can only be ended
            with contextlib.suppress(Refused, OSError):
                stopping.stop(folder, now, patience=_LAST)
                break
    os._exit(0)


class _Following:
    """The output and events of all nodes of a job."""

    def __init__(
        self, home: Home, folder: JobFolder, rank_streams: RankStreams, refused: queue.SimpleQueue[str]
    ) -> None:
        self._home, self._folder, self._rank_streams, self._refused = home, folder, rank_streams, refused
        self._readers: Readers[Path, Update] = Readers()
        self._followed: dict[Path, int] = {}  # run directory → what ends its reader; -1 once that was used
        self._waiting: str | None = None

    def answers(self) -> Iterator[JobAnswer]:
        """Until the job has ended: "enter" when a node has come, its updates with its name, "leave" after the last."""
        is_over = False
        while not is_over or self._readers.active:
            record = job_record.record(self._folder, Queue(self._home.root))
            is_over = is_over or record is None or record["state"] in FINAL
            yield from self._report_waiting(record)
            while not self._refused.empty():
                yield {"event": "note", "details": {"why": self._refused.get()}}
            yield from self._look(is_over)
            for path, update in self._readers.arrived(_LOOK):
                if not isinstance(update, Ended):
                    yield {**answer_of(update), "node": str(path)}
                elif update.error is None or isinstance(update.error, OSError):  # it was removed
                    yield {"leave": str(path)}
                else:
                    raise update.error

    def _report_waiting(self, record: JobRecord | None) -> Iterator[JobAnswer]:
        waiting = record["waiting"] if record and record["state"] in _IDLE else None
        if waiting in (None, ENDED_ON_NODES, NEW) or self._readers.active:
            return
        if waiting != self._waiting:
            self._waiting = waiting
            yield {"waiting": waiting}

    def _look(self, is_over: bool) -> Iterator[JobAnswer]:
        """Follow the nodes that have come, and no longer those that have ended."""
        for number, (start, runs) in enumerate(job_record.runs_of(self._folder)):
            has_ended = is_over or self._folder.outcome(start) is not None
            for run in runs:
                if run.path not in self._followed:
                    yield {"enter": str(run.path), "start": number}
                    lifeline, self._followed[run.path] = os.pipe()
                    self._readers.add(run.path, self._updates(run, lifeline))
                state = (run.read_status() or {}).get("state")
                if (has_ended or state in FINAL) and self._followed[run.path] >= 0:
                    os.close(self._followed[run.path])
                    self._followed[run.path] = -1

    def _updates(self, run: RunDirectory, lifeline: int) -> Iterator[Update]:
        try:
            yield from updates(run, lifeline, shown_by(self._rank_streams), poll=_LOOK)
        finally:
            os.close(lifeline)
