"""Deep gradient compression: momentum is taken before gradients are compressed, and not after."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .pieces import all_gather
from .residuals import Residuals, starts
from .wire import Wire, all_reduce, ring_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch.distributed as dist

    from paceline.train.parallel.sync.options import DGC

_STAGES = 4  # in which the fraction falls to its last value, by the same factor each time


@dataclass(frozen=True)
class Rule:
    """How the optimizer makes steps of gradients, as far as that is done here in its place.

    Attributes:
        momentum: factor of the last step's momentum.
        nesterov: whether it is Nesterov's.
        weight_decay: factor of the parameter that is added to its gradient.
    """

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0


class DeepGradientCompression(Wire):
    """Sums momentum: of each matrix the largest values that this rank has accumulated, of each vector all.

    Source: Lin et al. 2018, arXiv:1712.01887, the algorithms for momentum and Nesterov momentum of its appendix, with
    local gradient clipping and the fractions of its warm-up training. That vectors are sent whole is from the authors'
    code.

    Attributes:
        rules: those of the parameters, by their numbers; the default is no momentum.
    """

    def __init__(self, group: dist.ProcessGroup, options: DGC, parameters: Sequence[torch.nn.Parameter]) -> None:
        super().__init__(group)
        self.rules: Sequence[Rule] = [Rule()] * len(parameters)
        self._options, self._parameters = options, parameters
        self._momenta = Residuals()
        self._unsent = Residuals()

    def sum(self, tensor: torch.Tensor, keys: Sequence[tuple[int, int]], step: int) -> None:
        places = starts(keys)
        momenta = self._momenta.of(keys, places, tensor.numel(), tensor)
        unsent = self._unsent.of(keys, places, tensor.numel(), tensor)
        gradients = tensor.to(momenta.dtype) * self._factor(tensor, keys)
        for (number, count), begin in zip(keys, places, strict=True):
            part = slice(begin, begin + count)
            self._accumulate(number, gradients[part], momenta[part], unsent[part])
        fraction = self._fraction(step)
        whole, largest = [], []
        for (number, count), begin in zip(keys, places, strict=True):
            sent = math.ceil(fraction * count)
            if self._parameters[number].dim() < 2 or 2 * sent >= count:  # a place takes as much as a value
                whole.append(slice(begin, begin + count))
            else:
                largest.append(begin + unsent[begin : begin + count].abs().topk(sent).indices)
        result = torch.zeros_like(unsent)
        self._send_whole(whole, unsent, result)
        self._send_largest(largest, unsent, momenta, result)
        tensor.copy_(result)
        for kept in (momenta, unsent):
            kept.nan_to_num_(0.0, 0.0, 0.0)

    def _factor(self, tensor: torch.Tensor, keys: Sequence[tuple[int, int]]) -> torch.Tensor | float:
        """What to multiply this rank's gradients by, so that their norm is small enough."""
        if self._options.clip is None:
            return 1.0
        if len(keys) != len(self._parameters):
            raise RuntimeError(
                "DGC(clip=…) is for the norm of all gradients, which must be exchanged at once: leave "
                "Strategy(bucket_mb=…) out, and give all parameters one type"
            )
        largest = self._options.clip / math.sqrt(self.ranks)
        by_number = {number: tensor[at : at + count] for (number, count), at in zip(keys, starts(keys), strict=True)}
        norms = [by_number[number].float().norm() for number in sorted(by_number)]  # in every bucket in this order
        return torch.clamp(largest / (torch.stack(norms).norm() + 1e-6), max=1.0)  # as torch's clip_grad_norm_ does

    def _accumulate(self, number: int, gradient: torch.Tensor, momentum: torch.Tensor, unsent: torch.Tensor) -> None:
        """Add a gradient to this rank's momentum, and that to what this rank has not sent."""
        rule = self.rules[number]
        if rule.weight_decay:
            gradient.add_(self._parameters[number].detach().reshape(-1), alpha=rule.weight_decay / self.ranks)
        if rule.nesterov:
            momentum.add_(gradient).mul_(rule.momentum)
            unsent.add_(momentum).add_(gradient)
        else:
            momentum.mul_(rule.momentum).add_(gradient)
            unsent.add_(momentum)

    def _fraction(self, step: int) -> float:
        """The fraction of the values of a matrix that is sent in a step."""
        options = self._options
        step -= options.warmup
        if step < 0:
            return 1.0
        if step >= options.rampup:
            return options.fraction
        return float(options.fraction ** ((1 + step * _STAGES // options.rampup) / (_STAGES + 1)))

    def _send_whole(self, parts: Sequence[slice], unsent: torch.Tensor, result: torch.Tensor) -> None:
        """Sum what was accumulated; the momentum goes on."""
        if not parts:
            return
        total = torch.cat([unsent[part] for part in parts])
        all_reduce(total, self.group)
        self.sent += ring_bytes([total], self.ranks)
        for part, values in zip(parts, torch.split(total, [p.stop - p.start for p in parts]), strict=True):
            result[part] = values
            unsent[part] = 0

    def _send_largest(
        self, places: Sequence[torch.Tensor], unsent: torch.Tensor, momenta: torch.Tensor, result: torch.Tensor
    ) -> None:
        """Sum the values in these places. Their momentum ends there: it is of gradients that are old by now."""
        if not places:
            return
        own = torch.cat(list(places))
        values = unsent[own].float()
        unsent[own] = momenta[own] = 0
        sent = torch.cat([values.view(torch.int32), own.to(torch.int32)])
        received = all_gather(sent, self.group)
        self.sent += (self.ranks - 1) * sent.numel() * sent.element_size()
        for part in received.view(self.ranks, 2, -1):
            result.index_add_(0, part[1].long(), part[0].view(torch.float32).to(result.dtype))

    def state_dict(self) -> dict[str, Any]:
        return {"momenta": self._momenta.state_dict(), "unsent": self._unsent.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._momenta.load_state_dict(state["momenta"])
        self._unsent.load_state_dict(state["unsent"])
