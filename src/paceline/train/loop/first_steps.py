"""What is noticed in the first steps of a run, in one line each: batches that are not divided among the ranks, and
gradients that `Run.backward` has not weighted. Later steps are not looked at.
"""

from __future__ import annotations

import gc
import logging
from typing import TYPE_CHECKING

from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from paceline.train.collective_trace import script_line
from paceline.train.data.agreement import checksum
from paceline.train.data.content import Content
from paceline.train.parallel.nested import tensors_in

if TYPE_CHECKING:
    from paceline.train.control.watch import Watch
    from paceline.train.data.loader import Loader
    from paceline.train.group.group import Group
    from paceline.train.parallel.prepared import Prepared
    from paceline.train.torch_types import Arguments

    from .gradients import Gradients
    from .passes import Pass

log = logging.getLogger("paceline")
_STEPS = 5  # of optimizers that are looked at
_PASSES = 3  # forward passes whose inputs are compared
_ANY_RANK = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)  # do not divide by rank


class FirstSteps:
    """Looks at the first steps of a run, and warns on rank 0."""

    def __init__(self, group: Group, prepared: Prepared, watch: Watch | None) -> None:
        self._group, self._prepared, self._watch = group, prepared, watch
        self._steps = 0
        self._inputs: list[int] = []  # checksums of what the models were called with
        self._line = ""
        self._has_compared = group.world_size == 1

    # -- batches -------------------------------------------------------------------------------------------------------

    def model_called(self, given: Arguments, *, divided: bool) -> bool:
        """Look at a forward pass with gradients; returns whether to look at the next one."""
        if self._has_compared or divided or self._group.data_size == 1:
            self._has_compared = True
            return False
        content = Content()
        for tensor in tensors_in(given):
            content.add(tensor)
        if not content.total:
            return True
        self._line = script_line()
        self._inputs.append(content.total)
        if len(self._inputs) == _PASSES:
            self._compare()
        return not self._has_compared

    def _compare(self) -> None:
        """Send rank 0 what this rank has seen; if all have seen the same, it warns."""
        self._has_compared = True
        assert self._watch is not None
        # Benchmarks and tests may use one batch again and again, of which the ranks do not need parts.
        inputs = self._inputs if len({*self._inputs}) > 1 else []
        self._watch.compare(inputs, _undivided_data(), self._line)

    # -- gradients -----------------------------------------------------------------------------------------------------

    def optimizer_stepped(self, gradients: Gradients, source: Loader | Pass | None, accumulate: int) -> bool:
        """Look at a step of an optimizer; returns whether to look at the next one."""
        self._steps += 1
        why = ""
        if gradients.are_plain():
            if accumulate > 1:
                why = f"they are the sum over {accumulate} batches, and not the mean"
            elif source is not None and _may_be_uneven(source, self._group.data_size):
                why = "all ranks count the same, also where some have smaller batches, as at the end of an epoch"
        if why and self._group.is_main:
            log.warning(
                "the gradients of optimizer.step() at %s come from loss.backward(): %s; call run.backward(loss) "
                "instead", script_line(), why,
            )  # fmt: skip
        return not why and self._steps < _STEPS


def _may_be_uneven(source: Loader | Pass, ranks: int) -> bool:
    """Whether ranks may have different numbers of samples in some step of the epoch."""
    if source.remaining is None:
        return True
    last = (source.total + source.remaining) % source.total if source.total else 0
    return ranks > 1 and bool(source.total % ranks or last % ranks)


def _undivided_data() -> int | None:
    """A checksum of the data of the `DataLoader` that is being iterated, if its samplers do not divide by rank."""
    for thing in gc.get_objects():
        if not issubclass(type(thing), _BaseDataLoaderIter):
            continue
        dataset, sampler = getattr(thing, "_dataset", None), getattr(thing, "_index_sampler", None)
        if type(sampler) is BatchSampler:
            sampler = sampler.sampler
        if type(sampler) in _ANY_RANK and hasattr(type(dataset), "__getitem__"):
            return checksum(dataset=dataset, sampler=sampler)
    return None
