"""What goes from stage to stage: results of forward passes, and their gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from .blocks import Between

if TYPE_CHECKING:
    from .stages import Stages


class _Form(NamedTuple):
    """What the next stage must know of a result before it comes."""

    shape: torch.Size
    dtype: torch.dtype
    has_gradient: bool
    length: int | None


class Links:
    """This rank's links to the stages before and after it.

    A result is told about once for each form of a microbatch, which is the same on all stages. So a step sends nothing
    but numbers.
    """

    def __init__(self, stages: Stages, device: torch.device) -> None:
        self._stages, self._device = stages, device
        self._told: dict[Any, _Form] = {}
        self._sent: list[tuple[dist.Work, torch.Tensor]] = []  # on the way, with what must stay as it is
        self.bytes = 0  # that this rank has sent

    def send_result(self, result: Between, form: Any) -> None:
        """Send a result to the next stage; `form` is what its shape depends on."""
        tensor = result.tensor
        own = _Form(tensor.shape, tensor.dtype, tensor.requires_grad, result.length)
        known = self._told.get(form)
        if known is None:
            self._told[form] = own
            dist.send_object_list([own], self._next, group=self._stages.forward)
        elif known != own:
            raise RuntimeError(
                f"a stage has passed on {known}, and now {own} for arguments of the same shapes: with pipeline=, the "
                "shapes of what blocks return may depend on those of the model's arguments only"
            )
        self._send(tensor.detach(), self._next, self._stages.forward)

    def receive_result(self, form: Any) -> Between:
        """What the stage before has sent, of which a backward pass gives the gradient if it has one."""
        if form not in self._told:
            box: list[Any] = [None]
            dist.recv_object_list(box, self._previous, group=self._stages.forward)
            self._told[form] = box[0]
        known = self._told[form]
        tensor = torch.empty(known.shape, dtype=known.dtype, device=self._device)
        self._receive(tensor, self._previous, self._stages.forward)
        return Between(tensor.requires_grad_(known.has_gradient and torch.is_grad_enabled()), known.length)

    def send_gradient(self, received: torch.Tensor) -> None:
        """Send the gradient of what the stage before has sent."""
        gradient = torch.zeros_like(received) if received.grad is None else received.grad
        self._send(gradient, self._previous, self._stages.backward)

    def receive_gradient(self, result: torch.Tensor) -> torch.Tensor:
        """The gradient of what this rank has sent."""
        gradient = torch.empty_like(result, memory_format=torch.contiguous_format)
        self._receive(gradient, self._next, self._stages.backward)
        return gradient

    def finish(self) -> None:
        """Wait until everything is sent."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def forget(self) -> None:
        """Forget what is on the way: an error has ended a step."""
        self._sent.clear()

    @property
    def _next(self) -> int:
        return self._stages.ranks[self._stages.index + 1]

    @property
    def _previous(self) -> int:
        return self._stages.ranks[self._stages.index - 1]

    def _send(self, tensor: torch.Tensor, rank: int, group: dist.ProcessGroup) -> None:
        tensor = tensor.contiguous()
        work = dist.isend(tensor, rank, group=group)
        assert work is not None, "this rank is in the group"
        self._sent = [each for each in self._sent if not each[0].is_completed()]
        self._sent.append((work, tensor))
        self.bytes += tensor.nbytes

    @staticmethod
    def _receive(tensor: torch.Tensor, rank: int, group: dist.ProcessGroup) -> None:
        work = dist.irecv(tensor, rank, group=group)
        assert work is not None, "this rank is in the group"
        work.wait()
