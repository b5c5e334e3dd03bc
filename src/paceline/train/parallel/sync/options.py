"""What a user chooses with `Strategy(sync=…)`: how the ranks exchange what they learn."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Literal

MOST_LOCAL = 16  # steps between two averages that "auto" chooses
WIRES = ("fp32", "fp16", "bf16", "int8")
OUTER_WIRES = ("fp32", "fp16", "int8", "int4")


@dataclass(frozen=True, kw_only=True)
class Sync:
    """How ranks exchange what they learn; see the classes below. What the number in a name says needs no keyword."""


@dataclass(frozen=True, kw_only=True)
class EveryStep(Sync):
    """Gradients are averaged over all ranks in every step.

    Attributes:
        hierarchical: whether the ranks of a machine first sum among themselves, so that one of them exchanges with the
            other machines. "auto" does so on the CPU, where ranks of a machine share memory. "measured" measures the
            links between machines, and takes machines together whose links are fast. A list of lists of ranks names
            the groups.
        communicators: number of exchanges that may be under way at once, each with process groups of its own.

    Raises:
        ValueError: an option is out of range.
    """

    hierarchical: bool | Literal["auto", "measured"] | tuple[tuple[int, ...], ...] = "auto"
    communicators: int = 1

    def __post_init__(self) -> None:
        if self.hierarchical != "auto":
            _normalise_groups(self, "True, False, 'auto', 'measured'")
        if self.communicators < 1:
            raise ValueError(f"communicators={self.communicators} is less than 1")
        if self.communicators > 1 and self.keeps:
            raise ValueError(
                f"communicators={self.communicators}: what {type(self).__name__} keeps for a gradient is kept by one "
                "communicator; leave it out, or use wire='fp32', 'fp16' or 'bf16'"
            )

    @property
    def keeps(self) -> bool:
        """Whether ranks keep something for the next steps."""
        return True

    @property
    def is_exact(self) -> bool:
        """Whether gradients are sent as they are."""
        return False


def _normalise_groups(options: EveryStep | LocalSGD, others: str) -> None:
    """Turn the lists of `hierarchical` into tuples."""
    if isinstance(options.hierarchical, list):
        object.__setattr__(options, "hierarchical", tuple(tuple(group) for group in options.hierarchical))
    if options.hierarchical != "measured" and not isinstance(options.hierarchical, (bool, tuple)):
        raise ValueError(f"hierarchical={options.hierarchical!r} is neither {others} nor a list of groups")


@dataclass(frozen=True, kw_only=True)
class AllReduce(EveryStep):
    """Gradients are summed as they are, or in fewer bits.

    Attributes:
        wire: the type in which gradients are sent between machines, or between ranks that share no memory: "fp32" (as
            they are), "fp16", "bf16", or "int8" with one scale per 256 values and error feedback (what rounding has
            lost is added to the gradients of the next step). Sums are taken in fp32.
    """

    __module__ = "paceline"  # where users find it

    wire: Literal["fp32", "fp16", "bf16", "int8"] = dataclasses.field(default="fp32", kw_only=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.wire not in WIRES:
            raise ValueError(f"wire={self.wire!r} is none of {', '.join(map(repr, WIRES))}")

    @property
    def keeps(self) -> bool:
        return self.wire == "int8"

    @property
    def is_exact(self) -> bool:
        return self.wire == "fp32"


@dataclass(frozen=True, kw_only=True)
class PowerSGD(EveryStep):
    """Gradients are sent as products of two thin matrices, with error feedback (Vogels et al. 2019, arXiv:1905.13727).

    Attributes:
        rank: columns of these matrices: more send more, and are more exact.
        warmup: steps at the start in which gradients are sent as they are.
    """

    __module__ = "paceline"  # where users find it

    rank: int = dataclasses.field(default=4, kw_only=False)
    warmup: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"rank={self.rank!r} is not a number of 1 or more")
        if self.warmup < 0:
            raise ValueError(f"warmup={self.warmup} is less than 0")


@dataclass(frozen=True, kw_only=True)
class TopK(EveryStep):
    """Of each gradient the largest values are sent, with error feedback (Aji and Heafield 2017, arXiv:1704.05021).

    Attributes:
        fraction: of the values of each gradient, more than 0 and at most 1.
    """

    __module__ = "paceline"  # where users find it

    fraction: float = dataclasses.field(default=0.01, kw_only=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction={self.fraction} is not more than 0 and at most 1")


@dataclass(frozen=True, kw_only=True)
class LocalSGD(Sync):
    """Ranks train alone, and average their parameters now and then (Stich 2018, arXiv:1805.09767).

    Attributes:
        every: steps of the optimizer between two averages. "auto" begins with `initial`, and adapts it after each
            average: ranks average more often as the loss falls, and less often as the learning rate does. With
            r = lr0 loss / (lr loss0), where lr0 and loss0 are the learning rate and the mean loss until the first
            average, and lr and loss those until the last one, the next average comes after ceil(sqrt(r initial))
            steps, 16 at most (Paddle Fleet's adaptive LocalSGD).
        warmup: steps at the start in which gradients are averaged instead.
        initial: see `every`.
        momentum: "keep" leaves what the optimizer of each rank keeps, "average" averages it, too.
        hierarchical: whether the ranks of a machine average their gradients in every step, so that only machines train
            alone. "measured" and a list of lists of ranks are as in `EveryStep`.

    Raises:
        ValueError: an option is out of range.
    """

    __module__ = "paceline"  # where users find it

    every: int | Literal["auto"] = dataclasses.field(default=8, kw_only=False)
    warmup: int = 500
    momentum: Literal["keep", "average"] = "keep"
    initial: int = 8
    hierarchical: bool | Literal["measured"] | tuple[tuple[int, ...], ...] = False

    def __post_init__(self) -> None:
        if self.every != "auto" and (not isinstance(self.every, int) or self.every < 1):
            raise ValueError(f"every={self.every!r} is neither 'auto' nor a number of 1 or more")
        if not 1 <= self.initial <= MOST_LOCAL:
            raise ValueError(f"initial={self.initial} is not from 1 to {MOST_LOCAL}")
        if self.warmup < 0:
            raise ValueError(f"warmup={self.warmup} is less than 0")
        if self.momentum not in ("keep", "average"):
            raise ValueError(f"momentum={self.momentum!r} is neither 'keep' nor 'average'")
        _normalise_groups(self, "True, False, 'measured'")


@dataclass(frozen=True, kw_only=True)
class AutoSync(Sync):
    """Measures the first steps and the network, and then chooses a method that exchanges gradients in every step.

    If all ranks are on one machine, that is `AllReduce()` at once.

    Attributes:
        warmup: steps at the start in which gradients are sent as they are, while they are measured.

    Raises:
        ValueError: an option is out of range.
    """

    __module__ = "paceline"  # where users find it

    warmup: int = 4

    def __post_init__(self) -> None:
        if self.warmup < 3:
            raise ValueError(f"warmup={self.warmup} is less than 3, and the first steps are not like later ones")


@dataclass(frozen=True, kw_only=True)
class DiLoCo(Sync):
    """Ranks train alone, and an outer optimizer steps by what they have learned.

    Source: Douillard et al. 2023, arXiv:2311.08105.

    The outer optimizer is SGD with Nesterov momentum. Its gradient is what all ranks had in common, minus the mean of
    what they have now. The inner optimizer is the one passed to `Run.setup`, such as AdamW.

    Attributes:
        every: steps of the inner optimizer between two outer steps of a fragment.
        outer_lr: learning rate of the outer optimizer.
        outer_momentum: its momentum; 0 is plain SGD.
        fragments: parts of about the same size, made of whole layers, that take their outer steps in turns, `every` /
            `fragments` steps apart (Douillard et al. 2025, arXiv:2501.18512).
        overlap: whether training goes on while a fragment is exchanged. Then the outer step is applied `delay` steps
            later, also if the exchange takes less, and each rank goes on with half of its own parameters and half of
            the common ones.
        wire: the type in which outer gradients are sent between machines, or between ranks that share no memory:
            "fp32", "fp16", or "int8" or "int4" with one scale per 256 values and error feedback.
        delay: see `overlap`; `every` - 1 at most.

    Raises:
        ValueError: an option is out of range.
    """

    __module__ = "paceline"  # where users find it

    every: int = dataclasses.field(default=64, kw_only=False)
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    fragments: int = 4
    overlap: bool = True
    wire: Literal["fp32", "fp16", "int8", "int4"] = "fp16"
    delay: int = 5

    def __post_init__(self) -> None:
        for name in ("every", "fragments", "delay"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} is not a number of 1 or more")
        if not 0 < self.outer_lr < math.inf:
            raise ValueError(f"outer_lr={self.outer_lr!r} is not more than 0")
        if not 0 <= self.outer_momentum < 1:
            raise ValueError(f"outer_momentum={self.outer_momentum!r} is not from 0 to less than 1")
        if self.wire not in OUTER_WIRES:
            raise ValueError(f"wire={self.wire!r} is none of {', '.join(map(repr, OUTER_WIRES))}")

    @property
    def delayed(self) -> int:
        """Steps from the begin of an exchange to the outer step."""
        return min(self.delay, self.every - 1) if self.overlap else 0


_NAME = re.compile(r"(\w+)(?:\((.*)\))?")


def parse(sync: Sync | str) -> Sync:
    """The options that a name stands for, such as "fp16".

    Raises:
        ValueError: there is no method of this name, or its number is out of range.
        TypeError: it is neither a name nor options.
    """
    if isinstance(sync, Sync):
        return sync
    if not isinstance(sync, str):
        raise TypeError(f"sync={sync!r} is neither a name nor one of {', '.join(_named())}")
    match = _NAME.fullmatch(sync)
    found = _METHODS.get(match[1]) if match is not None else None
    if found is None:
        raise ValueError(f"sync={sync!r} is none of {', '.join(map(repr, _METHODS))}")
    if not match or match[2] is None:
        return found
    field = _NUMBERS.get(match[1])
    if field is None:
        raise ValueError(f"sync={sync!r}: {match[1]} has no number; leave out ({match[2]})")
    try:
        number = float(match[2]) if field == "fraction" else int(match[2])
    except ValueError:
        raise ValueError(f"sync={sync!r}: {match[2]!r} is not a number") from None
    return dataclasses.replace(found, **{field: number})


_METHODS: dict[str, Sync] = {
    "allreduce": AllReduce(), "fp16": AllReduce(wire="fp16"), "bf16": AllReduce(wire="bf16"),
    "int8": AllReduce(wire="int8"), "powersgd": PowerSGD(), "topk": TopK(),
    "local_sgd": LocalSGD(), "diloco": DiLoCo(), "auto": AutoSync(),
}  # fmt: skip
_NUMBERS = {  # what the number after a name says
    "powersgd": "rank", "topk": "fraction", "local_sgd": "every", "diloco": "every",
}  # fmt: skip


def _named() -> list[str]:
    return sorted({type(sync).__name__ for sync in _METHODS.values()})


def without_warmup(sync: Sync) -> Sync:
    """The same method, without steps at the start in which it exchanges gradients as they are."""
    return dataclasses.replace(sync, warmup=0) if isinstance(sync, (PowerSGD, LocalSGD)) else sync


def name_of(sync: Sync) -> str:
    """The shortest text for options: a name such as "powersgd(4)", whatever the other options are, if there is one."""
    for name, each in _METHODS.items():
        field = _NUMBERS.get(name)
        if field is not None and type(each) is type(sync):
            return f"{name}({getattr(sync, field)})"
        if each == sync or (isinstance(sync, AllReduce) and isinstance(each, AllReduce) and each.wire == sync.wire):
            return name
    return describe(sync)


def describe(sync: Sync) -> str:
    """Options as the user writes them, without those that have their defaults."""
    defaults = type(sync)()
    given = [
        f"{field.name}={getattr(sync, field.name)!r}"
        for field in dataclasses.fields(sync)
        if getattr(sync, field.name) != getattr(defaults, field.name)
    ]
    return f"{type(sync).__name__}({', '.join(given)})"
