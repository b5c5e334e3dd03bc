"""Averages gradients in every step, while the backward pass goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.train.parallel.sync.wires.wire import Exact

from .averaging import Worker, average, average_within
from .synchroniser import Synchroniser

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch._C._distributed_c10d import GradBucket
    from torch.nn.parallel import DistributedDataParallel

    from paceline.train.parallel.sync.route import Route
    from paceline.train.parallel.sync.wires.wire import Wire
    from paceline.train.torch_types import StateDict


class EveryStepExchange(Synchroniser):
    """Averages the gradients of each bucket over all ranks, as soon as the backward pass has filled it."""

    def __init__(
        self, ways: Sequence[tuple[Route, Wire | None]], world_size: int, parameters: Sequence[torch.nn.Parameter]
    ) -> None:
        self._ways = ways
        self._exact = [None if wire is None else Exact(wire.group) for _, wire in ways]  # for complex gradients
        self._workers = [Worker(f"exchange-{number}", self._part) for number in range(len(ways))]
        self._world_size = world_size
        self._steps = 0
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}

    def attach(self, exchange: DistributedDataParallel) -> None:
        exchange.register_comm_hook(None, lambda state, bucket: self.begin(bucket))  # no types: torch compares them

    def begin(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start to average a bucket of gradients."""
        tensor = bucket.buffer()
        if bucket.index() == 0:
            self._steps += 1
        step = self._steps - 1
        if tensor.layout is not torch.strided:
            return _sparse(tensor, self._world_size)
        parameters = bucket.parameters()
        keys = [(self._numbers[id(each)], each.numel()) for each in parameters]
        is_complex = any(each.is_complex() for each in parameters)  # the buffer has their parts as real numbers
        number = bucket.index() % len(self._ways)

        def average_bucket() -> torch.Tensor:
            route, wire = self._ways[number]
            return self._average((route, self._exact[number] if is_complex else wire), tensor, keys, step)

        return self._workers[number].begin(average_bucket, tensor.device)

    def begin_within(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start to average a bucket of gradients over the ranks of this machine."""
        tensor = bucket.buffer()
        if tensor.layout is not torch.strided:
            raise RuntimeError("sparse gradients cannot be averaged within a machine; leave hierarchical=… out")
        number = bucket.index() % len(self._ways)
        route = self._ways[number][0]
        return self._workers[number].begin(lambda: average_within(route, tensor), tensor.device)

    def average(self, tensor: torch.Tensor) -> None:
        """Average a contiguous tensor of one dimension over all ranks, in place; nothing else is under way."""
        self._average(self._ways[0], tensor, [], 0)

    def _average(
        self, way: tuple[Route, Wire | None], tensor: torch.Tensor, keys: Sequence[tuple[int, int]], step: int
    ) -> torch.Tensor:
        return average(way, self._world_size, tensor, keys, step)

    @property
    def sent(self) -> int:  # type: ignore[override]
        within = sum(route.within.sent for route, _ in self._ways if route.within is not None)
        wires = [*(wire for _, wire in self._ways), *self._exact]
        return within + sum(wire.sent for wire in wires if wire is not None)

    @property
    def error(self) -> Exception | None:
        return next((worker.error for worker in self._workers if worker.error is not None), None)

    def state_dict(self) -> StateDict:
        wires = {str(number): wire.state_dict() for number, (_, wire) in enumerate(self._ways) if wire is not None}
        return {"steps": self._steps, "wires": wires} if any(wires.values()) else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not state:
            return
        self._steps = state["steps"]
        for number, (_, wire) in enumerate(self._ways):
            if wire is not None and str(number) in state["wires"]:
                wire.load_state_dict(state["wires"][str(number)])

    def close(self) -> None:
        self._part()
        for worker in self._workers:
            worker.close()

    def _part(self) -> None:
        """Leave the other ranks of this machine; those that wait for this one fail."""
        for route, _ in self._ways:
            if route.within is not None:
                route.within.close()


def _sparse(tensor: torch.Tensor, world_size: int) -> torch.futures.Future[torch.Tensor]:
    """Average a sparse gradient as DDP does."""
    work = dist.all_reduce(tensor, async_op=True)
    return work.get_future().then(lambda done: done.value()[0] / world_size)  # type: ignore[no-any-return]
