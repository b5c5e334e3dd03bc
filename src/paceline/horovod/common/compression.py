"""Compression of what is sent, for tensors of any framework."""

from __future__ import annotations

from typing import Any


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
