"""PowerSGD: gradients as products of two thin matrices, with error feedback."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from paceline.train.parallel.sync.forecast import matrix

from .wire import Residuals, Wire, all_reduce, ring_bytes, starts, sum_sent_as

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch.distributed as dist

    from paceline.train.torch_types import StateDict

_SEED = 20190531  # of the first matrices Q, which must be the same on all ranks


class PowerSGD(Wire):
    """Sends a gradient of n rows and m columns as matrices of n x r and m x r numbers.

    The second matrix of a step is the first guess of the next one. The matrices are sent as bf16, whose range is that
    of fp32; what rounding loses is added in the next step, with all else that was not sent. A rank sends 2 (K - 1) / K
    of the bytes of all matrices, and of the gradients that are too small for that and sent as they are, with K ranks.

    Source: Vogels et al. 2019, arXiv:1905.13727, algorithms 1 and 2.
    """

    def __init__(self, group: dist.ProcessGroup, shapes: Sequence[torch.Size], rank: int, warmup: int) -> None:
        super().__init__(group)
        self._shapes = [matrix(shape, rank) for shape in shapes]
        self._rank, self._warmup = rank, warmup
        self._residuals = Residuals()
        self._seconds: dict[int, torch.Tensor] = {}  # Q by the number of the parameter

    def sum(self, tensor: torch.Tensor, keys: Sequence[tuple[int, int]], step: int) -> None:
        if step < self._warmup:
            all_reduce(tensor, self.group)
            self.sent += ring_bytes([tensor], self.ranks)
            return
        kept = self._residuals.of(keys, starts(keys), tensor.numel(), tensor)
        kept += tensor
        result = tensor.to(kept.dtype)
        gradients = [result[at : at + count] for at, (_, count) in zip(starts(keys), keys, strict=True)]
        matrices, plain = [], []
        for (number, count), begin, gradient in zip(keys, starts(keys), gradients, strict=True):
            shape = self._shapes[number]
            if shape is None:
                plain.append(gradient)
            else:
                matrices.append((number, kept[begin : begin + count].view(shape), gradient.view(shape)))
        is_finite = self._sum(matrices, plain)
        kept.sub_(result, alpha=1 / self.ranks)
        if not is_finite:
            kept.nan_to_num_(0.0, 0.0, 0.0)
        if result is not tensor:
            tensor.copy_(result)
        for (number, count), begin in zip(keys, starts(keys), strict=True):
            if self._shapes[number] is None:
                kept[begin : begin + count].zero_()

    def _sum(self, matrices: Sequence[tuple[int, torch.Tensor, torch.Tensor]], plain: Sequence[torch.Tensor]) -> bool:
        """Sum gradients, those that are compressed as `(number, with residual, gradient)`."""
        firsts = [torch.mm(each, self._second(number, each)) for number, each, _ in matrices]
        self._exchange(firsts, plain)
        if not matrices:
            return True
        bases = [torch.linalg.qr(each)[0] for each in firsts]
        seconds = [torch.mm(each.T, base) for (_, each, _), base in zip(matrices, bases, strict=True)]
        self._exchange(seconds, [])
        for (number, _, gradient), base, second in zip(matrices, bases, seconds, strict=True):
            self._seconds[number] = second
            torch.mm(base, second.T, out=gradient)
        unusable = [number for number, _, _ in matrices if not self._seconds[number].isfinite().all()]
        for number in unusable:  # on all ranks alike; a gradient was not finite
            del self._seconds[number]
        return not unusable

    def _exchange(self, matrices: Sequence[torch.Tensor], plain: Sequence[torch.Tensor]) -> None:
        """Sum matrices, sent as bf16, and gradients, sent as they are, in place."""
        kinds = [(tensors, torch.cat([each.view(-1) for each in tensors])) for tensors in (matrices, plain) if tensors]
        types = [torch.bfloat16 if tensors is matrices else total.dtype for tensors, total in kinds]
        self.sent += sum_sent_as([(total, each) for (_, total), each in zip(kinds, types, strict=True)], self.group)
        for tensors, total in kinds:
            for each, part in zip(tensors, torch.split(total, [one.numel() for one in tensors]), strict=True):
                each.copy_(part.view(each.shape))

    def _second(self, number: int, like: torch.Tensor) -> torch.Tensor:
        found = self._seconds.get(number)
        if found is None:
            generator = torch.Generator().manual_seed(_SEED + number)
            found = torch.randn(like.shape[1], self._rank, generator=generator)
        return found.to(like)

    def state_dict(self) -> StateDict:
        seconds = {str(number): each.clone() for number, each in self._seconds.items()}
        return {"residuals": self._residuals.state_dict(), "seconds": seconds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._residuals.load_state_dict(state["residuals"])
        self._seconds = {int(number): each for number, each in state["seconds"].items()}
