"""Keeps track of gradients: which batches make a step, how much each of them counts, and whether they were used."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

from paceline.train.collective_trace import script_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from paceline.train.data.loader import Loader
    from paceline.train.group.group import Group
    from paceline.train.parallel.prepared import Prepared

    from .passes import Pass

MEAN, WEIGHT, SUM = "no weight=", "weight=", 'reduction="sum"'  # how a loss is weighted
_PATIENCE = 1000  # batches without a step that is seen, after which no step of an optimizer is expected


# -- the batches of a step ---------------------------------------------------------------------------------------------


class Window:
    """The batches that make one step of the optimizer: one, or those of an accumulation.

    Each batch's loss is divided by the samples that the whole window is expected to have. If their number turns out to
    be different, as with batches of a user's own sizes or an epoch of unknown length, `correction` corrects it.
    """

    def __init__(self, batches: int) -> None:
        self._usual = self.batches = batches  # the latter as far as it is known
        self.begun = 0  # batches so far
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

    def weight(self, loader: Loader | Pass, ranks: int) -> float:
        """Factor for the mean loss of this rank's batch, so that gradients are the mean over all samples."""
        if self._usual == 1 or not self.begun:  # set up within the current step
            return loader.weight
        return loader.samples * ranks / self._divisor

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


# -- the gradients of a step -------------------------------------------------------------------------------------------


