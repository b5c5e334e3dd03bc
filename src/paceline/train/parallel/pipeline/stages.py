"""Which rank has which blocks of a model, and what states say of those that other ranks have."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.train.group.sharded import is_dtensor
from paceline.train.parallel.shard.layout import elsewhere, keeps_parts

if TYPE_CHECKING:
    import types
    from collections.abc import MutableMapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from paceline.train.group.group import Group
    from paceline.train.torch_types import StateDict

_CLIP = inspect.unwrap(torch.nn.utils.clip_grad_norm_).__code__
_RANDOM = ("normal", "uniform", "xavier", "kaiming", "orthogonal", "sparse", "bernoulli", "random", "exponential")
_DEPTH = 3  # frames from it to where it takes gradients
_ALONE = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop",
    "SGD",
)  # fmt: skip  # optimizers of torch that treat each parameter on its own


class Elsewhere(torch.nn.Parameter):
    """A parameter that another rank has: it has its shape here, and no numbers."""

    @classmethod
    def __torch_function__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See torch. `clip_grad_norm_` would take the norm of what is here only, and scale each stage differently."""
        name = getattr(func, "__name__", "")
        if name.endswith("_") and any(kind in name for kind in _RANDOM):
            raise RuntimeError(
                f"{name} draws numbers for a parameter that another rank has, and ranks would go on with other random "
                "numbers; set parameters before run.setup"
            )
        frame: types.FrameType | None = sys._getframe(1)
        for _ in range(_DEPTH):
            if frame is not None and frame.f_code is _CLIP:
                raise RuntimeError(
                    "torch.nn.utils.clip_grad_norm_ has the gradients of this rank's blocks only; use "
                    "run.clip_grad_norm(max_norm), which takes those of all stages together"
                )
            frame = frame.f_back if frame is not None else None
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def divide(sizes: Sequence[int], parts: int) -> list[range]:
    """Divide blocks that follow each other into parts of sizes that are as equal as they can be."""
    sums = [0]
    for size in sizes:
        sums.append(sums[-1] + size)
    best: list[list[tuple[float, int]]] = [[(0.0, 0)] + [(float("inf"), 0)] * len(sizes)]
    for _ in range(parts):
        last = best[-1]
        row = [(float("inf"), 0)]
        for end in range(1, len(sums)):
            row.append(min((last[begin][0] + (sums[end] - sums[begin]) ** 2, begin) for begin in range(end)))
        best.append(row)
    found, end = [], len(sizes)
    for row in reversed(best[1:]):
        begin = row[end][1]
        found.append(range(begin, end))
        end = begin
    return found[::-1]


