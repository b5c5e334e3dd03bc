"""DistributedOptimizer: an optimizer that reduces the gradients over all ranks before each step."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.horovod.common.process import engine, size, unnamed
from paceline.horovod.common.process_sets import ProcessSet, global_process_set
from paceline.horovod.common.util import split_list
from paceline.horovod.engine.negotiation import UNNAMED
from paceline.train.torch_types import ParamGroup

from .compression import Compression, Compressor
from .functions import broadcast_object
from .mpi_ops import (
    Adasum,
    Average,
    Sum,
    allreduce_async_,
    grouped_allreduce_async_,
    sparse_allreduce_async,
    synchronize,
)
from .parameters import checked_names
from .replicas import ComparedOptimizer


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return an optimizer of the same class that steps with the gradients of all ranks.

    The exchange of a gradient begins in `backward`, as soon as it is computed. `synchronize()` waits for all of them
    (to clip gradients, say); a `step()` after it belongs into `with optimizer.skip_synchronize()`.

    Args:
        optimizer: any optimizer of torch; what is returned takes over its parameter groups and its state.
        named_parameters: names of all parameters of the optimizer, usually `model.named_parameters()`.
        compression: how gradients are made smaller for sending.
        backward_passes_per_step: number of backward passes whose gradients are accumulated.
        op: the reduction: Average, Sum or Adasum.
        gradient_predivide_factor: with Average, the gradients are divided by it before they are summed, and the sum is
            multiplied by it and divided by the number of ranks.
        num_groups: deprecated, see `groups`.
        groups: number of groups, or lists of parameters, whose gradients are reduced together when all of them are
            there. A parameter in no list is reduced on its own.
        sparse_as_dense: exchange sparse gradients as dense ones.
        process_set: who takes part.

    Raises:
        ValueError: the names are not unique, or not those of all parameters; `groups`, `op` or
            `backward_passes_per_step` is malformed; or a predivide factor is given with another reduction.
        NotImplementedError: Adasum with a process set.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if op not in (Average, Sum, Adasum):
        raise ValueError(f"op={op!r}: gradients are reduced with Average, Sum or Adasum")
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step={backward_passes_per_step} must be 1 or more")
    if num_groups != 0:
        warnings.warn("Parameter `num_groups` has been replaced by `groups`", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if groups is not None and not isinstance(groups, (list, tuple)) and not (isinstance(groups, int) and groups >= 0):
        raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
    if op == Adasum and process_set.process_set_id != 0:
        raise NotImplementedError("Adasum does not support non-global process sets yet.")
    base = unnamed("DistributedOptimizer", process_set.process_set_id or 0).replace(UNNAMED, ".")
    names = checked_names(optimizer, named_parameters, base)
    methods = _DistributedAdasumOptimizer if op == Adasum and size() > 1 else _DistributedOptimizer
    kind = type(type(optimizer).__name__, (methods, type(optimizer)), {})
    made: Any = object.__new__(kind)
    # The hooks, defaults, groups and state are those of the optimizer itself; only the class differs.
    made.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    made._original = type(optimizer)
    made._base_name = base
    made._distribute(
        names, compression, backward_passes_per_step, op, gradient_predivide_factor,
        groups if methods is _DistributedOptimizer else None, sparse_as_dense, process_set,
    )  # fmt: skip
    return made


class _DistributedOptimizer:
    """What the class that `DistributedOptimizer` makes has besides the methods of the optimizer's own class."""

    param_groups: list[ParamGroup]
    _original: Any
    _base_name: str  # of parameters that have none

    def _distribute(
        self,
        names: dict[Tensor, str],
        compression: type[Compressor],
        passes: int,
        op: int,
        predivide: float,
        groups: int | Sequence[Sequence[Tensor]] | None,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self._parameter_names = names
        self._compression = compression
        self.backward_passes_per_step = passes
        self.op = op
        self.gradient_predivide_factor = predivide
        self.sparse_as_dense = sparse_as_dense
        self.process_set = process_set
        self._allreduce_delay = dict.fromkeys(names, passes)
        self._handles: dict[Tensor, tuple[Any, Any]] = {}
        self._group_handles: dict[int, tuple[int, list[Any]]] = {}
        self._group_of: dict[Tensor, int] = {}
        self._groups: list[list[Tensor]] = []
        self._group_counts: list[int] = []
        self._requires_update: dict[Tensor, None] = {}
        self._hooks: list[Any] = []
        self._synchronized = False
        self._should_synchronize = True
        takes_part = process_set.included()
        self._reduces = takes_part and (process_set.size() > 1 or os.environ.get("HOROVOD_ELASTIC") == "1")
        if self._reduces:
            self._register_hooks(groups)
        is_compared = self._reduces and process_set.process_set_id == 0
        self._compared = ComparedOptimizer(self, alike=op != Adasum) if is_compared else None

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accumulate the gradients of this many backward passes from now on."""
        self.backward_passes_per_step = passes
        for parameter in self._allreduce_delay:
            self._allreduce_delay[parameter] = passes

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load a state; gradients that are being exchanged are forgotten."""
        self._begin_step()
        self._synchronized = False
        self._should_synchronize = True
        self._original.load_state_dict(self, *args, **kwargs)

    def _begin_step(self) -> None:
        """Forget what is being exchanged, and count backward passes anew."""
        self._handles.clear()
        self._group_handles.clear()
        self._group_counts = [0] * len(self._groups)
        self.set_backward_passes_per_step(self.backward_passes_per_step)

    def synchronize(self) -> None:
        """Wait until the gradients of all parameters are reduced; those that were not computed here count as zero.

        Raises:
            HorovodInternalError: the ranks disagree, or a rank is gone.
        """
        if self._reduces:
            self._adopt()
        for parameter in self._requires_update:
            handle, _ = self._handles.get(parameter, (None, None))
            number = self._group_of.get(parameter)
            if number is not None:
                if number not in self._group_handles:
                    self._reduce_group(number)
            elif handle is None:
                self._reduce(parameter)
        try:
            for number, (group_handle, ctxs) in self._group_handles.items():
                for parameter, output, ctx in zip(self._groups[number], synchronize(group_handle), ctxs, strict=True):
                    self._take(parameter, output, ctx)
            for parameter, (handle, ctx) in self._handles.items():
                if handle is not None:
                    self._take(parameter, synchronize(handle), ctx)
        finally:
            self._begin_step()
        self._synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """In this context, `step` does not synchronize: `synchronize` was called before."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step with the reduced gradients.

        Raises:
            HorovodInternalError: the ranks disagree, or a rank is gone.
            ReplicaMismatch: they train with different parameters, or numbers of the optimizer.
        """
        if not (self._should_synchronize or self._synchronized):
            self._compared = None  # a step of this rank's own
        if self._compared is None:
            return self._step(closure)
        replicas = engine().replicas
        self._compared.begins_step(replicas)
        made = self._step(closure)
        self._compared.ends_step(replicas)
        return made

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). This can cause training slowdown. You may want to consider using "
                    "optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code.",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        return self._original.step(self, closure) if closure is not None else self._original.step(self)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Forget the gradients."""
        if self._handles or self._group_handles:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        self._original.zero_grad(self, *args, **kwargs)

    def _register_hooks(self, groups: int | Sequence[Sequence[Tensor]] | None) -> None:
        trained = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        self._requires_update = dict.fromkeys(trained)
        if isinstance(groups, (list, tuple)):
            self._groups = _checked_groups(groups, self._requires_update)
        elif isinstance(groups, int) and groups > 0:
            # The order is rank 0's: groups must be alike on all ranks.
            names = [self._parameter_names[p] for p in trained]
            order = broadcast_object(names, (self.process_set.ranks or [0])[0], process_set=self.process_set)
            place = {name: index for index, name in enumerate(order)}
            ordered = sorted(trained, key=lambda p: place[self._parameter_names[p]])
            self._groups = split_list(ordered, groups)
        self._group_of = {p: number for number, group in enumerate(self._groups) for p in group}
        self._group_counts = [0] * len(self._groups)
        for parameter in trained:
            if parameter.grad is None and not isinstance(self, torch.optim.SparseAdam):
                parameter.grad = torch.zeros_like(parameter)  # as Horovod does; gradients are added to it
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._on_gradient))

    def _adopt(self) -> None:
        """Take in parameters that were added, or have begun to require gradients, since the last step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter not in self._requires_update:
                    self._parameter_names.setdefault(parameter, f"{self._base_name}.{len(self._parameter_names)}")
                    self._allreduce_delay[parameter] = self.backward_passes_per_step
                    self._requires_update[parameter] = None
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(self._on_gradient))

    def _on_gradient(self, parameter: Tensor) -> None:
        """The gradient of a parameter was accumulated."""
        if self._allreduce_delay[parameter] <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). "
                "Increase backward_passes_per_step to accumulate gradients locally."
            )
        assert parameter.grad is not None and not parameter.grad.requires_grad
        self._allreduce_delay[parameter] -= 1
        if self._allreduce_delay[parameter] > 0:
            self._handles[parameter] = (None, None)
            return
        number = self._group_of.get(parameter)
        if number is None:
            self._reduce(parameter)
            return
        self._handles[parameter] = (None, None)
        self._group_counts[number] += 1
        if self._group_counts[number] == len(self._groups[number]):
            self._reduce_group(number)

    def _reduce(self, parameter: Tensor) -> None:
        gradient = self._gradient(parameter)
        name = self._parameter_names[parameter]
        if gradient.is_sparse:
            self._handles[parameter] = (sparse_allreduce_async(gradient, name, self.op, self.process_set), None)
            return
        small, ctx = self._compression.compress(gradient)
        handle = allreduce_async_(small, None, name, self.op, *self._scale(), self.process_set)
        self._handles[parameter] = (handle, ctx)

    def _reduce_group(self, number: int) -> None:
        group = self._groups[number]
        pairs = [self._compression.compress(self._gradient(parameter)) for parameter in group]
        name = self._parameter_names[group[0]]
        tensors = [tensor for tensor, _ in pairs]
        handle = grouped_allreduce_async_(tensors, None, name, self.op, *self._scale(), self.process_set)
        self._group_handles[number] = (handle, [ctx for _, ctx in pairs])

    def _gradient(self, parameter: Tensor) -> Tensor:
        """The gradient to exchange; zeros if none was computed."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad.is_sparse and (self.sparse_as_dense or parameter in self._group_of):
            return parameter.grad.to_dense()
        return parameter.grad

    def _scale(self) -> tuple[float, float]:
        if self.op != Average:
            return 1.0, 1.0
        return 1.0 / self.gradient_predivide_factor, self.gradient_predivide_factor

    def _take(self, parameter: Tensor, output: Tensor, ctx: Any) -> None:
        """Make a reduced gradient the parameter's own."""
        gradient = parameter.grad
        assert gradient is not None
        if output is gradient:
            return
        with torch.no_grad():
            if output.is_sparse:
                parameter.grad = output
                return
            whole = self._compression.decompress(output, ctx)
            if gradient.is_sparse:
                parameter.grad = whole.to_sparse(gradient.sparse_dim())
            else:
                gradient.copy_(whole)


