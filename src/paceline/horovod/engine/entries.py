"""An operation as the rank that submitted it sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from .negotiation import Request


class Entry:
    """A submitted operation, and in the end its result.

    Attributes:
        request: what was submitted.
        inputs: the tensors, detached.
        targets: where the results go, detached; None where their shape is not known before.
        outputs: what `synchronize` returns for `targets`: in place, the tensors themselves.
        grouped: whether the result is a list.
        ready: CUDA event after which the inputs are there; None on the CPU.
        is_done: whether it has ended.
        error: why it failed; "" if it did not.
        received: splits received by alltoall; the value of a response without tensors.
        splits: the tensor in whose type and on whose device `received` is returned.
        finished: CUDA event after which the results are there; None if they are.
    """

    __slots__ = (
        "error", "finished", "grouped", "inputs", "is_done", "outputs", "ready", "received", "request", "splits",
        "targets",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        inputs: list[Tensor],
        targets: list[Tensor] | None = None,
        outputs: list[Tensor] | None = None,
        grouped: bool = False,
    ) -> None:
        self.request = request
        self.inputs = inputs
        self.targets = targets
        self.outputs = outputs
        self.grouped = grouped
        self.ready: Any = None
        self.finished: Any = None
        self.is_done = False
        self.error = ""
        self.received: Any = None
        self.splits: Tensor | None = None
