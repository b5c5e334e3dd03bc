"""The batches that make one step of the optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.train.data.loader import Loader


@dataclass(frozen=True)
class Window:
    """The batches that make one step of the optimizer: one, or those of an accumulation.

    Attributes:
        batches: how many; fewer than usual where the epoch ends.
        samples: of all ranks together in all of them, or None where that is not known before.
    """

    batches: int
    samples: int | None

    @classmethod
    def ahead(cls, loader: Loader, batches: int) -> Window:
        """The window that begins with the batch that `loader` has yielded last."""
        if batches == 1:
            return ONE
        total, left = loader.total, loader.left
        if left is None or not total:
            return cls(batches, None)
        samples = min(batches * total, total + left)
        return cls(-(-samples // total), samples)

    def weight(self, loader: Loader, world_size: int) -> float:
        """What to multiply the mean loss of this rank's batch by, so that gradients are the mean over all samples."""
        if self.samples is None:
            return loader.weight / self.batches
        return loader.samples * world_size / self.samples


ONE = Window(1, None)