class _DistributedAdasumOptimizer(_DistributedOptimizer):
    """With Adasum, what is combined is each rank's own step, not its gradient."""

    def synchronize(self) -> None:
        """Nothing: what is combined is known only after the step."""

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Refused."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        yield

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        """Take a step of this rank's own, and replace it by the combination of all ranks' steps."""
        loss = closure() if closure is not None else None
        self._adopt()
        trained = list(self._requires_update)
        with torch.no_grad():
            for parameter in trained:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            before = [parameter.detach().clone() for parameter in trained]
            self._original.step(self)
            started = []
            for parameter, start in zip(trained, before, strict=True):
                small, ctx = self._compression.compress(parameter.detach() - start)
                started.append((allreduce_async_(small, None, self._parameter_names[parameter], Adasum), ctx))
            for parameter, start, (handle, ctx) in zip(trained, before, started, strict=True):
                parameter.copy_(start + self._compression.decompress(synchronize(handle), ctx))
        self._begin_step()
        return loss

    def _reduce(self, parameter: Tensor) -> None:
        self._handles[parameter] = (None, None)  # `zero_grad` is refused until the step


def _checked_groups(groups: Sequence[Any], trained: dict[Tensor, None]) -> list[list[Tensor]]:
    """Lists of the parameters that have gradients."""
    seen: set[Tensor] = set()
    made = []
    for group in groups:
        if not isinstance(group, (list, tuple)):
            raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
        for parameter in group:
            if not isinstance(parameter, Tensor):
                raise ValueError("groups must consist of torch.Tensor.")
            if parameter in seen:
                raise ValueError("A parameter can only appear once in groups.")
            seen.add(parameter)
        kept = [parameter for parameter in group if parameter in trained]
        if kept:
            made.append(kept)
    return made
