"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.horovod.common.process import size

from .mpi_ops import Sum, allreduce


class SyncBatchNorm(_BatchNorm):
    """Normalises with mean and variance over the batches of all ranks, which may differ in size.

    In evaluation, or with one rank, it is torch's own. The arguments are those of `torch.nn.BatchNorm1d`; the input has
    shape (batch, features, …).
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise a batch.

        Raises:
            ValueError: it has fewer than two dimensions.
            HorovodInternalError: a rank is gone.
        """
        self._check_input_dim(input)
        uses_batch = self.training or not self.track_running_stats
        if not uses_batch or size() == 1:
            return super().forward(input)
        factor = self.momentum or 0.0
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        normalised, mean, variance, count = _Normalise.apply(input, self.eps)  # type: ignore[no-untyped-call]
        if self.training and self.track_running_stats and self.running_mean is not None:
            assert self.running_var is not None
            with torch.no_grad():
                unbiased = variance * (count / (count - 1).clamp(min=1))
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)
        if not self.affine:
            return normalised  # type: ignore[no-any-return]
        shape = (1, -1, *[1] * (input.dim() - 2))
        return torch.addcmul(self.bias.view(shape), normalised, self.weight.view(shape)).to(input.dtype)


class _Normalise(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) with the mean and variance of all ranks' batches."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, eps: float) -> Any:
        """The normalised batch, and per feature mean, biased variance and the count of values."""
        dims = [0, *range(2, input.dim())]
        shape = (1, -1, *[1] * (input.dim() - 2))
        values = input.to(torch.promote_types(input.dtype, torch.float32))
        own_count = values.numel() // values.shape[1]
        first = torch.cat([values.sum(dims), values.new_tensor([own_count])])
        first = allreduce(first, op=Sum)
        count = first[-1]
        mean = first[:-1] / count
        centered = values - mean.view(shape)
        variance = allreduce((centered * centered).sum(dims), op=Sum) / count
        inverse = torch.rsqrt(variance + eps)
        normalised = centered * inverse.view(shape)
        ctx.save_for_backward(normalised, inverse, count)
        result = normalised.to(input.dtype)
        ctx.mark_non_differentiable(mean, variance, count)
        return result, mean, variance, count

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """The gradient of the batch, through the mean and variance that it has contributed to on all ranks."""
        normalised, inverse, count = ctx.saved_tensors
        dims = [0, *range(2, normalised.dim())]
        shape = (1, -1, *[1] * (normalised.dim() - 2))
        grad = grads[0].to(normalised.dtype)
        sums = torch.cat([grad.sum(dims), (grad * normalised).sum(dims)])
        mean, along = (allreduce(sums, op=Sum) / count).chunk(2)
        result = (grad - mean.view(shape) - normalised * along.view(shape)) * inverse.view(shape)
        return result.to(grads[0].dtype), None
