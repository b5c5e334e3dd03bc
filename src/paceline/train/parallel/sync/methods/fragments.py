"""Fragments of a model: some of its layers, which take their outer steps together."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Future = torch.futures.Future[torch.Tensor]


class Fragment:
    """Parameters in one tensor, with the state of their outer optimizer.

    Attributes:
        parameters: in the order of the model.
        key: the number of this fragment, and that of its elements.
        common: what all ranks have in common since the last outer step; empty before the first step.
        momentum: of the outer optimizer, as large.
        pending: the mean outer gradient of the exchange that was begun last, or its future, until the outer step.
    """

    def __init__(self, number: int, parameters: Sequence[torch.nn.Parameter], dtype: torch.dtype) -> None:
        self.parameters = parameters
        self.key = number, sum(parameter.numel() for parameter in parameters)
        self.common = torch.empty(0, dtype=dtype)
        self.momentum = torch.empty(0, dtype=dtype)
        self.pending: Future | torch.Tensor | None = None

    def local(self) -> torch.Tensor:
        """A copy of the parameters of this rank."""
        return torch.cat([parameter.detach().reshape(-1).to(self.common.dtype) for parameter in self.parameters])

    def write(self, values: torch.Tensor) -> None:
        """Set the parameters of this rank."""
        parts = torch.split(values, [parameter.numel() for parameter in self.parameters])
        with torch.no_grad():
            for parameter, part in zip(self.parameters, parts, strict=True):
                parameter.copy_(part.view(parameter.shape))

    def start(self) -> None:
        """Begin with the parameters of this rank, which are the same on all ranks."""
        self.common = self.local()
        self.momentum = torch.zeros_like(self.common)
        self.pending = None

    def received(self) -> torch.Tensor | None:
        """The mean outer gradient, for which this waits; None if no exchange was begun."""
        if self.pending is not None and not isinstance(self.pending, torch.Tensor):
            try:
                self.pending = self.pending.wait()
            except RuntimeError:
                raise
            except Exception as error:
                raise RuntimeError(f"the exchange of parameters failed: {error}") from error
        return self.pending

    def outer_step(self, rate: float, momentum: float, keep: float) -> None:
        """A step of SGD with Nesterov momentum, as torch.optim.SGD takes it, by the outer gradient received."""
        gradient = self.received()
        if gradient is None:
            return
        self.pending = None
        self.momentum.mul_(momentum).add_(gradient)
        self.common.add_(gradient.add(self.momentum, alpha=momentum), alpha=-rate)
        self.write(self.common if keep == 0 else self.local().mul_(keep).add_(self.common, alpha=1 - keep))

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds; an exchange that is under way is waited for, and its result is in it."""
        pending = self.received()
        return {"common": self.common.clone(), "momentum": self.momentum.clone(), "pending": pending}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on."""
        device = self.parameters[0].device
        self.common, self.momentum = state["common"].to(device), state["momentum"].to(device)
        self.pending = None if state["pending"] is None else state["pending"].to(device)


def deal(module: torch.nn.Module, count: int) -> list[Fragment]:
    """Deal the layers of a model out to fragments of similar size: the largest first, each to the smallest fragment.

    Layers are the modules with trained parameters of their own. With layers of equal size, each fragment has every
    `count`-th of them, which Streaming DiLoCo (arXiv:2501.18512) calls strided.
    """
    trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    layers: dict[str, list[tuple[int, torch.nn.Parameter]]] = {}
    for number, (name, parameter) in enumerate(trained):
        layers.setdefault(name.rpartition(".")[0], []).append((number, parameter))
    if count > len(layers):
        raise ValueError(
            f"fragments={count} is more than the {len(layers)} layers of {type(module).__name__} that have trained "
            f"parameters; pass fragments={len(layers)} or less"
        )
    dtype = functools.reduce(torch.promote_types, (parameter.dtype for _, parameter in trained), torch.float32)
    dealt: list[list[tuple[int, torch.nn.Parameter]]] = [[] for _ in range(count)]
    sizes = [0] * count
    for layer in sorted(layers.values(), key=_size, reverse=True):
        smallest = sizes.index(min(sizes))
        dealt[smallest] += layer
        sizes[smallest] += _size(layer)
    return [
        Fragment(number, [parameter for _, parameter in sorted(each, key=lambda one: one[0])], dtype)
        for number, each in enumerate(dealt)
    ]


def _size(layer: Sequence[tuple[int, torch.nn.Parameter]]) -> int:
    return sum(parameter.numel() for _, parameter in layer)
