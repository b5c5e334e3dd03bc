"""How `Strategy(shard="auto")` keeps a model: the first way whose memory fits, of those that cost ever more time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_FITS, _FITS_UNMEASURED = 0.9, 0.5  # of the memory; the latter if it is not known what passes take
_SHARED = 24 << 20  # bytes by which ranks of one machine exchange gradients, see `paceline.train.group.shared_memory`
_BUCKETS = 2 * (25 << 20)  # bytes of rows that are gathered after a step, see `Parts`


_WHOLE = ("recompute",)  # options that also have an effect on models that are not sharded


Options = dict[str, Any]  # of `Strategy`, that say how a model is kept: shard, reshard, recompute and offload


class Tensor(NamedTuple):
    """A parameter: its rows, the bytes of a row, whether it is trained, and its unit, -1 if it is in none."""

    rows: int
    row: int
    is_trained: bool
    unit: int


class Passes(NamedTuple):
    """Bytes that a pass of a batch takes at most, beside parameters, their gradients and the optimizer's state.

    Attributes:
        whole: if ranks have copies.
        whole_again: the same, if units are computed again.
        sharded: if the model is sharded; other than for copies, autocast keeps nothing of the parameters then.
        sharded_again: the same, if units are computed again.
    """

    whole: int
    whole_again: int
    sharded: int
    sharded_again: int

    def of(self, *, is_sharded: bool, again: bool) -> int:
        """Those of a way."""
        whole, sharded = (self.whole_again, self.sharded_again) if again else (self.whole, self.sharded)
        return sharded if is_sharded else whole

    def divided(self, ranks: int) -> Passes:
        """Those of a rank, if the batch is divided among several."""
        return Passes(*(size // ranks for size in self))


@dataclass(frozen=True)
class Sizes:
    """What a model and its training have, in bytes.

    Attributes:
        tensors: its parameters.
        buffers: its buffers.
        state: of the optimizer, per byte of trained parameters.
        scratch: that a step of the optimizer takes for a while, per byte of trained parameters.
        passes: what a pass takes; None if that is not known.
    """

    tensors: Sequence[Tensor]
    buffers: int = 0
    state: float = 2.0
    scratch: float = 0.0
    passes: Passes | None = None

    def parameters(self, ranks: int = 1, *, trained: bool = False) -> int:
        """Bytes of a rank's part of the parameters, or of those that are trained: of the rank with the most."""
        return sum(-(-each.rows // ranks) * each.row for each in self.tensors if each.is_trained or not trained)

    def of_unit(self, unit: int, *, trained: bool = False) -> int:
        """Bytes of the parameters of a unit, or of those in none."""
        return sum(e.rows * e.row for e in self.tensors if e.unit == unit and (e.is_trained or not trained))

    @property
    def units(self) -> range:
        """The numbers of the units."""
        return range(max((each.unit for each in self.tensors), default=-1) + 1)


@dataclass(frozen=True)
class Way:
    """A way to keep a model.

    Attributes:
        name: in messages.
        options: of `Strategy`.
        parts: its memory in bytes, by what it is for.
    """

    name: str
    options: Options
    parts: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Bytes of a rank."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Limits:
    """What ways are possible.

    Attributes:
        ranks: number of ranks.
        on_gpu: whether they have GPUs.
        is_half: whether passes are in half precision.
        accumulates: whether several batches make a step: until then, whole gradients are kept.
        options: of the strategy that hold in each way.
        rows: whether the optimizers take rows of parameters.
        parts: whether they take sharded parameters, and units are known.
    """

    ranks: int
    on_gpu: bool = False
    is_half: bool = False
    accumulates: bool = False
    options: Options = field(default_factory=dict)
    rows: bool = True
    parts: bool = True


def ways(sizes: Sizes, limits: Limits) -> list[Way]:
    """All ways that are possible, the fastest first."""
    steps: list[tuple[str, Options, bool]] = [
        ("a copy on each rank", {"shard": False}, True),
        ('shard="optimizer"', {"shard": "optimizer"}, limits.ranks > 1 and limits.rows),
        ("shard=True, reshard=False", {"shard": True, "reshard": False}, limits.ranks > 1 and limits.parts),
        ("shard=True", {"shard": True}, limits.ranks > 1 and limits.parts),
    ]
    again = {"shard": limits.ranks > 1, "recompute": True}
    name = "shard=True, recompute=True" if limits.ranks > 1 else "recompute=True"
    steps.append((name, again, limits.parts and bool(sizes.units)))
    steps.append((f"{name}, offload=True", {**again, "offload": True}, limits.ranks > 1 and limits.parts))
    found: list[Way] = []
    for name, own, is_possible in steps:
        if is_possible and (limits.on_gpu or not own.get("offload")):
            options = with_given({"reshard": True, "recompute": False, "offload": False, **own}, limits.options)
            if all(options != way.options for way in found):
                more = [
                    f", {key}={options[key]}" for key in limits.options if f"{key}=" not in name and applies(key, own)
                ]
                found.append(Way(name + "".join(more), options, _parts(sizes, limits, options)))
    return found


def applies(option: str, options: Options) -> bool:
    """Whether an option has an effect where models are kept in this way."""
    return options["shard"] is True or option in _WHOLE


def with_given(options: Options, given: Options) -> Options:
    """The options of a way, and those of the script that have an effect there."""
    return {**options, **{name: value for name, value in given.items() if applies(name, options)}}


@dataclass(frozen=True)
class Choice:
    """A way that was chosen.

    Attributes:
        way: it.
        fits: whether it fits; if none does, it takes the least.
        memory: bytes that a rank has.
        part: of these, that may be used.
        next: the way before it, which does not fit; None if there is none.
    """

    way: Way
    fits: bool
    memory: int
    part: float
    next: Way | None = None

    @property
    def usable(self) -> float:
        """Bytes that may be used."""
        return self.memory * self.part

    def why(self) -> str:
        """Why, with the numbers."""
        way = self.way
        parts = ", ".join(f"{part} {in_words(size)}" for part, size in way.parts.items() if size)
        line = f"{way.name}: {in_words(way.total)} per rank, and there are {in_words(self.memory)}: {parts}"
        if not self.fits:
            return f"{line}; no way fits, and this one takes the least"
        if self.next is not None:
            line += f"; {self.next.name} would take {in_words(self.next.total)}"
        return line if self.part >= _FITS else f"{line}; half is left for passes, which are not measured"


def choose(sizes: Sizes, limits: Limits, memory: int) -> Choice:
    """The first way that fits into the memory of a rank, in bytes; or the one that takes the least."""
    part = _FITS if sizes.passes is not None else _FITS_UNMEASURED
    before: Way | None = None
    found = ways(sizes, limits)
    for way in found:
        if way.total <= memory * part:
            return Choice(way, True, memory, part, before)
        before = way
    return Choice(min(found, key=lambda way: way.total), False, memory, part)


def in_words(size: float) -> str:
    """A number of bytes."""
    for unit in ("B", "kB", "MB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def _parts(sizes: Sizes, limits: Limits, options: Options) -> dict[str, int]:
    """The memory of a way, by what it is for."""
    is_cut, rows = options["shard"] is True, options["shard"] == "optimizer"
    ranks = limits.ranks if is_cut else 1
    trained, whole = sizes.parameters(ranks, trained=True), sizes.parameters(trained=True)
    kept = sizes.parameters(limits.ranks, trained=True) if rows else trained
    passes = sizes.passes or Passes(0, 0, 0, 0)
    # Gradients come while activations go, and mostly get other memory all the same: allocators keep what they had.
    activations = passes.of(is_sharded=is_cut, again=options["recompute"])
    gathered = _gathered(sizes, limits, keeps_all=not options["reshard"]) if is_cut else 0
    scratch = int(sizes.scratch * kept) + (_BUCKETS if rows else 0)
    parts = {
        "parameters": sizes.parameters(ranks) + sizes.buffers,
        "gradients": trained + (whole if is_cut and limits.accumulates else 0),
        "optimizer": int(sizes.state * kept),
    }
    if options["offload"]:  # these are in the memory of the machine
        parts, scratch = dict.fromkeys(parts, 0), 0
    return {
        **parts,
        "activations": activations,
        "gathered": gathered,
        "step": max(scratch - activations - gathered, 0),  # a pass and a step are not at the same time
        "exchange": _SHARED if limits.ranks > 1 and not limits.on_gpu else 0,
    }


def _gathered(sizes: Sizes, limits: Limits, *, keeps_all: bool) -> int:
    """Bytes of what a rank has gathered, and of whole gradients that are exchanged, at the worst moment of a pass."""
    at_once = 2 if limits.on_gpu else 1  # the next unit is gathered early
    each = [sizes.of_unit(unit) for unit in sizes.units]
    trained = max((sizes.of_unit(unit, trained=True) for unit in sizes.units), default=0)
    part = 0.5 if limits.is_half else 1  # what is beside the units is gathered as it is
    parameters = part * (sum(each) if keeps_all else at_once * max(each, default=0))
    rest = sizes.of_unit(-1, trained=True)
    # Gradients, and what is sent of them.
    return int(parameters + sizes.of_unit(-1) + max(part * trained + trained + rest, 2 * rest))
