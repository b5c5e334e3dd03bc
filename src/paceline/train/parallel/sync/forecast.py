"""How long a step takes with a method of exchange, from what was measured: pure functions, without ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .options import AllReduce, DiLoCo, LocalSGD, PowerSGD, name_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .options import EveryStep

_WORTH = 0.1  # of a step: what another optimisation must save beyond that to be proposed
LEAST_SAVED = 0.1  # of a step: below that, the method that changes less is better
_LEAST_BY_POWERSGD = 0.2  # the same for PowerSGD of any rank, with which training takes more steps
BLOCK = 256  # values of int8 with one scale
BLOCK_BYTES = 4 + BLOCK  # of a block as it is sent: its scale, then its values
_LEAST_SHRUNK = 2  # times fewer numbers that PowerSGD sends of a gradient, at least, or it sends it as it is


@dataclass(frozen=True)
class Gradient:
    """A gradient: its shape, and the bytes of an element."""

    shape: tuple[int, ...]
    element: int = 4

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Bucket:
    """Gradients that are exchanged at once.

    Attributes:
        ready: seconds from the first bucket of the step until this one is computed.
        gradients: in their order.
    """

    ready: float
    gradients: tuple[Gradient, ...]

    @property
    def bytes(self) -> int:
        """The size of its gradients, not compressed."""
        return sum(each.numel * each.element for each in self.gradients)


@dataclass(frozen=True)
class Profile:
    """A step as a rank has measured it.

    Attributes:
        compute: seconds of a whole step, without waiting for the exchange.
        buckets: in the order in which they are computed.
    """

    compute: float
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True)
class Link:
    """The network between machines.

    Attributes:
        ranks: that exchange by it.
        latency: seconds of a sum over these ranks that sends next to nothing.
        bandwidth: bytes per second that each of them sends.
    """

    ranks: int
    latency: float
    bandwidth: float


def matrix(shape: Sequence[int], rank: int) -> tuple[int, int] | None:
    """Rows and columns of a gradient that PowerSGD sends as a product of this rank; None if that saves too little."""
    if len(shape) < 2:
        return None
    rows, columns = shape[0], math.prod(shape) // max(1, shape[0])
    return (rows, columns) if (rows + columns) * rank * _LEAST_SHRUNK <= rows * columns else None


def sent_bytes(method: EveryStep, gradients: Sequence[Gradient], ranks: int) -> int:
    """Bytes that one of some ranks sends of a bucket, with `AllReduce` or `PowerSGD` after its warm-up."""
    if isinstance(method, PowerSGD):
        shapes = [matrix(each.shape, method.rank) for each in gradients]
        element = max((4, *(each.element for each in gradients)))
        plain = sum(each.numel for each, shape in zip(gradients, shapes, strict=True) if shape is None)
        firsts = sum(shape[0] for shape in shapes if shape is not None) * method.rank
        seconds = sum(shape[1] for shape in shapes if shape is not None) * method.rank
        return _shares(firsts, 2, ranks) + _shares(seconds, 2, ranks) + _shares(plain, element, ranks)
    assert isinstance(method, AllReduce)
    numel = sum(each.numel for each in gradients)
    if method.wire == "int8":
        return 2 * (ranks - 1) * sum(-(-each.numel // (BLOCK * ranks)) for each in gradients) * BLOCK_BYTES
    if method.wire in ("fp16", "bf16"):
        return _shares(numel, 2, ranks)
    return _ring(sum(each.numel * each.element for each in gradients), ranks)


def _ring(size: int, ranks: int) -> int:
    return 2 * (ranks - 1) * size // ranks


def _shares(numel: int, element: int, ranks: int) -> int:
    """What a rank sends of some numbers when each rank sums a share of them, or two ranks everything."""
    return element * (numel if ranks == 2 else 2 * (ranks - 1) * -(-numel // ranks))


def exchange_seconds(method: EveryStep, bucket: Bucket, link: Link, cost: float) -> float:
    """Seconds of the exchange of a bucket, with `cost` seconds of compression per byte of its gradients."""
    sent = sent_bytes(method, bucket.gradients, link.ranks)
    rounds = 2 if isinstance(method, PowerSGD) else 1  # sums over the ranks, one after the other
    return rounds * link.latency + sent / link.bandwidth + cost * bucket.bytes


def step_seconds(profile: Profile, exchanges: Sequence[float], delays: Sequence[float]) -> float:
    """Seconds of a step whose buckets are exchanged one after the other, while others are computed."""
    end = late = ready = 0.0
    for bucket, seconds, delay in zip(profile.buckets, exchanges, delays, strict=True):
        ready = bucket.ready + late
        end = max(end, ready) + seconds
        late += delay
    last = delays[-1] if delays else 0.0
    return profile.compute + late - last + max(0.0, end - ready)


def forecast(
    profile: Profile, link: Link, costs: Mapping[EveryStep, float], *, shares_cores: bool
) -> dict[EveryStep, float]:
    """Seconds of a step with each method."""
    return {
        method: step_seconds(
            profile,
            [exchange_seconds(method, each, link, cost) for each in profile.buckets],
            [cost * each.bytes * shares_cores for each in profile.buckets],
        )
        for method, cost in costs.items()
    }


def choose(steps: Mapping[EveryStep, float]) -> EveryStep:
    """The first method, or a less exact one that saves enough of its step."""
    chosen, shortest = next(iter(steps.items()))
    for method, seconds in steps.items():
        if seconds <= shortest * (1 - (_LEAST_BY_POWERSGD if isinstance(method, PowerSGD) else LEAST_SAVED)):
            chosen, shortest = method, seconds
    return chosen


def local_seconds(profile: Profile, link: Link, every: int, share: float = 1.0) -> float:
    """Seconds of a step if ranks exchange something after each `every` steps, without overlap, and train alone else."""
    size = sum(each.bytes for each in profile.buckets)
    return profile.compute + (link.latency + share * _ring(size, link.ranks) / link.bandwidth) / every


def sentence(profile: Profile, link: Link, steps: Mapping[EveryStep, float]) -> str:
    """What was measured, what is chosen, and what else there is, in one line."""
    exact, chosen = next(iter(steps)), choose(steps)
    exchange = sum(exchange_seconds(exact, each, link, 0.0) for each in profile.buckets)
    size = sum(each.bytes for each in profile.buckets)
    measured = (
        f"{_time(profile.compute)} compute, {_time(exchange)} exchange of {size / 1e6:.3g} MB at "
        f"{rate(link.bandwidth)} between nodes"
    )
    saved = 1 - steps[chosen] / steps[exact]
    others = {
        name_of(LocalSGD()): local_seconds(profile, link, 8),
        name_of(DiLoCo()): local_seconds(profile, link, 64, share=0.5),  # in fp16
    }
    local = {name: 1 - seconds / steps[exact] for name, seconds in others.items()}
    choice = f"{name_of(chosen)} saves {saved:.0%}" if chosen != exact else f"{name_of(exact)}; no other saves enough"
    other = next(name for name, each in local.items() if each >= max(local.values()) - _WORTH)
    if local[other] >= saved + _WORTH:
        choice += f"; {other}, which is another optimisation, would save {local[other]:.0%}"
    return f"{measured}: {choice}".replace("%", " %")


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2g} s"
    return f"{seconds * 1000:.2g} ms" if seconds < 0.01 else f"{seconds * 1000:.0f} ms"


def rate(bandwidth: float) -> str:
    """Bytes per second, as people read them."""
    bits = bandwidth * 8
    if bits >= 1e10:
        return f"{bits / 1e9:.0f} Gbit/s"
    return f"{bits / 1e9:.1f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"
