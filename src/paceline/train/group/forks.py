"""What happens to a rank's connections to the others in processes that it forks."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from typing import Protocol

from paceline.contract import STOP_SIGNALS


class Forgets(Protocol):
    """What belongs to the rank alone."""

    def forget(self) -> None:
        """In a child, which is no rank: release what belongs to the rank."""


_all: weakref.WeakSet[Forgets] = weakref.WeakSet()
_mask = threading.local()  # the signals that a thread had blocked before it forked


def forget_in_children(one: Forgets) -> None:
    """Have `forget` called in every process that this one forks from now on."""
    _all.add(one)


def _before() -> None:
    """Block signals until the child has its own handlers: with the rank's, it would act in the name of the rank."""
    _mask.old = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def _after() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.old)


def _after_in_child() -> None:
    for one in _all:
        one.forget()
    _after()


os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_after_in_child)
