"""Averages tensors over all ranks: within a machine first, and then between machines, in fewer bits."""

from __future__ import annotations

import os
import queue
import threading
from typing import TYPE_CHECKING, Any

import torch

from paceline.train.parallel.sync.wires.wire import Cast, Exact

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from paceline.train.parallel.sync.route import Route
    from paceline.train.parallel.sync.wires.wire import Wire
    from paceline.train.torch_types import StateDict

    Future = torch.futures.Future[torch.Tensor]
    Task = Callable[[], torch.Tensor]


# -- the worker --------------------------------------------------------------------------------------------------------
# Runs exchanges in the order in which they were begun, while the training goes on.


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


# -- averages ----------------------------------------------------------------------------------------------------------


def average(
    way: tuple[Route, Wire | None], world_size: int, tensor: torch.Tensor, keys: Sequence[tuple[int, int]], step: int
) -> torch.Tensor:
    """Average a contiguous tensor of one dimension over all ranks, in place, and return it.

    `keys` has the number and size of each parameter in it, `step` is the number of steps before.
    """
    route, wire = way
    if route.machines == 1 and route.within is not None:
        route.within.all_reduce(tensor, world_size)
        return tensor
    if route.within is not None:
        route.within.reduce(tensor)
    if wire is not None:
        tensor /= world_size  # before the sum, which must fit into the bits that are sent
        wire.sum(tensor, keys, step)
    if route.within is not None:
        route.within.broadcast(tensor)
    return tensor


def average_within(route: Route, tensor: torch.Tensor) -> torch.Tensor:
    """Average a contiguous tensor over the ranks of this machine, in place, and return it."""
    if route.within is not None:
        route.within.all_reduce(tensor, route.neighbours)
    return tensor


class Averaging:
    """Averages while the training goes on, or at once."""

    def __init__(self, route: Route, wire: Wire | None, world_size: int) -> None:
        self._route, self._wire, self._world_size = route, wire, world_size
        self._exact = None if wire is None else Exact(wire.group)
        self._short = self._exact if wire is None or isinstance(wire, Exact) else Cast(wire.group, torch.float16)
        self._worker = Worker("exchange", self._part)

    def begin(self, tensor: torch.Tensor, key: tuple[int, int]) -> Future:
        """Start to average a tensor in place, after all that was begun before."""
        way, world_size = (self._route, self._wire), self._world_size
        return self._worker.begin(lambda: average(way, world_size, tensor, [key], 0), tensor.device)

    def now(self, tensor: torch.Tensor, *, exact: bool) -> torch.Tensor:
        """Average a tensor in place, and return it; nothing else is under way."""
        wire = self._exact if exact else self._short
        return average((self._route, wire), self._world_size, tensor, [], 0)

    @property
    def sent(self) -> int:
        """Bytes that this rank has sent to other machines, or to ranks with which it shares no memory."""
        wires = {id(wire): wire for wire in (self._wire, self._exact, self._short) if wire is not None}
        within = self._route.within.sent if self._route.within is not None else 0
        return within + sum(wire.sent for wire in wires.values())

    @property
    def error(self) -> Exception | None:
        """Why an average has failed on this rank."""
        return self._worker.error

    def state_dict(self) -> StateDict:
        """What this rank keeps between averages."""
        return {} if self._wire is None else self._wire.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what this rank has kept."""
        if self._wire is not None:
            self._wire.load_state_dict(state)

    def close(self) -> None:
        """Give back connections and memory; what is under way fails."""
        self._part()
        self._worker.close()

    def _part(self) -> None:
        """Leave the other ranks of this machine; those that wait for this one fail."""
        if self._route.within is not None:
            self._route.within.close()