class Gradients:
    """The gradients of the batches that make a step of the optimizer."""

    def __init__(self, group: Group, prepared: Prepared) -> None:
        self.trained = self.has_seen = False  # the current batch was trained on; any was
        self.number = 0  # that of the current batch, from 1, over all loops
        self._group, self._prepared = group, prepared
        self._unused = False  # whether gradients, of this batch or of earlier ones, were not used yet
        self._stepped = False  # whether an optimizer has stepped since the last backward of this batch
        self._has_ever_stepped = False
        self._windows: dict[int, Window] = {}  # by the batches per step of the optimizer
        self._outside: dict[int, int] = {}  # backwards of batches that are not counted, by the same
        self._weights: dict[int, GivenWeights] = {}  # that the script gives its losses, by the same
        self._latest = 1  # the batches per step of the last backward
        self._is_within = False  # `backward`
        self._is_weighted = False  # whether this batch's loss was passed to `backward`
        # The pass under way.
        self.has_stepped = self._has_computed = False  # whether an optimizer has; whether `backward` was called in it
        self._had_gradients = False  # whether there were some at its start, which were not computed in it
        self._before: dict[int, Window] = {}  # the windows at its start

    # -- passes and batches --------------------------------------------------------------------------------------------

    def pass_begins(self) -> None:
        self.has_stepped = self._has_computed = False
        self._had_gradients = self._prepared.has_optimizers and self._prepared.has_gradients()
        self._before = {every: copy.copy(window) for every, window in self._windows.items()}

    def look_ends(self) -> None:
        """End a pass in which nothing was trained: accumulations are where they were at its start."""
        self._windows = self._before

    def batch_begins(self, loader: Loader | Pass) -> None:
        self.trained = self._stepped = self._is_weighted = False
        self.number += 1
        for every in self._prepared.accumulates:
            window = self._windows.get(every)
            if window is None or not window.begun:
                window = self._windows[every] = Window(every)
            window.begin(loader)
        self._prepared.exchange(lambda every: self._window(every).is_complete)

    def batch_ends(self) -> None:
        for window in self._windows.values():
            window.end()

    def put_back(self, loader: Loader | Pass) -> None:
        """Take back a batch that was not trained on, and will come again."""
        for window in self._windows.values():
            window.put_back(loader)

    # -- the current batch ---------------------------------------------------------------------------------------------

    def backward(
        self,
        compute: Callable[[float | Tensor], None],
        batches: Sequence[Loader | Pass],  # of which the loss is; the first one counts the steps
        step: int,
        weight: float | Tensor | None = None,  # of the loss; None: the number of samples of the batch
        *,
        is_sum: bool = False,  # over the samples, and not their mean
        inputs: Sequence[Tensor] | None = None,
    ) -> None:
        every = self._latest = self._prepared.accumulate_of_loss()
        self._prepared.check_partial()
        factor = self._loss_factor(every, batches, weight, is_sum=is_sum)
        self._stepped = False
        self._is_within = self._is_weighted = self._has_computed = True
        try:
            self._prepared.backward(compute, factor, step, inputs)
        finally:
            self._is_within = False
        self.trained = self.has_seen = True
        self._unused = not self._stepped  # hooks of the parameters may step within
        if not batches:
            self._outside[every] = self._outside.get(every, 0) + 1
            self._prepared.exchange(lambda each: (self._outside.get(each, 0) + 1) % each == 0)

    def _loss_factor(
        self, every: int, batches: Sequence[Loader | Pass], weight: float | Tensor | None, *, is_sum: bool
    ) -> float | Tensor:
        """The factor for a loss, with `every` batches per step; corrects the gradients of earlier batches."""
        window, source = self._window(every), batches[0] if batches else None
        if source is not None:
            samples = any(each.samples for each in batches)
            if weight is None:
                _check_weights(batches, self._group.data_size, is_sum=is_sum)
            is_first, is_last, batch = window.begun <= 1, window.is_complete, (True, self.number)
        else:
            begun = self._outside.get(every, 0)
            is_first, is_last, batch = begun % every == 0, (begun + 1) % every == 0, (False, begun)
            samples = True
        weights = self._weights.setdefault(every, GivenWeights(self._group, every))
        weights.begin(WEIGHT if weight is not None else SUM if is_sum else MEAN, batch, is_first=is_first)
        correction: float | Tensor | None = None
        factor: float | Tensor
        if weight is not None:  # a stand-in does not count
            correction, factor = weights.factors(weight if samples else 0.0, is_last=is_last)
        elif is_sum:
            factor = float(self._group.data_size if samples else 0)  # the exchange divides by it
        elif source is not None:
            correction = window.correction()
            factor = window.weight(source, self._group.data_size)
        else:
            factor = 1 / every
        if correction is not None and (isinstance(correction, torch.Tensor) or correction != 1):
            self._prepared.scale_gradients(every, correction)
        return factor

    def optimizer_stepped(self) -> None:
        self.trained, self._unused = True, False
        self._stepped = self._has_ever_stepped = self.has_seen = self.has_stepped = True

    def are_plain(self) -> bool:
        """Whether gradients that an optimizer has just used were not computed by `backward`."""
        if self._is_within or not self._prepared.parameters_with_gradients():
            return False
        return self._prepared.has_new_gradients or not self._is_weighted

    def is_accumulating(self, every: int | None, *, within: bool) -> bool:
        """Whether the last backward only added to the gradients, so that the optimizer does not step yet."""
        every = every or self._latest
        if within:
            return not self._window(every).is_complete
        return self._outside.get(every, 0) % every != 0

    # -- whether they are lost in a checkpoint -------------------------------------------------------------------------

    @property
    def is_used(self) -> bool:
        """Whether the current batch was trained on: gradients were computed, and used if there are optimizers."""
        return self.trained and not (self._unused and self._prepared.has_optimizers)

    @property
    def is_begun(self) -> bool:
        """Whether an accumulation by `Strategy.accumulate` has begun and is not complete."""
        return any(window.begun for window in self._windows.values())

    def is_open(self, done: int) -> bool:
        """Whether there are gradients of this pass that an optimizer may still use."""
        if self._has_computed:
            return self._unused and self._prepared.has_optimizers
        return not self._had_gradients and self.is_accumulating_by_hand(done)

    def is_accumulating_by_hand(self, done: int) -> bool:
        """Whether there are gradients that an optimizer may use together with those of later batches."""
        if self._stepped or not self._prepared.has_optimizers:
            return False
        return (self._has_ever_stepped or done <= _PATIENCE) and self._prepared.has_gradients()

    def check_saved(self, *, within: bool) -> bool:
        """Whether a checkpoint taken here loses no gradients: checkpoints do not hold them."""
        is_look = within and not (self._has_computed or self.has_stepped)
        for window in (self._before if is_look else self._windows).values():
            begun = window.begun - (
                within and not is_look and not self.trained
            )  # batches of an accumulation that is not complete
            if begun > 0 and not (within and self.trained and window.is_complete):
                raise RuntimeError(
                    f"the gradients of {begun} of {window.batches} accumulated batches are in no checkpoint; "
                    "save when run.accumulating is False"
                )
        if not (self._unused and self._prepared.has_optimizers and self._prepared.has_gradients()):
            return True
        if within:
            raise RuntimeError("the gradients of this step are in no checkpoint; save after optimizer.step()")
        return False

    def _window(self, every: int) -> Window:
        """The window for steps of `every` batches; for what was set up within this step, of this batch alone."""
        return self._windows.get(every) or Window(1)


def _check_weights(batches: Sequence[Loader | Pass], ranks: int, *, is_sum: bool) -> None:
    """Refuse a loss of several loaders' batches that have different weights on some rank: there is one factor for it.

    All ranks know the totals, and raise together. Where a loader does not divide its batches evenly, as a stream that
    is read in parts, a rank may see the difference alone; the others are then told that it has failed.
    """
    first = batches[0]
    for other in batches[1:]:
        if is_sum:  # where both batches are stand-ins or none
            alike = min(first.total, ranks) == min(other.total, ranks) and bool(first.samples) == bool(other.samples)
        else:
            is_even = first.total % ranks == other.total % ranks == 0
            alike = (is_even or first.total == other.total) and first.weight == other.weight
        if not alike:
            raise RuntimeError(
                f"run.backward at {script_line()}: a step with {first.total} samples of one training loader and "
                f"{other.total} of another cannot be divided alike among {ranks} ranks, so no weight of the loss is "
                f"right for both; pass drop_last=True to run.dataloader, and a global_batch_size that {ranks} divides"
            )
