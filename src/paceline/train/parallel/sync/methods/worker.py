"""Runs exchanges in the order in which they were begun, while the training goes on."""

from __future__ import annotations

import os
import queue
import threading
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    Task = Callable[[], torch.Tensor]
    Future = torch.futures.Future[torch.Tensor]

_JOIN = 2.0  # seconds to wait for the end of the thread


class Worker:
    """Does one thing after the other. All ranks begin the same things in the same order.

    On the CPU that is a thread. On a GPU it is a stream, since the calls do not wait.

    Attributes:
        error: what has failed first; all that is begun later fails, too.
    """

    def __init__(self, name: str, broken: Callable[[], None]) -> None:
        self.error: Exception | None = None
        self._broken = broken
        self._queue: queue.SimpleQueue[tuple[Task, Future] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._stream: torch.cuda.Stream | None = None
        self._pid = os.getpid()
        self._is_closed = False
        self._thread.start()

    def begin(self, do: Task, device: torch.device) -> Future:
        """Do something after all that was begun before, and, on a GPU, after what its current stream has to do."""
        if self._is_closed or os.getpid() != self._pid:
            raise RuntimeError("gradients cannot be exchanged: the run is closed, or this process is no rank")
        if device.type == "cuda":
            return self._in_stream(do, device)
        future: Future = torch.futures.Future()
        self._queue.put((do, future))
        return future

    def close(self) -> None:
        """End the thread. Nothing more is begun."""
        self._is_closed = True
        self._queue.put(None)
        if os.getpid() == self._pid:
            self._thread.join(_JOIN)

    def _in_stream(self, do: Task, device: torch.device) -> Future:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        future: Future = torch.futures.Future(devices=[device])
        with torch.cuda.stream(self._stream):
            result = do()
            result.record_stream(self._stream)
            future.set_result(result)
        return future

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            self._do(*item)
            del item  # it may hold much

    def _do(self, do: Task, future: Future) -> None:
        if self.error is None:
            try:
                future.set_result(do())
                return
            except Exception as error:
                self.error = error
                self._broken()
        future.set_exception(self.error)  # type: ignore[arg-type]  # torch's annotation is wrong
