"""Error feedback: what a compression has not sent of a gradient is added to the gradient of the next step.

Source: Seide et al. 2014, "1-bit stochastic gradient descent"; Karimireddy et al. 2019, arXiv:1901.09847.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Residuals:
    """What was not sent, by parameters. Buckets change after the first step, and in a process that resumes."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[tuple[int, int], ...], torch.Tensor] = {}
        self._parts: dict[int, torch.Tensor] = {}  # of each parameter, inside of its bucket's tensor

    def of(
        self, keys: Sequence[tuple[int, int]], offsets: Sequence[int], size: int, like: torch.Tensor
    ) -> torch.Tensor:
        """The residuals of a bucket, in one tensor, to be changed in place."""
        found = self._buckets.get(tuple(keys))
        if found is not None:
            return found
        dtype = torch.float64 if like.dtype is torch.float64 else torch.float32
        made = torch.zeros(size, dtype=dtype, device=like.device)
        for (number, count), offset in zip(keys, offsets, strict=True):
            part = made[offset : offset + count]
            if number in self._parts:
                part.copy_(self._parts[number])
            self._parts[number] = part
        numbers = {number for number, _ in keys}
        for other in [each for each in self._buckets if numbers & {number for number, _ in each}]:
            del self._buckets[other]
        self._buckets[tuple(keys)] = made
        return made

    def state_dict(self) -> dict[str, Any]:
        """The residuals by the number of the parameter."""
        return {str(number): part.clone() for number, part in self._parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with these."""
        self._buckets.clear()
        self._parts = {int(number): part for number, part in state.items()}


def starts(keys: Sequence[tuple[int, int]]) -> list[int]:
    """Where each gradient begins in its bucket."""
    found, at = [], 0
    for _, count in keys:
        found.append(at)
        at += count
    return found
