"""Optimizers of which each rank keeps a part of the state: in a step, they have this rank's part of each parameter.

Of sharded parameters this is the part that the rank has. So torch's optimizers need not know of it, and call no DTensor
for each number that they compute. Where parameters are whole, it is some rows, and the rank gets the others after the
step: what ZeRO calls stage 1 (Rajbhandari et al. 2020, arXiv:1910.02054).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from paceline.train.group.sharded import is_dtensor

from .layout import cut, from_part, part_of
from .mesh import make_mesh
from .wires import Wires

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed.tensor import DTensor

    from paceline.train.group.group import Group
    from paceline.train.torch_types import StateDict

_EACH_NUMBER = (
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"
)  # fmt: skip  # optimizers of torch that treat each number of a parameter on its own
_WHOLE = ("Adafactor", "LBFGS", "Muon")  # of torch that look at whole parameters
_BUCKET = 25 << 20  # bytes that are gathered at once


def check_each_number(optimizer: torch.optim.Optimizer, *, rows: bool) -> None:
    """Check that an optimizer computes the same if a rank has only a part of a parameter, such as `rows` of it."""
    name = type(optimizer).__name__
    if isinstance(optimizer, tuple(getattr(torch.optim, each) for each in _WHOLE if hasattr(torch.optim, each))):
        raise TypeError(f"{name} looks at whole parameters, and ranks have parts of them; use AdamW, or shard=False")
    if rows and not takes_parts(optimizer):
        raise TypeError(
            f'{name} may look at whole parameters, and with shard="optimizer" it gets rows of them; use one of '
            f"torch.optim.{', '.join(_EACH_NUMBER)}, or shard=True"
        )


def takes_parts(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is one of torch that treats each number of a parameter on its own."""
    return type(optimizer) in [getattr(torch.optim, each) for each in _EACH_NUMBER]


