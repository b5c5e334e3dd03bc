"""Averages tensors over all ranks: within a machine first, and then between machines, in fewer bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from paceline.train.parallel.sync.wires.wire import Cast, Exact

from .worker import Worker

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.train.parallel.sync.routes.route import Route
    from paceline.train.parallel.sync.wires.wire import Wire

    Future = torch.futures.Future[torch.Tensor]


def average(
    way: tuple[Route, Wire | None], world_size: int, tensor: torch.Tensor, keys: Sequence[tuple[int, int]], step: int
) -> torch.Tensor:
    """Average a contiguous tensor of one dimension over all ranks, in place, and return it."""
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

    def state_dict(self) -> dict[str, Any]:
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
