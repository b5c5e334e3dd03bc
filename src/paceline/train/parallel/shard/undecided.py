"""Models with `Strategy(shard="auto")` until their first pass, which says what they take."""

from __future__ import annotations

import dataclasses
import functools
import json
import multiprocessing.util
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict

import torch
import torch.distributed as dist

from paceline.contract.machine import machine_id
from paceline.contract.memory import PLAN, PLANNED, machine_memory, memory_given
from paceline.train.parallel.build import Unfilled
from paceline.train.parallel.errors import NotBuilt
from paceline.train.parallel.model import Model
from paceline.train.parallel.units import find_units

from .choice import Choice, Limits, Passes, Sizes, Way, choose, ways, with_given
from .measure import Twin, tensors_of
from .model import can_be_sharded, check_units
from .optimizer import check_each_number

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from paceline.contract.memory import Planned, PlannedRow, PlannedWay
    from paceline.train.group.group import Group
    from paceline.train.parallel.build import Built
    from paceline.train.parallel.strategy import Strategy
    from paceline.train.torch_types import Arguments

    from .choice import Options
    from .evaluation import JointPasses

_SMALL = 16  # a model has so little of the memory that is free that it may be there whole at first
_FIXED = ("reshard", "recompute", "offload")  # options that hold if the script has set them


class Undecided(Model):
    """A user's model of which it is not known yet how the ranks keep it. Its first pass asks for that.

    Attributes:
        group: all ranks.
        is_decided: whether another model has taken its place.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        group: Group,
        strategy: Strategy,
        *,
        choose: Callable[[Arguments], None],
        passes: JointPasses,
        built: Built | None,
    ) -> None:
        self.group, self.is_decided = group, False
        self._choose, self._is_last = choose, strategy.accumulate == 1
        self._passes, self._number = passes, passes.add(self)
        self._hook = module.register_forward_pre_hook(_Begins(self), prepend=True, with_kwargs=True)
        plain = dataclasses.replace(
            strategy, shard=False, units=None, reshard=True, recompute=False, offload=False, compile=False,
            sync_batchnorm=False, precision="fp32",
        )  # fmt: skip
        super().__init__(module, group, plain, built=built)
        self.strategy = strategy
        empty = [(name, each) for name, each in module.named_parameters() if isinstance(each, Unfilled)]
        self._empty = [(name, each, each._version) for name, each in empty]

    def _to_device(self, module: torch.nn.Module) -> None:
        """Leave it where it is. If it was made without memory and is small, give it its numbers: scripts use them."""
        size = sum(each.nbytes for each in (*module.parameters(), *module.buffers()))
        is_small = size * _SMALL < (memory_given(os.environ) or machine_memory().available) and PLAN not in os.environ
        if self.group.broadcast_object(is_small):
            self._fill(module, module)
        for each in (*module.parameters(), *module.buffers()) if self.group.world_size > 1 else ():
            if not isinstance(each, Unfilled):
                moved = each.data.to(self.group.device)
                dist.broadcast(moved, 0)
                each.data.copy_(moved)

    def _exchanges_again(self) -> None:
        self._trained = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        self._frozen = [p for p in self.module.parameters() if not p.requires_grad]
        self._compute = self._compute_together = self.module

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _forward(self, given: Arguments) -> Any:
        self.begins(given)
        args, kwargs = given
        return self.wrapped(*args, **kwargs)

    def begins(self, given: Arguments) -> None:
        """A pass begins, with these arguments: choose."""
        if self.is_decided:
            return
        may_be_alone = self._is_evaluating or not torch.is_grad_enabled()  # some ranks may have no batches
        with torch.inference_mode(False):
            if may_be_alone:
                self._passes.goes_on(self._number, given)
            self._choose(given)

    def compute_again(self, given: Arguments) -> None:
        """Take part in the choice that other ranks make."""
        with torch.inference_mode(False):
            self._choose(given)

    def exchange(self, last: bool) -> None:
        """Note whether the next backward is the last of its accumulation."""
        super().exchange(last)
        self._is_last = last

    def free(self) -> torch.nn.Module:
        """The module, which asks for nothing any more.

        Raises:
            NotBuilt: the script has changed a parameter that has no numbers yet: they would be lost.
        """
        for name, each, version in self._empty:
            if each._version != version:
                raise NotBuilt(
                    f"{name} of {self.name} was changed between run.setup and the first pass, which gives it its "
                    "numbers: change it within run.build(), or after the first pass; for files, use run.build(FILE)"
                )
        self._hook.remove()
        return self.module

    def has_own_gradients(self) -> bool:
        """Whether some parameters have gradients, though the model was not called."""
        return any(parameter.grad is not None for parameter in self.module.parameters())

    def passes_on(self, model: Model) -> None:
        """Let another model take this one's place, also where the script has it already."""
        new = model.wrapped
        model.take_former(self)
        self.wrapped.__dict__.update({name: new.__dict__[name] for name in ("module", "_forward_together", "_no_sync")})
        model.wrapped, self.is_decided = self.wrapped, True
        model.exchange(self._is_last)
        model.evaluate(self._is_evaluating)


