"""Chooses the method of exchange from measurements of the first steps."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.train.parallel.sync.forecast import choose, forecast, sentence
from paceline.train.parallel.sync.options import AllReduce, EveryStep, PowerSGD, name_of, parse, without_warmup

from .every_step import EveryStepExchange
from .probe import StepWatch, compression_cost, measure_link

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch._C._distributed_c10d import GradBucket

    from paceline.train.group.group import Group
    from paceline.train.parallel.sync.options import AutoSync
    from paceline.train.parallel.sync.routes.route import Route
    from paceline.train.parallel.sync.wires.wire import Wire

_HALF_LIMIT = 64.0  # a thousandth of fp16's largest value: gradients that have reached it are sent as bf16
_RANKS = (16, 8, 4, 2)  # of PowerSGD


class AutoExchange(EveryStepExchange):
    """Averages gradients exactly for some steps, measures them, and goes on as the forecast favours."""

    def __init__(
        self,
        options: AutoSync,
        group: Group,
        route: Route,
        make_wire: Callable[[EveryStep, dist.ProcessGroup], Wire],
        parameters: Sequence[torch.nn.Parameter],
    ) -> None:
        wire = None if route.between is None else make_wire(AllReduce(), route.between)
        super().__init__([(route, wire)], group.world_size, parameters)
        self._options, self._group, self._route, self._make_wire = options, group, route, make_wire
        self._alone: dist.ProcessGroup | None = None  # where this rank tries compressions
        if wire is not None:
            self._alone = dist.new_group([group.rank], use_local_synchronization=True)
        self._is_complex = any(parameter.is_complex() for parameter in parameters)
        self._watch: StepWatch | None = StepWatch()
        self._buckets: list[list[int]] = []  # numbers of their parameters
        self.method = "auto"

    def begin(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        tensor = bucket.buffer()
        if self._watch is not None and bucket.index() == 0:
            if self._watch.steps >= self._options.warmup - 1:
                self._workers[0].begin(lambda: self._decide(tensor), tensor.device).wait()
            else:
                self._watch.step_begins(tensor.device)
                self._buckets = []
        if self._watch is not None and tensor.layout is torch.strided:
            self._watch.bucket(bucket)
            self._buckets.append([self._numbers[id(each)] for each in bucket.parameters()])
        return super().begin(bucket)

    def _average(
        self, way: tuple[Route, Wire | None], tensor: torch.Tensor, keys: Sequence[tuple[int, int]], step: int
    ) -> torch.Tensor:
        averaged = super()._average(way, tensor, keys, step)
        if self._watch is not None:
            self._watch.ends(averaged)
        return averaged

    def _decide(self, tensor: torch.Tensor) -> torch.Tensor:
        """Measure the network, and go on with the method that rank 0 chooses; all ranks call this in the same step."""
        assert self._watch is not None
        found = self._gathered((self._watch.profile(), self._watch.largest))
        profile = max((each for each, _ in found), key=lambda each: float(each.compute))
        methods = self._candidates(max(largest for _, largest in found))
        link, costs = None, [0.0] * len(methods)
        if self._route.between is not None and self._alone is not None:
            link = measure_link(self._route.between, self._group.device)
            wires = [self._make_wire(method, self._alone) for method in methods]
            costs = [compression_cost(wire, profile, self._buckets, self._group.device) for wire in wires]
        highest = [max(each) for each in zip(*self._gathered(costs), strict=True)]
        chosen = [""]
        if self._group.is_main:
            assert link is not None
            all_costs: dict[EveryStep, float] = {AllReduce(): 0.0, **dict(zip(methods, highest, strict=True))}
            steps = forecast(profile, link, all_costs, shares_cores=tensor.device.type == "cpu")
            chosen = [name_of(choose(steps))]
            say(self._group, sentence(profile, link, steps))
        dist.broadcast_object_list(chosen, 0)
        self._go_on_with(chosen[0])
        return tensor

    def _gathered(self, mine: Any) -> list[Any]:
        """What all ranks have."""
        everyone: list[Any] = [None] * self._group.world_size
        dist.all_gather_object(everyone, mine)
        return everyone

    def _candidates(self, largest: float) -> list[EveryStep]:
        """The methods to choose from besides `AllReduce()`, the more exact ones first."""
        if self._is_complex or not self._buckets:
            return []
        half = AllReduce(wire="fp16" if largest < _HALF_LIMIT else "bf16")
        return [half, AllReduce(wire="int8"), *(PowerSGD(rank=rank, warmup=0) for rank in _RANKS)]

    def _go_on_with(self, name: str) -> None:
        """Use another method from now on."""
        method = without_warmup(parse(name))
        assert isinstance(method, EveryStep)
        ((route, before),) = self._ways
        if route.between is not None and before is not None:
            wire = self._make_wire(method, route.between)
            wire.sent = before.sent
            self._ways = [(route, wire)]
        self._watch, self.method = None, name

    def state_dict(self) -> dict[str, Any]:
        """See `Synchroniser.state_dict`: the choice, and what its method keeps."""
        return {} if self._watch is not None else {"choice": self.method, **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "choice" in state:
            self._go_on_with(state["choice"])
        super().load_state_dict({name: each for name, each in state.items() if name != "choice"})


def say(group: Group, text: str) -> None:
    """Print what was chosen, once."""
    if group.is_main:
        print(f"paceline: sync=auto: {text}", file=sys.stderr, flush=True)