class Parts:
    """This rank's parts of the parameters of an optimizer."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, group: Group, models: Iterable[torch.nn.Module], *, rows: bool
    ) -> None:
        """Make an optimizer keep its state for them only: for `rows` of whole parameters, or for sharded ones.

        Embeddings of the models that have sparse gradients stay whole. A collective of all ranks.
        """
        check_each_number(optimizer, rows=True)
        self._rank, self._count, self._guard = group.rank, group.world_size, group.guard
        self._mesh = make_mesh(group.world_size, group)[0] if rows else None
        self._wires = Wires(group, range(group.world_size), self._mesh.get_group()) if self._mesh is not None else None
        self._sparse = {
            part.weight
            for model in models
            for part in model.modules()
            if isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and part.sparse
        }
        self._has_parts = False  # of a state; one that was there before is whole
        self._parts: dict[torch.Tensor, torch.nn.Parameter] = {}
        self._whole: list[list[torch.Tensor]] = []  # the parameters of each group, in a step
        before, after = optimizer.register_step_pre_hook(self._begin), optimizer.register_step_post_hook(self._end)
        # Hooks that are there already see the whole parameters after a step.
        optimizer._optimizer_step_pre_hooks.move_to_end(before.id)  # type: ignore[attr-defined]  # it has an order
        optimizer._optimizer_step_post_hooks.move_to_end(after.id, last=False)  # type: ignore[attr-defined]
        optimizer.register_state_dict_post_hook(self._saved)
        optimizer.register_load_state_dict_pre_hook(self._loaded)

    @property
    def sent(self) -> int:
        """Bytes that this rank has sent."""
        return 0 if self._wires is None else self._wires.sent

    def close(self) -> None:
        """Give back what the exchange holds."""
        if self._wires is not None:
            self._wires.close()

    # -- a step --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _begin(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (args[1] if len(args) > 1 else kwargs.get("closure")) is not None:
            raise RuntimeError(
                "a closure computes gradients of whole parameters within the step, where the optimizer has parts of "
                "them; call optimizer.step() without one, or set shard=False"
            )
        self._whole, self._has_parts = [], True
        for group in optimizer.param_groups:
            self._whole.append(group["params"])
            group["params"] = [self._in_step(optimizer, each) for each in group["params"]]

    def _in_step(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> torch.Tensor:
        """What the optimizer has in a step in place of a parameter."""
        if not self._is_cut(parameter):
            return parameter
        own = self._own(parameter)
        part = self._parts.get(parameter)
        if part is None:
            self._parts[parameter] = part = torch.nn.Parameter(own, parameter.requires_grad)
        part.data = own
        part.grad = None if parameter.grad is None else self._own(parameter.grad)
        if parameter in optimizer.state:
            optimizer.state[part] = optimizer.state.pop(parameter)
        return part  # also without numbers, as the optimizer counts its steps for each

    @torch.no_grad()
    def _end(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        changed: dict[torch.dtype, list[torch.Tensor]] = {}
        for group, parameters in zip(optimizer.param_groups, self._whole, strict=True):
            group["params"] = parameters
            for parameter in parameters:
                part = self._parts.get(parameter)
                if part is None or not self._is_cut(parameter):
                    continue
                if part in optimizer.state:
                    optimizer.state[parameter] = optimizer.state.pop(part)
                if part.grad is not None and not is_dtensor(parameter):
                    changed.setdefault(parameter.dtype, []).append(parameter.data)
                part.grad = None
        for parameters in changed.values():
            self._gather(parameters)

    def _gather(self, parameters: list[torch.Tensor]) -> None:
        """Give each rank the rows of the others."""
        assert self._wires is not None
        assert self._mesh is not None
        bucket: list[torch.Tensor] = []
        size = 0
        for number, parameter in enumerate(parameters, 1):
            bucket.append(parameter)
            size += parameter.nbytes
            if size < _BUCKET and number < len(parameters):
                continue
            lengths = [self._most(each) * each[0].numel() for each in bucket]
            mine = bucket[0].new_zeros(sum(lengths))
            for each, place in zip(bucket, torch.split(mine, lengths), strict=True):
                own = self._own(each)
                place[: own.numel()].view(own.shape).copy_(own)
            every = mine.new_empty(self._count * mine.numel())
            with self._guard:
                self._wires.all_gather.all_gather(every, mine, self._mesh.get_group())
            for rank, theirs in enumerate(every.view(self._count, -1)):
                for each, place in zip(bucket, torch.split(theirs, lengths), strict=True):
                    rows = self._own(each, rank)
                    rows.copy_(place[: rows.numel()].view(rows.shape))
            bucket, size = [], 0

    def _is_cut(self, parameter: torch.Tensor) -> bool:
        if self._mesh is None or is_dtensor(parameter):
            return self._mesh is None and is_dtensor(parameter)
        gradient = parameter.grad
        is_sparse = parameter in self._sparse or (gradient is not None and gradient.is_sparse)
        return parameter.dim() > 0 and parameter.shape[0] > 0 and not is_sparse

    def _most(self, tensor: torch.Tensor) -> int:
        """The largest number of rows of a rank."""
        return -(-tensor.shape[0] // self._count)

    def _own(self, tensor: torch.Tensor, rank: int | None = None) -> torch.Tensor:
        """This rank's part, or the rows of another one."""
        if is_dtensor(tensor):
            return tensor.to_local()
        most = self._most(tensor)
        first = min(most * (self._rank if rank is None else rank), tensor.shape[0])
        return tensor[first : first + most]

    # -- its state -----------------------------------------------------------------------------------------------------

    def like(self, parameter: torch.Tensor) -> DTensor | None:
        """A tensor that is cut like what is kept for a parameter; None if that is whole."""
        return self._sharded(parameter, self._own(parameter.detach())) if self._is_cut(parameter) else None

    def _sharded(self, parameter: torch.Tensor, own: torch.Tensor) -> DTensor:
        if is_dtensor(parameter):
            return from_part(own, parameter)
        from torch.distributed.tensor import Shard

        assert self._mesh is not None
        return cut(own, parameter, self._mesh, (Shard(0),))

    def _cut(self, parameter: torch.Tensor, kept: StateDict) -> None:
        """Keep this rank's rows of what is kept for a parameter."""
        like = self.like(parameter)
        for name, value in kept.items() if like is not None else ():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                assert like is not None
                kept[name] = (value if is_dtensor(value) else part_of(value, like)).to_local()

    @torch.no_grad()
    def _saved(self, optimizer: torch.optim.Optimizer, state: StateDict) -> None:
        """In what `state_dict` returns, say which part of the whole each tensor is."""
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        for number, kept in state["state"].items() if self._has_parts else ():
            parameter = parameters[number]
            if self._is_cut(parameter):
                own = self._own(parameter).shape
                state["state"][number] = {
                    name: self._sharded(parameter, value)
                    if isinstance(value, torch.Tensor) and value.dim() and value.shape == own
                    else value
                    for name, value in kept.items()
                }

    def _loaded(self, optimizer: torch.optim.Optimizer, state: StateDict) -> StateDict:
        """Of what `load_state_dict` is given, take this rank's rows."""
        self._has_parts = True
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        kept = {number: dict(each) if isinstance(each, dict) else each for number, each in state["state"].items()}
        for number, each in kept.items():
            if isinstance(each, dict) and isinstance(number, int) and number < len(parameters):
                self._cut(parameters[number], each)
        return {**state, "state": kept}
