"""Forked loader workers that begin: one that hangs before its first instruction is forked again.

A fork copies locks as they are. If another thread holds one in that moment, nobody releases it in the child. Python
before 3.12 takes such a lock in each child, that of its list of threads, before it makes a new one
(`PyOS_AfterFork_Child`). A thread of C++ holds it, without the GIL, for the first time that it calls Python: for
example one of gloo that drops the last reference to a tensor. So a worker may hang that was forked soon after a
collective, and the rank would wait for its batches forever.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import socket
from multiprocessing import connection
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.popen_fork import Popen
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

log = logging.getLogger("paceline")
# Whether this torch may wait forever after a worker was killed. A test says when this is out of date.
LOSES_WORKERS = torch.__version__ < "2.14"
FIRST_SECONDS = 5.0  # that a worker may take to begin; twice as long each time that one does not


class WorkerDataLoader(DataLoader[Any]):
    """torch's DataLoader, whose workers begin, and whose next batch is torch's error after one was killed."""

    def _get_iterator(self) -> Any:
        if self.num_workers > 0:
            self.multiprocessing_context = starting(self.multiprocessing_context)
        if self.num_workers == 0 or not LOSES_WORKERS:
            return super()._get_iterator()
        from .worker_loss import LossIterator

        self.check_worker_number_rationality()
        return LossIterator(self)


def starting(context: Any) -> Any:
    """A context whose workers begin, if this one forks them; else this one."""
    is_plain = context is None or type(context) is ForkContext
    is_fork = is_plain and (context or multiprocessing).get_start_method() == "fork"
    return _Context() if is_fork else context


class _Launch(Popen):
    """Forks a worker, and lets it go on once it has answered."""

    def _launch(self, process_obj: BaseProcess) -> None:
        seconds = FIRST_SECONDS
        while not self._begins(process_obj, seconds):
            log.warning("a loader worker did not begin within %g s; another one is started in its place", seconds)
            seconds *= 2

    def _begins(self, process_obj: BaseProcess, seconds: float) -> bool:
        """Fork it; returns whether it has begun, or ended. One that is only slow is killed before it does anything."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                super()._launch(_Worker(process_obj, ours, theirs))  # type: ignore[misc]  # not in typeshed
            if connection.wait([ours], seconds):
                with contextlib.suppress(OSError):  # it has ended: the loader will say so
                    ours.sendall(ours.recv(1))
                return True
        self.kill()
        self.wait()
        self.close()
        self.returncode = None
        return False


class _Worker:
    """What a new worker runs: it answers, and waits until it may go on."""

    def __init__(self, process: BaseProcess, parents: socket.socket, own: socket.socket) -> None:
        self._process, self._parents, self._own = process, parents, own

    def _bootstrap(self, parent_sentinel: int) -> int:
        self._parents.close()
        with self._own:
            self._own.sendall(b"\0")
            if not self._own.recv(1):
                return 1  # the rank is gone
        return self._process._bootstrap(parent_sentinel=parent_sentinel)  # type: ignore[attr-defined, no-any-return]


class _Process(ForkProcess):
    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Popen:
        return _Launch(process_obj)


class _Context(ForkContext):
    Process = _Process