class _Begins:
    """The hook that asks before the first pass of a module itself, as within a method of it."""

    def __init__(self, model: Undecided) -> None:
        self._model = model

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before a pass: choose, and call the hooks that sharding has added, which torch does not know yet."""
        known = set(module._forward_pre_hooks)
        self._model.begins((args, kwargs))
        for hook in [hook for key, hook in module._forward_pre_hooks.items() if key not in known]:
            args, kwargs = hook(module, args, kwargs) or (args, kwargs)
        return args, kwargs

    def __deepcopy__(self, memo: Any) -> Any:
        return _nothing  # a copy is a model of the script alone

    def __reduce__(self) -> Any:
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    return _nothing


def _nothing(*_: Any) -> None:
    """In place of the hook, in copies and files."""


class Kept(TypedDict):
    """What a checkpoint has of a model: how many ranks keep it, and in which way."""

    ranks: int
    way: str
    options: Options
    passes: list[int] | None


class Choices:
    """All models of a run of which it is not known from the start how ranks keep them.

    Attributes:
        divides_batches: whether the batches of a rank become smaller with more ranks.
    """

    def __init__(self, group: Group, passes: JointPasses, settle: Callable[[Undecided, Options], None]) -> None:
        """`settle` keeps a model as some options of a strategy say."""
        self._group, self._passes, self._settle, self.divides_batches = group, passes, settle, False
        self._models: list[Undecided] = []
        self._optimizers: list[Callable[[], list[torch.optim.Optimizer]]] = []  # of each of them
        self._records: list[Kept | None] = []  # what a checkpoint has of each
        self._taken = 0  # bytes that models take of which it is known
        if PLAN in os.environ:
            multiprocessing.util.get_temp_dir()  # workers of data loaders get it too, so that one folder is to go

    def make(
        self,
        module: torch.nn.Module,
        strategy: Strategy,
        optimizers: Callable[[], list[torch.optim.Optimizer]],
        built: Built | None,
    ) -> Undecided:
        """The model whose first pass decides."""
        number = len(self._models)
        choose = functools.partial(self._choose, number)
        model = Undecided(module, self._group, strategy, choose=choose, passes=self._passes, built=built)
        self._models.append(model)
        self._optimizers.append(optimizers)
        self._records.append(None)
        return model

    def rest(self, saved: Sequence[Kept | None] = ()) -> None:
        """Choose for models that had no pass yet, as a checkpoint says or without measuring. All ranks call this."""
        for number, model in enumerate(self._models):
            if model.is_decided:
                continue
            record = saved[number] if number < len(saved) else None
            if record is None:
                self._choose(number, None)
            elif record["ranks"] == self._group.world_size:
                # What the script says now holds.
                if self._group.is_main:
                    said = f"as when the checkpoint was taken, {model.name}: {record['way']}"
                    print(f"paceline: {said}", file=sys.stderr, flush=True)
                self._keep(number, {**record, "options": with_given(record["options"], fixed(model.strategy))})
            else:
                self._decide(number, Passes(*record["passes"]) if record["passes"] else None)

    def has(self, parameters: Collection[int]) -> bool:
        """Whether some parameters, given by their ids, are of a model of which it is not known."""
        return any(not m.is_decided and any(id(p) in parameters for _, p in m.named) for m in self._models)

    def check(self) -> None:
        """Check after a backward that models were called whose parameters have got gradients."""
        for model in self._models:
            if not model.is_decided and model.has_own_gradients():
                raise RuntimeError(
                    f'{model.name} got gradients and was not called: with shard="auto" its first pass decides how it '
                    "is kept; call the model that run.setup returned, or choose another shard="
                )

    def records(self) -> list[Kept | None]:
        """What a checkpoint must have, so that a resumed run keeps the models alike."""
        return self._records

    def _choose(self, number: int, arguments: Arguments | None) -> None:
        passes = measured(self._models[number], arguments)
        if PLAN in os.environ:
            write_plan(self._models[number], self._optimizers[number](), passes, divides=self.divides_batches)
        self._decide(number, passes)

    def _decide(self, number: int, passes: Passes | None) -> None:
        chosen, passes = decide(self._models[number], self._optimizers[number](), passes, self._taken)
        self._taken += chosen.way.total
        kept = None if passes is None else [*passes]
        options = chosen.way.options
        ranks = self._group.world_size
        self._keep(number, {"ranks": ranks, "way": chosen.way.name, "options": options, "passes": kept})

    def _keep(self, number: int, record: Kept) -> None:
        self._records[number] = record
        self._models[number].free()
        self._settle(self._models[number], record["options"])


def measured(model: Undecided, arguments: Arguments | None) -> Passes | None:
    """What a pass takes; None if there is none to measure, or the model does not run without numbers."""
    if arguments is None:
        return None
    units, module = _units(model), model.free()
    precision = torch.bfloat16 if model.strategy.precision == "bf16" else None
    try:
        return Twin(module, model.group.device).passes(arguments, units, precision)
    except Exception as error:  # the script's code, which may need numbers
        why = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
        if model.group.is_main:
            print(f"paceline: {model.name} cannot be measured: {why}", file=sys.stderr, flush=True)
        return None


def sizes_of(model: Undecided, optimizers: Sequence[torch.optim.Optimizer], passes: Passes | None) -> Sizes:
    """What a model and its training have."""
    module = model.module
    tensors = tensors_of(module, _units(model))
    twin, state, scratch, reckoned = Twin(module, model.group.device), 0, 0, 0
    for optimizer in optimizers:
        own = sum(p.nbytes for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
        found = twin.optimizer(optimizer)
        state += 2 * own if found is None else found[0]
        scratch += 0 if found is None else found[1]
        reckoned += own
    trained = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    state += 2 * max(trained - reckoned, 0)  # as Adam's, where the optimizer is not known
    per = max(trained, 1)
    return Sizes(tensors, sum(b.nbytes for b in module.buffers()), state / per, scratch / per, passes)


def fixed(strategy: Strategy) -> Options:
    """The options that the script has set itself."""
    return {name: value for name in _FIXED if (value := getattr(strategy, name)) is not (name == "reshard")}


def own_way(strategy: Strategy, sizes: Sizes, limits: Limits, here: int) -> Way | None:
    """The way that a script names, with `here` ranks on a machine; None if it names none, or cannot be kept so."""
    shard = strategy.shard
    if shard == "auto" or strategy.together > 1:
        return None
    size = here if shard == "node" else limits.ranks if isinstance(shard, (bool, str)) else shard
    limits = dataclasses.replace(limits, ranks=min(size, limits.ranks))
    kind = limits.ranks > 1 and (shard if shard in (False, "optimizer") else True)
    options = with_given({"shard": kind, "reshard": True, "recompute": False, "offload": False}, limits.options)
    found = next((way for way in ways(sizes, limits) if way.options == options), None)
    if found is None or kind is not True:
        return found
    said = f'"{shard}"' if isinstance(shard, str) else shard
    return dataclasses.replace(found, name=f"shard={said}{found.name.removeprefix('shard=True')}")


def limits_of(model: Undecided, optimizers: Iterable[torch.optim.Optimizer], ranks: int) -> Limits:
    """What ways are possible."""
    strategy = model.strategy
    return Limits(
        ranks,
        on_gpu=model.group.device.type != "cpu",
        is_half=strategy.precision == "bf16",
        accumulates=strategy.accumulate > 1,
        options=fixed(strategy),
        rows=all(_takes(optimizer, rows=True) for optimizer in optimizers),
        parts=bool(_units(model)) and all(_takes(optimizer, rows=False) for optimizer in optimizers),
    )


def _takes(optimizer: torch.optim.Optimizer, *, rows: bool) -> bool:
    try:
        check_each_number(optimizer, rows=rows)
    except TypeError:
        return False
    return True


def _units(model: Undecided) -> Collection[str]:
    """The names of a model's units; none if they are not known, or it cannot be sharded."""
    module = model.module
    try:
        units = find_units(module, model.strategy.units)
        check_units(module, units, {p for p in module.parameters() if not can_be_sharded(p)})
        return list(units)
    except ValueError:
        if model.strategy.units is not None:
            raise
        return []


