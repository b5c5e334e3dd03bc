"""Compression of what is sent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.horovod.common.compression import Compressor, NoneCompressor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class FP16Compressor(Compressor):
    """Sends floating-point numbers in 16 bits."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor in 16 bits, and its type."""
        if tensor.dtype.is_floating_point:
            return tensor.to(torch.float16), tensor.dtype
        return tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """The tensor in its type."""
        return tensor.to(ctx) if isinstance(ctx, torch.dtype) and ctx.is_floating_point else tensor


class Compression:
    """The compressions there are."""

    none = NoneCompressor
    fp16 = FP16Compressor
