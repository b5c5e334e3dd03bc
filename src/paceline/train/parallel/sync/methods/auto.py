"""Chooses the method of exchange from measurements of the first steps."""

from __future__ import annotations

import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.train.parallel.sync.forecast import Bucket, Gradient, Link, Profile, choose, forecast, sentence
from paceline.train.parallel.sync.options import AllReduce, EveryStep, PowerSGD, name_of, parse, without_warmup
from paceline.train.parallel.sync.wires.wire import all_reduce, ring_bytes

from .every_step import EveryStepExchange

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch._C._distributed_c10d import GradBucket

    from paceline.train.group.group import Group
    from paceline.train.parallel.sync.options import AutoSync
    from paceline.train.parallel.sync.route import Route
    from paceline.train.parallel.sync.wires.wire import Wire
    from paceline.train.torch_types import StateDict


# -- measuring ---------------------------------------------------------------------------------------------------------
# Measures what a forecast needs: the step, the network between machines, and what compression costs.


_SETTLING = 2  # steps at the start that are not like later ones: buckets change, memory is new, code is compiled
_SIZES = [1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26]  # bytes of the sums that measure the bandwidth
_LONG = 0.05  # seconds of a sum that says enough
_REPEATS = 5  # of a sum that measures the latency
_TRIES = 3  # of a compression, of which the fastest counts
_SAMPLE = 1 << 25  # bytes of gradients that are compressed to see how long it takes


class StepWatch:
    """Measures the steps of this rank: when gradients are computed, and how long it waits for their exchange.

    On a GPU it waits at each bucket until that is computed, so that nothing overlaps while it measures.

    Attributes:
        steps: that it has seen, without the one that goes on.
        largest: of all values of the exchanged gradients.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._computes: list[float] = []
        self._step: float | None = None  # when it began
        self._begins: list[float] = []
        self._gradients: list[tuple[Gradient, ...]] = []
        self._done = 0.0
        self.largest = 0.0

    def step_begins(self, device: torch.device) -> None:
        """The first bucket of a step is computed: a step is the time from one to the next."""
        _wait(device)
        now = time.perf_counter()
        if self._step is not None:
            if self.steps >= _SETTLING:
                self._computes.append(self._compute(now))
            self.steps += 1
        self._step, self._done = now, now
        self._begins, self._gradients = [], []

    def bucket(self, bucket: GradBucket) -> None:
        """A bucket is computed."""
        tensor = bucket.buffer()
        _wait(tensor.device)
        self._begins.append(time.perf_counter())
        shapes = [tuple(each.shape) for each in bucket.parameters()]
        self._gradients.append(tuple(Gradient(shape, tensor.element_size()) for shape in shapes))

    def _compute(self, now: float) -> float:
        """Seconds of the step that ends, without those after its last bucket in which that was exchanged."""
        assert self._step is not None
        waited = max(0.0, self._done - self._begins[-1]) if self._begins else 0.0
        return now - self._step - waited

    def ends(self, tensor: torch.Tensor) -> None:
        """The exchange of a bucket has ended."""
        _wait(tensor.device)
        self._done = time.perf_counter()
        if tensor.numel():
            self.largest = max(self.largest, float(tensor.abs().max().nan_to_num_(torch.inf)))

    def profile(self) -> Profile:
        """The last step, before `step_begins` of the next one, with the median of the times, of two the shorter one."""
        assert self._step is not None
        buckets = tuple(
            Bucket(begin - self._step, gradients)
            for begin, gradients in zip(self._begins, self._gradients, strict=True)
        )
        return Profile(statistics.median_low([*self._computes, self._compute(time.perf_counter())]), buckets)


def measure_link(group: dist.ProcessGroup, device: torch.device) -> Link:
    """Measure the network between the ranks of a group, which all call this."""
    ranks = dist.get_world_size(group)
    latency = min(_sum_seconds(1, group, device) for _ in range(_REPEATS))
    for size in _SIZES:
        seconds = _sum_seconds(size // 4, group, device)
        if seconds >= _LONG:
            break
    sent = ring_bytes([torch.empty(size // 4, device="meta")], ranks)
    return Link(ranks, latency, sent / max(seconds - latency, 1e-9))


def _sum_seconds(numel: int, group: dist.ProcessGroup, device: torch.device) -> float:
    """Seconds of a sum over ranks, as all of them have it: the mean of what each has measured."""
    tensor = torch.zeros(numel, device=device)
    _wait(device)
    begin = time.perf_counter()
    all_reduce(tensor, group)
    _wait(device)
    taken = torch.tensor([time.perf_counter() - begin], device=device)
    all_reduce(taken, group)
    return float(taken) / dist.get_world_size(group)


def compression_cost(wire: Wire, profile: Profile, numbers: Sequence[Sequence[int]], device: torch.device) -> float:
    """Seconds that a wire without other ranks takes for each byte of gradients."""
    total, seconds = 0, 0.0
    for bucket, of in zip(profile.buckets, numbers, strict=True):
        keys = [(number, each.numel) for number, each in zip(of, bucket.gradients, strict=True)]
        count = sum(each.numel for each in bucket.gradients)
        taken = []
        for _ in range(_TRIES):
            tensor = torch.linspace(-1.0, 1.0, count, device=device)
            _wait(device)
            begin = time.perf_counter()
            wire.sum(tensor, keys, 0)
            _wait(device)
            taken.append(time.perf_counter() - begin)
        seconds += min(taken)
        total += bucket.bytes
        if total >= _SAMPLE:
            break
    return seconds / max(total, 1)


def _wait(device: torch.device) -> None:
    """Wait until a GPU has done what it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- choosing ----------------------------------------------------------------------------------------------------------


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

    def state_dict(self) -> StateDict:
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
