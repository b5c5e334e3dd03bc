"""Compression of what is sent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Compressor:
    """How a tensor is made smaller, and larger again."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """The smaller tensor, and what `decompress` needs besides."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """The tensor as it was before."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Changes nothing."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """The tensor itself."""
        return tensor


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
