"""Which batches make one step of the optimizer, and how much each of them counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from paceline.train.data.loader import Loader
    from paceline.train.group.group import Group

    from .passes import Pass

MEAN, WEIGHT, SUM = "no weight=", "weight=", 'reduction="sum"'  # how a loss is weighted


class Window:
    """The batches that make one step of the optimizer: one, or those of an accumulation.

    Each batch's loss is divided by the samples that the whole window is expected to have. If their number turns out to
    be different, as with batches of a user's own sizes or an epoch of unknown length, `correction` corrects it.

    Attributes:
        batches: their number, as far as it is known.
        begun: batches so far.
    """

    def __init__(self, batches: int) -> None:
        self._usual = self.batches = batches
        self.begun = 0
        self._samples = 0  # of all ranks together, in the batches so far
        self._divisor = 0  # of the losses
        self._is_complete = False

    def begin(self, loader: Loader | Pass) -> None:
        """Start a batch of `loader`: the first of a new window if the last window is complete."""
        if self._usual > 1:
            if self.begun == 0:
                self._expect(loader)
            self._samples += loader.total
        self.begun += 1
        self._is_complete = self.begun >= self.batches or loader.is_last

    def _expect(self, loader: Loader | Pass) -> None:
        """Expect as many samples in each batch as in the first one, but not more than the epoch has."""
        total, remaining = loader.total, loader.remaining
        samples, self.batches = self._usual * total, self._usual
        if remaining is not None and total:
            samples = min(samples, total + remaining)
            self.batches = -(-samples // total)
        self._samples, self._divisor = 0, max(samples, 1)

    def end(self) -> None:
        """End a batch that was trained on."""
        if self._is_complete:
            self.begun = 0

    def put_back(self, loader: Loader | Pass) -> None:
        """Take back a batch that was not trained on, and will come again."""
        if self.begun:
            self.begun -= 1
            self._samples -= loader.total

    def correction(self) -> float:
        """Factor for the gradients so far, before those of the current batch are added."""
        if self._usual == 1 or not self._is_complete or self._divisor == self._samples or not self._samples:
            return 1.0
        factor = self._divisor / self._samples
        self._divisor = self._samples
        return factor

    def weight(self, loader: Loader | Pass, world_size: int) -> float:
        """Factor for the mean loss of this rank's batch, so that gradients are the mean over all samples."""
        if self._usual == 1 or not self.begun:  # set up within the current step
            return loader.weight
        return loader.samples * world_size / self._divisor

    @property
    def is_complete(self) -> bool:
        """Whether the current batch is the last one."""
        return self._is_complete or not self.begun


class GivenWeights:
    """The weights that a script gives its losses, over the batches that make one step of the optimizer.

    The gradients of a step are the weighted mean over ranks and batches. The sum of all weights is known only at the
    last batch. So the gradients of earlier batches are divided by an estimate, which is corrected then.
    """

    def __init__(self, group: Group, batches: int) -> None:
        self._group, self._batches = group, batches
        self._sum: torch.Tensor | None = None  # of this rank's weights in the batches so far
        self._divisor: torch.Tensor | None = None  # of their gradients
        self._kind = ""
        self._batch: object = None

    def begin(self, kind: str, batch: object, *, is_first: bool) -> None:
        """Start a backward."""
        if self._batches == 1:
            return
        if is_first and batch != self._batch:
            self._kind, self._sum, self._divisor = kind, None, None
        if kind != self._kind:
            raise RuntimeError(f"this loss has {kind}, but an earlier one of this accumulation has {self._kind}")
        if kind == WEIGHT and batch == self._batch:
            raise RuntimeError(
                "run.backward was called twice for a batch with weight= and accumulate; add up the losses"
            )
        self._batch = batch

    def factors(self, weight: float | torch.Tensor, *, is_last: bool) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Factors for the gradients so far (None: leave them) and for the loss.

        In the last batch of a step, this is a collective of all ranks.
        """
        own = torch.as_tensor(weight).detach().to(self._group.device, torch.float64).reshape(())
        ranks = self._group.world_size
        total = own if self._sum is None else self._sum + own
        if not is_last:
            self._sum = total
            if self._divisor is None:
                self._divisor = torch.where(own > 0, own, 1) * ranks * self._batches
            return None, own * ranks / self._divisor
        total = self._group.all_reduce(total)
        total = torch.where(total > 0, total, 1)
        correction = None if self._divisor is None else self._divisor / total
        self._sum = self._divisor = None
        return correction, own * ranks / total