def budget(group: Group, module: torch.nn.Module) -> int:
    """Bytes that each rank may have for a model, which it may have already. A collective of all ranks."""
    device = group.device
    if device.type == "cuda":
        place = f"{machine_id()} {device}"
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        free -= torch.cuda.memory_allocated(device)
    else:
        place, free = machine_id(), machine_memory().available
    here = sum(
        p.nbytes
        for p in (*module.parameters(), *module.buffers())
        if not isinstance(p, Unfilled) and p.device == device
    )
    every = group.gather_objects((place, free, here, memory_given(os.environ)))
    count = {place: sum(each[0] == place for each in every) for place, *_ in every}
    return min(given or free // count[place] + here for place, free, here, given in every)


def decide(
    model: Undecided, optimizers: Sequence[torch.optim.Optimizer], passes: Passes | None, taken: int
) -> tuple[Choice, Passes | None]:
    """How a model is kept, and what a pass takes on the rank with the most; the same on all ranks, a collective.

    Other models have `taken` bytes.
    """
    group = model.group
    memory = max(budget(group, model.module) - taken, 0)
    every = [each for each in group.gather_objects(passes) if each is not None]
    most = Passes(*map(max, zip(*every, strict=True))) if every else None
    sizes, limits = sizes_of(model, optimizers, most), limits_of(model, optimizers, group.world_size)
    chosen = group.broadcast_object(choose(sizes, limits, memory))
    if group.is_main:
        print(f"paceline: {model.name}: {chosen.why()}", file=sys.stderr, flush=True)
    return chosen, most


def write_plan(
    model: Undecided, optimizers: Sequence[torch.optim.Optimizer], passes: Passes | None, *, divides: bool
) -> NoReturn:
    """In `paceline plan`: write what the training takes with some numbers of ranks, and end the process.

    If it `divides` batches, those of a rank become smaller with more ranks.
    """
    memory = budget(model.group, model.module)
    is_shared = memory_given(os.environ) is None and model.group.device.type == "cpu"
    rows: list[PlannedRow] = []
    for planned in os.environ[PLANNED].split(","):
        ranks, here = (int(number or 0) for number in planned.partition("/")[::2])
        here = here or ranks
        own = passes.divided(ranks) if passes is not None and divides else passes
        sizes, limits = sizes_of(model, optimizers, own), limits_of(model, optimizers, ranks)
        chosen = choose(sizes, limits, memory // here if is_shared else memory)
        described = functools.partial(_described, usable=chosen.usable)
        script = own_way(model.strategy, sizes, limits, here)
        rows.append({
            "ranks": ranks,
            "memory": chosen.memory,
            "used": chosen.part,
            "chosen": chosen.way.name,
            "ways": [described(way) for way in ways(sizes, limits)],
            "own": None if script is None else described(script),
        })  # fmt: skip
    counts = {is_trained: 0 for is_trained in (True, False)}
    for parameter in model.module.parameters():
        counts[parameter.requires_grad] += parameter.numel()
    answer: Planned = {
        "model": model.name,
        "trained": counts[True],
        "frozen": counts[False],
        "units": len(_units(model)),
        "shard": model.strategy.shard,
        "together": model.strategy.together_option if model.strategy.together > 1 else None,
        "optimizers": [type(each).__name__ for each in optimizers],
        "measured": passes is not None,
        "rows": rows,
    }
    Path(os.environ[PLAN]).write_text(json.dumps(answer))
    sys.stdout.flush()
    sys.stderr.flush()
    end_planned()


def _described(way: Way, usable: float) -> PlannedWay:
    return {"name": way.name, "parts": dict(way.parts), "total": way.total, "fits": way.total <= usable}


def end_planned() -> NoReturn:
    """End a process that was to be planned only, with what the workers of its data loaders would leave behind."""
    try:
        children = multiprocessing.active_children()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the handler of torch raises an error for each
        for child in children:
            child.kill()
        shutil.rmtree(multiprocessing.util.get_temp_dir(), ignore_errors=True)
    finally:
        os._exit(0)
