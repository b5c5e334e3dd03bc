"""Measures what a forecast needs: the step, the network between machines, and what compression costs."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from paceline.train.parallel.sync.forecast import Bucket, Gradient, Link, Profile
from paceline.train.parallel.sync.wires.wire import all_reduce, ring_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch._C._distributed_c10d import GradBucket

    from paceline.train.parallel.sync.wires.wire import Wire

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
