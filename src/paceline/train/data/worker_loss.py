"""An iterator of torch's DataLoader that fails, and never waits, when one of its workers is killed.

torch raises its error in the handler of SIGCHLD, so between any two instructions of the main thread. If a lock has just
been taken there, it is never released, and its next user waits forever. A worker that is killed while it writes a batch
leaves a part of it, and the reader waits forever for the rest. A process that shares a lock with a worker that was
killed while holding it waits forever too. So here the error is raised where the loader waits for a batch.

This replaces parts of torch, so it is for the versions that need it (`worker_start.LOSES_WORKERS`).
"""

from __future__ import annotations

import os
import queue
import struct
import time
import weakref
from multiprocessing import connection
from multiprocessing.reduction import ForkingPickler
from multiprocessing.sharedctypes import RawValue
from typing import TYPE_CHECKING, Any

from torch._C import _remove_worker_pids
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.process import BaseProcess

_DYING = 5.0  # seconds until the kernel reports the end of a process whose sockets it has closed
_CHUNK = 1024 * 1024  # bytes read at once


class LossIterator(_MultiProcessingDataLoaderIter):
    """torch's iterator, with a queue that does not wait for the dead. Its properties replace what torch's sets."""

    @property
    def _worker_result_queue(self) -> Any:
        return self._results

    @_worker_result_queue.setter
    def _worker_result_queue(self, results: Any) -> None:
        self._results = results
        # A weak reference: in a cycle, the queues to the workers would be closed before they are used to end these.
        this = weakref.ref(self)
        # An attribute of the object: the workers get the queue without it.

        def watched() -> Sequence[BaseProcess]:
            iterator = this()
            return iterator._watched() if iterator is not None else ()

        results.get = _Reader(results, watched, ends_wait=not self._pin_memory).get

    @property
    def _workers_done_event(self) -> Any:
        return self._done

    @_workers_done_event.setter
    def _workers_done_event(self, _: Any) -> None:
        self._done = _Flag()

    @property
    def _worker_pids_set(self) -> bool:
        return False

    @_worker_pids_set.setter
    def _worker_pids_set(self, value: bool) -> None:
        if value:  # torch's handler of SIGCHLD knows the workers from now on
            _remove_worker_pids(id(self))

    def _watched(self) -> Sequence[BaseProcess]:
        """The workers whose end is an error."""
        status = self.__dict__.get("_workers_status", ())  # none before the first batch is asked for
        return [worker for worker, works in zip(self._workers, status, strict=False) if works]

    def _shutdown_workers(self) -> None:
        workers = self.__dict__.get("_workers", ())
        if any(worker.exitcode for worker in workers):
            for worker in workers:  # one may wait for a lock that the dead one held
                worker.kill()
        super()._shutdown_workers()


class _Flag:
    """An event without waiting, and so without a lock that a worker could hold when it is killed."""

    def __init__(self) -> None:
        self._value = RawValue("b", 0)

    def set(self) -> None:
        """Set it."""
        self._value.value = 1

    def is_set(self) -> bool:
        """Whether it is set."""
        return bool(self._value.value)


class _Reader:
    """Reads a queue of multiprocessing as its only reader; a message that never ends is not waited for."""

    def __init__(self, source: Any, watched: Callable[[], Sequence[BaseProcess]], *, ends_wait: bool) -> None:
        self._connection = source._reader
        self._capacity = source._sem
        self._watched = watched
        self._ends_wait = ends_wait
        self._incoming = bytearray()  # the beginning of a message

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """The next message, as `Queue.get`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        watched = self._watched()
        ends = [worker.sentinel for worker in watched] if self._ends_wait else []
        while (size := self._missing()) > 0:
            remaining = 0.0 if not block else None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = connection.wait([self._connection, *ends], remaining)
            if any(end in ready for end in ends):
                self._reap(watched)
                raise queue.Empty
            if not ready:
                raise queue.Empty
            data = os.read(self._connection.fileno(), min(size, _CHUNK))
            if not data:
                raise EOFError("all workers have closed the queue")
            self._incoming += data
        head, _ = self._sizes()
        message = memoryview(self._incoming)[head:]
        self._incoming = bytearray()
        self._capacity.release()
        try:
            return ForkingPickler.loads(message)
        except (OSError, EOFError):  # a tensor's memory is asked for from the worker, which is gone
            if not connection.wait([worker.sentinel for worker in watched], _DYING):
                raise  # it lives: there is another reason
            if self._ends_wait:
                self._reap(watched)
            raise queue.Empty from None

    def _reap(self, watched: Sequence[BaseProcess]) -> None:
        """Wait for the exit codes of those that are ending, so that they are known not to be alive."""
        for worker in watched:
            if connection.wait([worker.sentinel], 0):
                worker.join(_DYING)

    def _missing(self) -> int:
        """How many bytes are missing to what is known of the size of the message."""
        head, size = self._sizes()
        return head + size - len(self._incoming)

    def _sizes(self) -> tuple[int, int]:
        """Bytes before the message, and of it, as far as they are known; as `Connection.send_bytes` writes them."""
        if len(self._incoming) < 4:
            return 4, 0
        (size,) = struct.unpack_from("!i", self._incoming)
        if size >= 0:
            return 4, size
        if len(self._incoming) < 12:
            return 12, 0
        return 12, struct.unpack_from("!Q", self._incoming, 4)[0]
