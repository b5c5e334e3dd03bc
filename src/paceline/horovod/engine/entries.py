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
    """A submitted operation, and in the end its result.

    Attributes:
        inputs: the tensors, detached.
        targets: where the results go, detached; None where their shape is not known before.
        outputs: what `synchronize` returns for `targets`: in place, the tensors themselves.
        grouped: whether the result is a list.
        ready: CUDA event after which the inputs are there; None on the CPU.
        error: why it failed; "" if it did not.
        received: splits received by alltoall; the value of a response without tensors.
        splits: the tensor in whose type and on whose device `received` is returned.
        staged: devices of the inputs and the targets there, of an entry that is done on the CPU; else None.
    """

    request: Request
    inputs: list[Tensor]
    targets: list[Tensor] | None = None
    outputs: list[Tensor] | None = None
    grouped: bool = False
    splits: Tensor | None = None
    ready: Any = None
    is_done: bool = False
    error: str = ""
    received: Any = None
    staged: tuple[list[Any], list[Tensor] | None] | None = None

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
        """Copy results back to the GPU."""
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
