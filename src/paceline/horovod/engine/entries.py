"""An operation as the rank that submitted it sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from .negotiation import Request


@dataclass(slots=True, eq=False)
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
