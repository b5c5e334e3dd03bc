"""Keeps track of gradients: which batches they are of, and whether an optimizer has used them."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

from .accumulation import MEAN, SUM, WEIGHT, GivenWeights, Window

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from paceline.train.data.loader import Loader
    from paceline.train.group.group import Group
    from paceline.train.parallel.prepared import Prepared

    from .passes import Pass

_PATIENCE = 1000  # batches without a step that is seen, after which no step of an optimizer is expected


class Gradients:
    """The gradients of the batches that make a step of the optimizer.

    Attributes:
        trained: whether the current batch was trained on.
        number: that of the current batch, from 1, over all loops.
        has_seen: whether any training was seen so far.
        has_stepped: whether an optimizer has stepped in the pass under way.
    """

    def __init__(self, group: Group, prepared: Prepared) -> None:
        """Initialize without gradients."""
        self.trained = self.has_seen = False
        self.number = 0
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
        """Start a pass over batches."""
        self.has_stepped = self._has_computed = False
        self._had_gradients = self._prepared.has_optimizers and self._prepared.has_gradients()
        self._before = {every: copy.copy(window) for every, window in self._windows.items()}

    def look_ends(self) -> None:
        """End a pass in which nothing was trained: accumulations are where they were at its start."""
        self._windows = self._before

    def batch_begins(self, loader: Loader | Pass) -> None:
        """Start a batch of `loader`."""
        self.trained = self._stepped = self._is_weighted = False
        self.number += 1
        for every in self._prepared.accumulates:
            window = self._windows.get(every)
            if window is None or not window.begun:
                window = self._windows[every] = Window(every)
            window.begin(loader)
        self._prepared.exchange(lambda every: self._window(every).is_complete)

    def batch_ends(self) -> None:
        """End a batch that was trained on."""
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
        batch: Loader | Pass | None,
        step: int,
        weight: float | Tensor | None = None,
        *,
        is_sum: bool = False,
        inputs: Sequence[Tensor] | None = None,
    ) -> None:
        """Do a backward."""
        every = self._latest = self._prepared.accumulate_of_loss()
        self._prepared.check_partial()
        factor = self._loss_factor(every, batch, weight, is_sum=is_sum)
        self._stepped = False
        self._is_within = self._is_weighted = self._has_computed = True
        try:
            self._prepared.backward(compute, factor, step, inputs)
        finally:
            self._is_within = False
        self.trained = self.has_seen = True
        self._unused = not self._stepped  # hooks of the parameters may step within
        if batch is None:
            self._outside[every] = self._outside.get(every, 0) + 1
            self._prepared.exchange(lambda each: (self._outside.get(each, 0) + 1) % each == 0)

    def _loss_factor(
        self, every: int, source: Loader | Pass | None, weight: float | Tensor | None, *, is_sum: bool
    ) -> float | Tensor:
        """The factor for a loss, with `every` batches per step; corrects the gradients of earlier batches."""
        window = self._window(every)
        if source is not None:
            samples = source.samples
            is_first, is_last, batch = window.begun <= 1, window.is_complete, (True, self.number)
        else:
            begun = self._outside.get(every, 0)
            is_first, is_last, batch = begun % every == 0, (begun + 1) % every == 0, (False, begun)
            samples = 1
        weights = self._weights.setdefault(every, GivenWeights(self._group, every))
        weights.begin(WEIGHT if weight is not None else SUM if is_sum else MEAN, batch, is_first=is_first)
        correction: float | Tensor | None = None
        factor: float | Tensor
        if weight is not None:  # a stand-in does not count
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
        """Note that the gradients were used."""
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
