"""Signals that ask a run to stop."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)


class KeepWorking:
    """The worker_init_fn of a rank that finishes its step when it is told to stop: its workers must not stop before.

    Schedulers send their signals to all processes of a job. Workers end when their rank tells them to, or is gone.
    """

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        """Called in the worker with its number."""
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        if self._then is not None:
            self._then(worker)


def die_by(number: int) -> None:
    """End this process by a signal, whatever handler Python has for it."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal(number, None)  # SIG_DFL
    os.kill(os.getpid(), number)
