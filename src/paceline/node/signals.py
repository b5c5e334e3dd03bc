"""Signals: those that agents handle, and how they reach a process that waits for something else."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

EXIT_REPLACED = (
    128 + signal.SIGTERM
)  # the exit code of a node that another one replaces, as if a scheduler had ended it
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)  # to the ranks that handle them
LEAVE = signal.SIGRTMIN  # this node is to leave its job, which goes on
SUSPEND, RESUME = signal.SIGRTMIN + 1, signal.SIGRTMIN + 2  # the job is to give its devices back, or to go on
HANDLED = (
    signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, *PASSED_ON, LEAVE, SUSPEND, RESUME,
)  # fmt: skip


def call_on(signals: Collection[int], callback: Callable[[int], None]) -> None:
    """Call `callback` with the number of each of these signals that arrives from now on, in a thread of its own.

    A handler of Python runs in the main thread, between two instructions. If the signal arrives just before a system
    call that waits, the handler runs when that call returns, which may be never. The thread waits for signals alone.
    Call this from the main thread, once in a process. Signals that the parent process has blocked are unblocked.
    """
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    for number in signals:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)

    def listen() -> None:
        while True:
            for number in os.read(readable, 256):
                if number in signals:
                    callback(number)

    threading.Thread(target=listen, name="paceline: signals", daemon=True).start()