class Stages:
    """The stages of a model: ranks that follow each other have one after the other, and the same data.

    All ranks make theirs at the same time.

    Attributes:
        index: this rank's stage.
        count: their number.
        ranks: those of this rank's pipeline, in the order of the stages.
        replicas: the ranks that have the same stage.
        forward: process group of the pipeline, for what goes to the next stage.
        backward: the same for gradients, which meet the former on the way: NCCL keeps to one order in each group.
    """

    def __init__(self, group: Group, count: int) -> None:
        from torch.distributed.device_mesh import DeviceMesh

        world = range(group.world_size)
        self.count, self.index = count, group.rank % count
        self._meshes: list[DeviceMesh] = [DeviceMesh(group.device.type, list(world[s::count])) for s in range(count)]
        self.replicas = world[self.index :: count]
        self.replica_group: dist.ProcessGroup = self._meshes[self.index].get_group()
        self.ranks = range(group.rank - self.index, group.rank - self.index + count)
        for first in world[::count]:
            both = [dist.new_group(list(range(first, first + count))) for _ in range(2)]
            if first == self.ranks[0]:
                self.forward, self.backward = both
        self._of: dict[int, int] = {}  # the stage of a tensor, by its id
        self._names: dict[str, int] = {}

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage."""
        return self.index == self.count - 1

    # -- tensors -------------------------------------------------------------------------------------------------------

    def add(self, name: str, tensor: torch.Tensor, stage: int) -> None:
        """Note which stage has a parameter or a buffer."""
        self._of[id(tensor)] = self._names[name] = stage

    def has_one(self, parameter: torch.Tensor) -> bool:
        """Whether one stage has a parameter, and not all."""
        return id(parameter) in self._of

    def like(self, parameter: torch.Tensor) -> DTensor | None:
        """A tensor that says who has a parameter, and what is kept for it; None if all have it."""
        stage = self._of.get(id(parameter))
        return None if stage is None else self._marked(parameter.detach(), stage)

    def _marked(self, tensor: torch.Tensor, stage: int) -> DTensor:
        from torch.distributed.tensor import DTensor, Replicate

        if stage != self.index:
            return elsewhere(tensor.shape, tensor.dtype, self._meshes[stage], (Replicate(),))
        return DTensor.from_local(tensor, self._meshes[stage], [Replicate()], run_check=False)

    # -- the state of the model ----------------------------------------------------------------------------------------

    def attach(self, module: torch.nn.Module) -> None:
        """Let the state of a model say who has what, and take what this rank has from any."""
        module.register_state_dict_post_hook(functools.partial(self._model_saved))  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(self._model_loaded)  # type: ignore[no-untyped-call]

    def _model_saved(self, _: torch.nn.Module, state: MutableMapping[str, Any], prefix: str, __: Any) -> None:
        for name, stage in self._names.items():
            value = state.get(prefix + name)
            if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
                state[prefix + name] = self._marked(value, stage)

    def _model_loaded(self, _: torch.nn.Module, state: MutableMapping[str, Any], prefix: str, *__: Any) -> None:
        for name, stage in self._names.items():
            value = state.get(prefix + name)
            if isinstance(value, torch.Tensor):
                other = torch.empty(value.shape, dtype=value.dtype, device="meta")
                state[prefix + name] = _local(value) if stage == self.index else other

    # -- the state of optimizers ---------------------------------------------------------------------------------------

    def keep(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer keep its state for the parameters of this rank.

        Raises:
            TypeError: it may look at several parameters at a time.
        """
        if not _treats_each_alone(optimizer):
            raise TypeError(
                f"{type(optimizer).__name__} may look at several parameters at a time, and with pipeline= each rank "
                "has other ones; use AdamW, or shard=True"
            )
        for parameter in self._parameters(optimizer):
            if parameter.is_meta:
                optimizer.state.pop(parameter, None)
        keeps_parts(optimizer, self.like)
        optimizer.register_state_dict_post_hook(self._saved)
        optimizer.register_load_state_dict_pre_hook(self._loaded)

    @staticmethod
    def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        return [each for group in optimizer.param_groups for each in group["params"]]

    def _saved(self, optimizer: torch.optim.Optimizer, state: StateDict) -> None:
        """In what `state_dict` returns, say who has what is kept for each number of a parameter."""
        parameters = self._parameters(optimizer)
        for number, kept in state["state"].items():
            stage = self._of.get(id(parameters[number]))
            if stage is not None:
                dimensions = min(parameters[number].dim(), 1)  # a number, as that of steps, is the same on all ranks
                state["state"][number] = {
                    name: self._marked(each, stage)
                    if isinstance(each, torch.Tensor) and each.dim() >= dimensions
                    else each
                    for name, each in kept.items()
                }

    def _loaded(self, optimizer: torch.optim.Optimizer, state: StateDict) -> StateDict:
        """Of what `load_state_dict` is given, take what is for this rank's parameters."""
        parameters = self._parameters(optimizer)
        kept = {}
        for number, each in state["state"].items():
            known = isinstance(number, int) and number < len(parameters)
            if known and parameters[number].is_meta:
                continue
            values = each.items() if isinstance(each, dict) else ()
            kept[number] = {name: _local(value) for name, value in values} if values else each
        return {**state, "state": kept}

    def complete(self, state: StateDict) -> None:
        """Add to the state of an optimizer what other stages keep. A collective of all ranks."""
        own = {
            number: {name: _form(value) for name, value in kept.items()}
            for number, kept in state["state"].items()
            if any(is_dtensor(value) for value in kept.values())
        }
        every: list[Any] = [None] * self.count
        dist.all_gather_object(every, own, group=self.forward)
        for stage, theirs in enumerate(every):
            for number, kept in theirs.items() if stage != self.index else ():
                state["state"][number] = {
                    name: self._marked(value, stage) if isinstance(value, torch.Tensor) and value.is_meta else value
                    for name, value in kept.items()
                }
        state["state"] = dict(sorted(state["state"].items()))


def _treats_each_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer computes the same for a parameter whatever others it has; one not of torch is tried."""
    kind: Any = type(optimizer)
    if kind in [getattr(torch.optim, each, None) for each in _ALONE]:
        return True
    options = {name: it for name, it in optimizer.defaults.items() if name in inspect.signature(kind).parameters}

    def trained(*groups: Sequence[float]) -> list[torch.Tensor]:
        made: list[torch.Tensor] = []
        for group in groups:
            parameters = [torch.nn.Parameter(torch.full((2, 2), value)) for value in group]
            tried = kind(parameters, **options)
            for factor in (1.0, 0.5, 2.0):
                for parameter in parameters:
                    parameter.grad = factor * parameter.detach() * torch.tensor([[1.0, 2.0], [3.0, 4.0]])
                tried.step()
            made += parameters
        return made

    try:
        return all(map(torch.equal, trained((1.0, 7.0)), trained((1.0,), (7.0,))))
    except Exception:  # of somebody else's code, with options that may be needed
        return False


def _local(value: Any) -> Any:
    return value.to_local() if is_dtensor(value) else value


def _form(value: Any) -> Any:
    """What others must know of a value: of one that a stage has, what it looks like."""
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if is_dtensor(value) else value
