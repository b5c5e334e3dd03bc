"""Compression of what is sent."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class Compressor:
    """How a tensor is made smaller, and larger again."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The smaller tensor, and what `decompress` needs besides."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The tensor as it was before."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Changes nothing."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The tensor itself."""
        return tensor


class FP16Compressor(Compressor):
    """Sends floating-point numbers in 16 bits."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The tensor in 16 bits, and its type."""
        return (tf.cast(tensor, tf.float16) if tensor.dtype.is_floating else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The tensor in its type."""
        return tf.cast(tensor, ctx)


class Compression:
    """The compressions there are."""

    none = NoneCompressor
    fp16 = FP16Compressor
