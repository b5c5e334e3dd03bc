"""An operation as the rank that submitted it sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .negotiation import Request


@dataclass(slots=True, eq=False)
class Entry:
    """A submitted operation, and in the end its result."""

    request: Request
    inputs: list[Tensor]  # the tensors, detached
    targets: list[Tensor] | None = None  # where the results go, detached; None where their shape is not known before
    outputs: list[Tensor] | None = None  # what `synchronize` returns for `targets`: in place, the tensors themselves
    grouped: bool = False  # whether the result is a list
    splits: Tensor | None = None  # the tensor in whose type and on whose device `received` is returned
    ready: Any = None  # CUDA event after which the inputs are there; None on the CPU
    is_done: bool = False
    error: str = ""  # why it failed; "" if it did not
    received: Any = None  # splits received by alltoall; the value of a response without tensors
    staged: tuple[list[Any], list[Tensor] | None] | None = None  # where inputs and targets were, if done on the CPU

    def stage(self) -> None:
        """Copy what is on a GPU to the CPU, once it has been computed."""
        if self.ready is None:
            return
        self.ready.synchronize()
        self.staged = [tensor.device for tensor in self.inputs], self.targets
        self.inputs = [tensor.cpu() for tensor in self.inputs]
        if self.targets is not None:
            self.targets = [torch.empty_like(tensor, device="cpu") for tensor in self.inputs]

    def unstage(self) -> None:
        if self.staged is None:
            return
        (devices, targets), self.staged = self.staged, None
        if targets is not None:
            for target, result in zip(targets, self.targets or (), strict=True):
                target.copy_(result)
        else:
            self.outputs = [output.to(device) for output, device in zip(self.outputs or (), devices, strict=True)]
        for device in set(devices):
            torch.cuda.current_stream(device).synchronize()
