"""Adasum: adds gradients that are orthogonal, and averages those that are parallel.

Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation", arXiv 2006.02924, eq. 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def combine(vectors: list[Tensor]) -> Tensor:
    """Combine the vectors of 2ᵏ ranks, pair by pair; rank 0 with rank 1 first."""
    while len(vectors) > 1:
        vectors = [_pair(one, other) for one, other in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]


def _pair(one: Tensor, other: Tensor) -> Tensor:
    dot, ones, others = float(one @ other), float(one @ one), float(other @ other)
    return one * (1 - dot / (2 * ones) if ones else 1.0) + other * (1 - dot / (2 * others) if others else 1.0)
