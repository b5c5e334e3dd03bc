"""The running statistics of batch norm, computed anew over the batches of all ranks."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from paceline.train.group.group import Collectives


@torch.no_grad()
def update_bn(
    ranks: Collectives, batches: Iterable[Any], samples: Callable[[], int], model: torch.nn.Module, device: torch.device
) -> None:
    """Set the statistics of all batch norm layers to their mean over the batches, as torch's `update_bn` does.

    The parts that the ranks have of a step are one batch, by whose mean and variance all of them normalise, so the
    result is that of one process with batches of the same samples. A collective of all ranks in each layer.
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    if not norms:
        return
    modes = [(module, module.training) for module in model.modules()]
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # compiled code would not see the change
        is_counted = True  # the current batch of this rank
        for norm in norms:
            norm.reset_running_stats()
            norm.forward = functools.partial(_forward, norm, ranks, lambda: is_counted)  # type: ignore[method-assign]
            stack.callback(norm.__dict__.pop, "forward")
        model.train()
        for module, mode in modes:
            stack.callback(setattr, module, "training", mode)
        for batch, is_own in _together(ranks, batches):
            is_counted = is_own and samples() > 0
            first = batch[0] if isinstance(batch, list | tuple) else batch
            model(first.to(device))


def _forward(norm: _BatchNorm, ranks: Collectives, is_counted: Callable[[], bool], x: torch.Tensor) -> torch.Tensor:
    """Normalise by the mean and the variance of all ranks' batches, and count them."""
    assert norm.running_mean is not None and norm.running_var is not None and norm.num_batches_tracked is not None
    dims = [0, *range(2, x.dim())]
    wide = x.double()
    number = wide.new_full((1,), x.numel() / x.size(1))
    own = torch.cat([wide.sum(dims), wide.square().sum(dims), number])
    total = ranks.all_reduce(own if is_counted() else torch.zeros_like(own))
    n = total[-1].clamp(min=1)
    mean, square = (total[:-1] / n).chunk(2)
    var = (square - mean.square()).clamp(min=0)
    norm.num_batches_tracked.add_(1)
    share = 1 / norm.num_batches_tracked
    norm.running_mean.lerp_(mean.to(norm.running_mean), share.to(norm.running_mean))
    norm.running_var.lerp_((var * n / (n - 1).clamp(min=1)).to(norm.running_var), share.to(norm.running_var))
    used = mean.to(norm.running_mean), var.to(norm.running_var)
    return torch.nn.functional.batch_norm(x, *used, norm.weight, norm.bias, False, 0.0, norm.eps)


def _together(ranks: Collectives, batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """This rank's batches, and stand-ins for as long as other ranks have some; and whether it is its own."""
    own, batch = iter(batches), None
    end = object()
    is_first = True
    while True:
        found = next(own, end)
        having = ranks.all_reduce(float(found is not end))
        if not having:
            return
        if is_first and having < ranks.world_size:
            source = ranks.gather_objects(found is not end).index(True)
            batch = ranks.broadcast_object(found if found is not end else None, source)
        is_first = False
        if found is not end:
            batch = found
        yield batch, found is not end
