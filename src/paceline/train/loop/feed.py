"""The training loaders that `Run.dataloader` returns: their batches are the steps of the run."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Protocol

from paceline.train.data.loader import refuse_update_bn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.train.data.loader import Loader

    from .passes import Body

_OF_LOADER = frozenset({"batch_index", "batch_sampler", "batch_size", "dataset", "sampler", "samples"})


class Counter(Protocol):
    """Counts the steps of a run between the batches of a loader; `Steps` is one, which imports this module."""

    @property
    def body(self) -> Body | None: ...

    @property
    def needs_ends(self) -> bool: ...

    def encloses(self, source: Loader) -> bool: ...
    def count(self, source: Loader) -> Iterator[Any]: ...
    def add(self, loader: Loader) -> None: ...
    def warn_of_new_loader(self) -> None: ...


class Feed:
    """A training loader whose batches are the steps of a `Run`: requesting the next batch ends the current step.

    Attributes:
        dataset: the whole data set, of which each rank gets its share.
        samples: this rank's samples in the batch yielded last; 0 if it is a stand-in, which does not count.
        batch_size: this rank's samples of a full batch; None if a batch sampler makes the batches.
        batch_index: number of the current batch within its epoch, from 0; outside of a loop, that of the next batch.
        sampler: the script's own sampler, or an equivalent, see `Loader`.
        batch_sampler: the script's own batch sampler; None if there is none.
    """

    def __init__(self, loader: Loader, steps: Counter) -> None:
        self.loader = loader
        self.made_in = steps.body  # the epoch's body; None outside of `Run.epochs`
        self._steps = steps

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name in _OF_LOADER:
            return getattr(self.loader, name)
        raise AttributeError(f"a training loader has no attribute {name!r}")

    def __iter__(self) -> Iterator[Any]:
        refuse_update_bn(sys._getframe(1))
        self.begins()
        steps = self._steps
        if steps.encloses(self.loader):  # of loaders that are iterated together, the first one counts the steps
            for batch in self.loader:
                steps.add(self.loader)
                yield batch
        else:
            yield from steps.count(self.loader)

    def begins(self) -> None:
        """An iteration over the loader begins."""
        steps, body = self._steps, self._steps.body
        if steps.needs_ends:
            self.loader.look_ahead()
        if body is not None and self.made_in == body:
            steps.warn_of_new_loader()
