"""Loader workers of a rank that finishes its step when it is asked to stop."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from multiprocessing import resource_tracker
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

from paceline.contract import STOP_SIGNALS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class KeepWorking:
    """The worker_init_fn of a rank that finishes its step when it is asked to stop: its workers must not stop earlier.

    Schedulers send their signals to all processes of a job, so workers ignore them. But multiprocessing also sends
    SIGTERM to the workers that are left when the rank exits, and waits for them. So each worker watches a pipe, and
    ends as soon as the rank begins to exit or is gone.
    """

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then
        self._exit = _Exit.of_this_process()

    def __call__(self, worker: int) -> None:
        """Called in the worker with its number."""
        for number in STOP_SIGNALS:  # not SIG_IGN, which programs that a worker starts would inherit
            signal.signal(number, _ignore)
            signal.siginterrupt(number, False)
        self._exit.end_with_it()
        if self._then is not None:
            self._then(worker)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    @contextlib.contextmanager
    def starting(self, context: Any) -> Iterator[None]:
        """Around the start of workers: a signal reaches them only once they ignore it."""
        method = (context or multiprocessing).get_start_method()
        if method == "forkserver":
            yield
            return
        old = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            if method == "spawn":
                resource_tracker.ensure_running()  # keeps the signals blocked; starting it unblocks SIGTERM here
                signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old)


class _Exit:
    """Notifies the workers of a process that it exits: multiprocessing calls `_notify` before it sends them SIGTERM.

    If a process ends without Python's exit functions, its end of the pipe is closed, which has the same effect.
    """

    _of_this_process: _Exit | None = None

    @classmethod
    def of_this_process(cls) -> _Exit:
        """The only one; a forked child that has workers of its own makes another one."""
        if cls._of_this_process is None or cls._of_this_process._pid != os.getpid():
            cls._of_this_process = cls()
        return cls._of_this_process

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._reader, self._writer = multiprocessing.Pipe(duplex=False)
        Finalize(None, self._notify, exitpriority=100)  # not called in forked children

    def __getstate__(self) -> dict[str, object]:
        return {"_pid": self._pid, "_reader": self._reader}

    def _notify(self) -> None:
        with contextlib.suppress(OSError):
            self._writer.send_bytes(b"exit")  # it is never read, so all workers see it

    def end_with_it(self) -> None:
        """In a worker: end when the process exits, whatever the main thread is doing then."""
        if "_writer" in self.__dict__:  # inherited by fork; it would keep the pipe open when the process is gone
            self._writer.close()
        threading.Thread(target=self._wait, name="paceline-exit", daemon=True).start()

    def _wait(self) -> None:
        self._reader.poll(None)
        os._exit(0)  # as torch's workers do when they get SIGTERM from their parent


def _ignore(*_: object) -> None:
    """A handler that does nothing."""
