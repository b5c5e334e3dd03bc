"""Batches of a step, and the microbatches that they are split into."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from paceline.train.parallel.nested import mapped, tensors_in
from paceline.train.torch_types import Arguments


class Microbatch(NamedTuple):
    """What a model is called with, what its loss compares the result with, and the number of samples."""

    given: Arguments
    targets: Any
    samples: int

    def form(self) -> tuple[Any, ...]:
        """What the shapes of a model's results may depend on."""
        return tuple((each.shape, each.dtype) for each in tensors_in(self.given))


def split(batch: Any, count: int) -> list[Microbatch]:
    """Split a batch along its first dimension; the numbers of samples differ by one at most.

    Args:
        batch: a pair of what the model is called with, an argument, a tuple of them, or a dict of them by their names,
            and what its loss compares the result with; or a dict that is both.
        count: number of microbatches; less if there are fewer samples.

    Raises:
        TypeError: it is neither of the two, or the model is called with no tensor.
    """
    if isinstance(batch, Mapping):
        inputs = targets = batch
    elif isinstance(batch, (tuple, list)) and len(batch) == 2:
        inputs, targets = batch
    else:
        raise TypeError(
            "a batch is a pair of what the model is called with and of targets, as in "
            f"run.pipeline_step((x, y), loss), or a dict of arguments, and not a {type(batch).__name__}"
        )
    first = next((each for each in tensors_in(inputs) if each.dim()), None)
    if first is None:
        raise TypeError("the model is called with no tensor, so it is not known how many samples the batch has")
    size = len(first)
    count = max(1, min(count, size))
    numbers = [len(part) for part in torch.tensor_split(torch.empty(size), count)]
    parts = zip(_split(inputs, size, count), _split(targets, size, count), numbers, strict=True)
    return [Microbatch(_arguments(own), expected, samples) for own, expected, samples in parts]


def _arguments(inputs: Any) -> Arguments:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}


def _split(value: Any, size: int, count: int) -> list[Any]:
    """Parts of what has the samples in its first dimension; everything else is in all parts."""

    def part(number: int, tensor: torch.Tensor) -> torch.Tensor:
        has_samples = tensor.dim() > 0 and len(tensor) == size
        return torch.tensor_split(tensor, count)[number] if has_samples else tensor

    return [mapped(value, functools.partial(part, number)) for number in range(count)]


def shares_of(parts: list[Microbatch], weights: list[Any] | None, *, is_sum: bool) -> list[float | torch.Tensor]:
    """What the loss of each microbatch is multiplied by in that of the batch."""
    if is_sum:
        return [1.0] * len(parts)
    numbers: list[Any] = [part.samples for part in parts] if weights is None else weights
    total = sum(numbers) or 1  # nothing may count
    return [number / total if len(parts) > 1 else 1.0 for number in numbers]


def own_loss(result: Any, _: Any) -> torch.Tensor:
    """The loss that a model has computed itself."""
    found = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if found is None:
        raise TypeError(
            f"the model returns a {type(result).__name__}, which has no loss: pass a function, as in "
            "run.pipeline_step((x, y), torch.nn.functional.cross_entropy)"
        )
    return found  # type: ignore[no-any-return]
