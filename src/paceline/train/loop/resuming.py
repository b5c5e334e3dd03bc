"""Resuming: where the newest checkpoint was taken, and loading it once the script is there."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from paceline.train.checkpoint import history

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.train.checkpoint.store import Checkpoint
    from paceline.train.group.group import Group
    from paceline.train.metrics.metrics import Metrics

    from .checkpointing import Checkpointing
    from .epochs import EpochLoops
    from .feed import Feed
    from .passes import Passes


class Resuming:
    """Loads the newest checkpoint, in the loop over epochs in which it was taken.

    Attributes:
        has_looked: whether a checkpoint was looked for.
        step: steps that were done when the loaded checkpoint was taken.
    """

    def __init__(
        self, group: Group, checkpoints: Checkpointing, metrics: Metrics, epochs: EpochLoops, passes: Passes
    ) -> None:
        self.has_looked = False
        self.step = 0
        self._group, self._checkpoints, self._metrics = group, checkpoints, metrics
        self._epochs, self._passes = epochs, passes
        self._found: Checkpoint | None = None  # until it is loaded
        self._loaded: set[str] = set()  # its parts that were loaded

    def find(self) -> bool:
        """Find the newest checkpoint; returns whether there is one."""
        self.has_looked = True
        self._found = self._checkpoints.find()
        if self._found is not None:
            progress = self._found.shared_state["progress"]
            self._epochs.resume((progress.get("loop", 0), progress["epoch"]))
        return self.is_pending

    @property
    def is_pending(self) -> bool:
        """Whether there is a checkpoint that is not loaded yet."""
        return self._found is not None

    def reach(self, feeds: Sequence[Feed]) -> bool:
        """Load it and go to its epoch, if that is in the loop just entered; returns whether it is.

        In an earlier loop, load only what was set up so far: the script may not have made everything yet.
        """
        assert self._found is not None
        if self._epochs.is_skipped():
            self._loaded |= self._checkpoints.load_some(self._found, but=self._loaded)
            return False
        self.load(feeds, by_epochs=True)
        return True

    def load(self, feeds: Sequence[Feed], *, by_epochs: bool) -> None:
        """Load it into everything that was set up.

        Args:
            feeds: the training loaders.
            by_epochs: whether the epoch that was under way begins again, without the batches that it was trained on.
        """
        assert self._found is not None
        found = self._found
        self._checkpoints.load(found, len(feeds))
        progress = found.shared_state["progress"]
        for feed, state in zip(feeds, progress["loaders"], strict=True):
            feed.load_state_dict(state, by_epochs=by_epochs)
        self._passes.resume(progress.get("passes", (0, 0)))
        self.step = progress["step"]
        self._metrics.resumed(progress["epoch"], self.step)
        if self._group.is_main:
            is_over = by_epochs and progress["epoch"] == self._epochs.count
            where = f"step {self.step} {'at the end of' if is_over else 'in'} epoch {progress['epoch'] + (not is_over)}"
            if loop := progress.get("loop", 0):
                where += f" of loop {loop + 1}"
            history.resumed(self.step, found.path)
            print(f"paceline: resuming after {where}, from {found.path}", file=sys.stderr, flush=True)
        self._checkpoints.load_rank_state(found)
        self._epochs.reach()
        self._found = None
