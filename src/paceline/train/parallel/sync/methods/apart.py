"""What methods have in common with which ranks train alone for some steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .synchroniser import Synchroniser

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from .averaging import Averaging
    from .every_step import EveryStepExchange


# What methods have in common with which ranks train alone for some steps.


class ApartExchange(Synchroniser):
    """Averages what the ranks of a model have learned after some steps of its optimizer."""

    follows_optimizer = True

    def __init__(self, module: torch.nn.Module, averaging: Averaging | EveryStepExchange) -> None:
        self._module, self._averaging = module, averaging

    @property
    def sent(self) -> int:  # type: ignore[override]  # it is counted elsewhere
        return self._averaging.sent

    @property
    def error(self) -> Exception | None:
        return self._averaging.error

    def _load_own(self, state: Mapping[str, Any]) -> None:
        """Go on with the model and the optimizer that this rank has kept, if it had any of its own."""
        if state["model"] is not None:
            self._module.load_state_dict(state["model"])
        if state["optimizer"] is not None and self._optimizer is not None:
            self._optimizer.load_state_dict(state["optimizer"])

    def close(self) -> None:
        self._averaging.close()


def means(tensors: Sequence[torch.Tensor], average: Callable[[torch.Tensor], Any]) -> list[torch.Tensor]:
    """The means of tensors over all ranks, those of one type in one exchange."""
    found: dict[int, torch.Tensor] = {}
    for dtype in dict.fromkeys(each.dtype for each in tensors):
        alike = [number for number, each in enumerate(tensors) if each.dtype is dtype]
        flat = torch.cat([tensors[number].detach().reshape(-1) for number in alike])
        average(flat)
        parts = torch.split(flat, [tensors[number].numel() for number in alike])
        found.update(zip(alike, parts, strict=True))
    return [found[number].view(each.shape) for number, each in enumerate(tensors)]


def floating(tensors: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors of floating-point or complex numbers among some values."""
    return [each for each in tensors if torch.is_tensor(each) and (each.is_floating_point() or each.is_complex())]


def states(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """What an optimizer keeps for its parameters, in their order and of their shapes."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    return [
        each
        for parameter in parameters
        for each in floating(optimizer.state.get(parameter, {}).values())
        if each.shape == parameter.shape
    ]
