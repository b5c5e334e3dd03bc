"""`elastic.run`, and commits that outlive the processes.

When a rank is lost, paceline starts all ranks again, so a commit is also written into the job's folder by the first
rank of each machine. After a restart all ranks take the newest one. Before machines join, or leave on request, paceline
asks the ranks to save with SIGUSR2: then the next commit raises HostsUpdatedInterrupt, and the processes end when the
state is saved.
"""

from __future__ import annotations

import functools
import logging
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from paceline.horovod.common.basics import init, is_initialized, local_rank, shutdown, size
from paceline.horovod.common.elastic import ObjectState, run_fn
from paceline.horovod.torch.functions import allgather_object, broadcast_object
from paceline.train.control.exit_report import Preempted, record
from paceline.train.loop.steps import run_folder

log = logging.getLogger("paceline")
T = TypeVar("T")
_runs = 0  # of this process that write their commits
_current: ObjectState | None = None  # the state of the run that began last


def run(func: Callable[..., T]) -> Callable[..., T]:
    """Call `func(state, …)` until it returns, on whichever ranks there are.

    After a HorovodInternalError the state is that of the last commit; after a HostsUpdatedInterrupt it is kept. Then
    the ranks join anew, the state of rank 0 is given to all, and `func` is called again. If the processes were started
    anew, as paceline does when one is lost, the state is that of the last commit, too; when machines come or go, it is
    the one with which HostsUpdatedInterrupt was raised. Reset callbacks are called in any of these cases.

    Args:
        func: trains; its first argument is a `State`.
    """
    begin = run_fn(func, _reset, _resume, _restart)

    @functools.wraps(func)
    def run_whole(state: Any, *args: Any, **kwargs: Any) -> T:
        try:
            return begin(state, *args, **kwargs)
        finally:
            vars(state).pop("save", None)  # what is saved from now on is no commit of this run

    return run_whole


def _reset() -> None:
    shutdown()
    init()


def _resume(state: Any) -> None:
    """Take the newest commit of an earlier attempt, and write those of this one.

    Each run of a script has a file of its own: another one begins with the state that it is given.
    """
    global _runs, _current  # noqa: PLW0603 - the process has one handler of signals, and counts its runs
    folder = run_folder()
    if folder is None or not isinstance(state, ObjectState):
        return
    if not is_initialized():
        init()
    _runs += 1
    file = folder / ("horovod-state.pickle" if _runs == 1 else f"horovod-state-{_runs}.pickle")
    count, saved = _read(file)
    counts = allgather_object(count)
    newest = max(range(size()), key=counts.__getitem__)
    count = counts[newest]
    if count:
        state._take_committed(broadcast_object(saved, newest))
        state.on_reset()  # there may be other ranks than those that have committed it
    save, is_writer = state.save, local_rank() == 0
    has_warned = False

    @functools.wraps(save)
    def save_and_write() -> None:
        nonlocal count, has_warned
        save()
        count += 1
        if not is_writer:
            return
        try:
            _write(file, count, state._committed())
        except OSError as error:  # the commit in memory is there
            if not has_warned:
                log.warning(
                    "commits cannot be written (%s); the training goes on, and each commit tries again: until then, "
                    "a new start of the ranks goes back to the last one that was written", error,
                )  # fmt: skip
            has_warned = True

    object.__setattr__(state, "save", save_and_write)
    _current = state
    _catch_signals()


def _restart(state: Any) -> None:
    """Save the state for the processes that go on."""
    state.save()
    why = "its machines change, or it was asked to stop"
    record("Preempted", f"saved its state for another start: {why}")
    raise Preempted


def _catch_signals() -> None:
    """Let SIGUSR2, with which paceline asks the ranks to save, raise HostsUpdatedInterrupt at the next commit."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL:
        signal.signal(signal.SIGUSR2, _ask_for_restart)


def _ask_for_restart(*_: object) -> None:
    assert _current is not None, "it is set before the handler"
    _current.on_restart(time.time())


def _read(file: Path) -> tuple[int, Any]:
    """The number of a commit and the state; 0 if there is none."""
    try:
        count, saved = pickle.loads(file.read_bytes())
    except FileNotFoundError:
        return 0, None
    return int(count), saved


def _write(file: Path, count: int, saved: Any) -> None:
    """Replace the file in one step: a killed rank leaves the old commit or the new one."""
    new = file.with_suffix(".new")
    try:
        with open(new, "wb") as out:
            pickle.dump((count, saved), out, protocol=5)
            out.flush()
            os.fsync(out.fileno())
        new.replace(file)
    except OSError:
        new.unlink(missing_ok=True)  # it takes what is left of the disk
        raise
