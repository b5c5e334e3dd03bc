"""DistributedOptimizer with Adasum: what is combined is each rank's own step, not its gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .compression import Compressor
from .mpi_ops import Adasum, allreduce_async_, synchronize


class AdasumMethods:
    """What the class that `DistributedOptimizer` makes for Adasum has besides the methods of the optimizer's class."""

    param_groups: list[dict[str, Any]]
    _original: Any

    def _distribute(self, names: dict[Tensor, str], compression: type[Compressor], passes: int) -> None:
        self._parameter_names = names
        self._compression = compression
        self.backward_passes_per_step = passes
        self._allreduce_delay = dict.fromkeys(names, passes)
        self._computed: dict[Tensor, None] = {}
        trained = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._on_gradient) for parameter in trained]
        self._requires_update = trained

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accumulate the gradients of this many backward passes from now on."""
        self.backward_passes_per_step = passes
        for parameter in self._allreduce_delay:
            self._allreduce_delay[parameter] = passes

    def synchronize(self) -> None:
        """Nothing: what is combined is known only after the step."""

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Refused.

        Raises:
            AssertionError: always.
        """
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        yield

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of this rank's own, and replace it by the combination of all ranks' steps.

        Raises:
            HorovodInternalError: a rank is gone.
        """
        loss = closure() if closure is not None else None
        with torch.no_grad():
            for parameter in self._requires_update:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            before = [parameter.detach().clone() for parameter in self._requires_update]
            self._original.step(self)
            started = []
            for parameter, start in zip(self._requires_update, before, strict=True):
                small, ctx = self._compression.compress(parameter.detach() - start)
                started.append((allreduce_async_(small, None, self._parameter_names[parameter], Adasum), ctx))
            for parameter, start, (handle, ctx) in zip(self._requires_update, before, started, strict=True):
                parameter.copy_(start + self._compression.decompress(synchronize(handle), ctx))
        self._computed.clear()
        self.set_backward_passes_per_step(self.backward_passes_per_step)
        return loss

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Forget the gradients.

        Raises:
            AssertionError: they were computed, and no step was taken with them.
        """
        if self._computed:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        self._original.zero_grad(self, *args, **kwargs)

    def _on_gradient(self, parameter: Tensor) -> None:
        if self._allreduce_delay[parameter] <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). "
                "Increase backward_passes_per_step to accumulate gradients locally."
            )
        self._allreduce_delay[parameter] -= 1
        self._computed[parameter] = None
