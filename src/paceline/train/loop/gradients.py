"""What becomes of gradients: which batches they are of, and whether an optimizer has used them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from .accumulation import MEAN, SUM, WEIGHT, GivenWeights, Window

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from paceline.train.data.loader import Loader
    from paceline.train.group.group import Group
    from paceline.train.parallel.prepared import Prepared

    from .passes import Pass

_PATIENCE = 1000  # batches after which an optimizer whose steps are not seen is not waited for


class Gradients:
    """The gradients of the batches that make a step of the optimizer.

    Attributes:
        trained: the batch at hand has been trained on.
    """

    def __init__(self, group: Group, prepared: Prepared) -> None:
        """There are none yet.

        Args:
            group: the ranks.
            prepared: what was set up.
        """
        self.trained = False
        self._group, self._prepared = group, prepared
        self._unused = False  # gradients, of this batch or of earlier ones
        self._stepped = False  # an optimizer has, since the last backward of this batch
        self._has_ever_stepped = False
        self._windows: dict[int, Window] = {}  # by the batches per step of the optimizer
        self._outside: dict[int, int] = {}  # backwards of batches that are not counted, by the same
        self._weights: dict[int, GivenWeights] = {}  # that the script gives its losses, by the same
        self._number = 0  # of the batch at hand
        self._latest = 1  # the batches per step of the last backward

    # -- batches -------------------------------------------------------------------------------------------------------

    def batch_begins(self, loader: Loader | Pass) -> None:
        """A batch of `loader` is there."""
        self.trained = self._stepped = False
        self._number += 1
        for every in self._prepared.accumulates:
            window = self._windows.get(every)
            if window is None or not window.begun:
                window = self._windows[every] = Window(every)
            window.begin(loader)
        self._prepared.exchange(lambda every: self._window(every).is_complete)

    def batch_ends(self) -> None:
        """The batch counts as trained on."""
        for window in self._windows.values():
            window.end()

    def put_back(self, loader: Loader | Pass) -> None:
        """The batch was not trained on, and comes again."""
        for window in self._windows.values():
            window.put_back(loader)

    # -- the batch at hand ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def backward(
        self,
        batch: Loader | Pass | None,
        step: int,
        weight: float | Tensor | None = None,
        *,
        is_sum: bool = False,
        inputs: Sequence[Tensor] | None = None,
    ) -> Iterator[float | Tensor]:
        """Around a backward; gives what to multiply the loss of this rank's batch by.

        Args:
            batch: what the batch came from; None in a loop whose batches are not counted, where each backward is one.
            step: the number of the step at hand.
            weight: how much the loss counts; None means the samples of the batch.
            is_sum: the loss is a sum over the samples, not their mean.
            inputs: the tensors whose gradients are computed; None means all.

        Raises:
            RuntimeError: it is not known which models the loss was computed with, whose strategies differ; or the
                losses of an accumulation are weighed in different ways.
        """
        every = self._latest = self._prepared.accumulate_of_loss()
        self._prepared.check_partial()
        factor = self._loss_factor(every, batch, weight, is_sum=is_sum)
        with self._prepared.backward(factor, step, inputs):
            yield factor
        self.trained = self._unused = True
        self._stepped = False
        if batch is None:
            self._outside[every] = self._outside.get(every, 0) + 1
            self._prepared.exchange(lambda each: (self._outside.get(each, 0) + 1) % each == 0)

    def _loss_factor(
        self, every: int, source: Loader | Pass | None, weight: float | Tensor | None, *, is_sum: bool
    ) -> float | Tensor:
        """What to multiply a loss by, where so many batches make a step; corrects the gradients of those before it."""
        window = self._window(every)
        if source is not None:
            samples = source.samples
            is_first, is_last, batch = window.begun <= 1, window.is_complete, (True, self._number)
        else:
            begun = self._outside.get(every, 0)
            is_first, is_last, batch = begun % every == 0, (begun + 1) % every == 0, (False, begun)
            samples = 1
        weights = self._weights.setdefault(every, GivenWeights(self._group, every))
        weights.begin(WEIGHT if weight is not None else SUM if is_sum else MEAN, batch, is_first=is_first)
        correction: float | Tensor | None = None
        factor: float | Tensor
        if weight is not None:  # a stand-in for a batch that this rank has no samples of counts nothing
            correction, factor = weights.factors(weight if samples else 0.0, is_last=is_last)
        elif is_sum:
            factor = float(self._group.world_size if samples else 0)  # the exchange divides by it
        elif source is not None:
            correction = window.correction()
            factor = window.weight(source, self._group.world_size)
        else:
            factor = 1 / every
        if correction is not None and (isinstance(correction, torch.Tensor) or correction != 1):
            self._prepared.scale_gradients(every, correction)
        return factor

    def optimizer_stepped(self) -> None:
        """The gradients were used."""
        self.trained, self._unused = True, False
        self._stepped = self._has_ever_stepped = True

    def is_accumulating(self, every: int | None, *, within: bool) -> bool:
        """Whether the last backward only added to the gradients, so that the optimizer does not step yet.

        Args:
            every: the batches per step of the optimizer; None means those of the last backward.
            within: whether there is a batch that counts.
        """
        every = every or self._latest
        if within:
            return not self._window(every).is_complete
        return self._outside.get(every, 0) % every != 0

    # -- whether they are lost in a checkpoint -------------------------------------------------------------------------

    @property
    def is_used(self) -> bool:
        """Whether the batch at hand was trained on: gradients were computed, and used where there are optimizers."""
        return self.trained and not (self._unused and self._prepared.has_optimizers)

    @property
    def is_begun(self) -> bool:
        """Whether gradients of some batches wait for those of others, as `Strategy.accumulate` says."""
        return any(window.begun for window in self._windows.values())

    def is_accumulating_by_hand(self, done: int) -> bool:
        """Whether there are gradients that an optimizer may use together with those of further batches.

        Args:
            done: batches trained on so far.
        """
        if self._stepped or not self._prepared.has_optimizers:
            return False
        return (self._has_ever_stepped or done <= _PATIENCE) and self._prepared.has_gradients()

    def check_saved(self, *, within: bool) -> bool:
        """Whether a checkpoint taken here has all there is, and so does without gradients.

        Raises:
            RuntimeError: it is taken in the middle of a step or of an accumulation.
        """
        for window in self._windows.values():
            begun = window.begun - (within and not self.trained)  # batches whose gradients wait for others
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
        """The window of what makes a step of so many batches; of what was set up within this step, this batch alone."""
        return self._windows.get(every) or Window(1)
