"""Resuming: where the newest checkpoint was taken, and loading it once the script is there."""

from __future__ import annotations

import dataclasses
import logging
import sys
from typing import TYPE_CHECKING

from paceline.train.checkpoint import history

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.train.checkpoint.store import Checkpoint
    from paceline.train.group.group import Group
    from paceline.train.metrics.metrics import Metrics

    from .checkpointing import Checkpointing
    from .feed import Feed
    from .passes import EpochLoops, Passes

log = logging.getLogger("paceline")


class Resuming:
    """Loads the newest checkpoint, in the loop over epochs in which it was taken."""

    def __init__(
        self, group: Group, checkpoints: Checkpointing, metrics: Metrics, epochs: EpochLoops, passes: Passes
    ) -> None:
        self.has_looked = False  # whether a checkpoint was looked for
        self.step = 0  # steps that were done when the loaded checkpoint was taken
        self._group, self._checkpoints, self._metrics = group, checkpoints, metrics
        self._epochs, self._passes = epochs, passes
        self._found: Checkpoint | None = None  # until it is loaded
        self._loaded: set[str] = set()  # its parts that were loaded
        self._near: Checkpoint | None = None  # it is loaded, and the script has not come to its place in the body yet
        self._first: str | None = None  # what was there before this run has saved any: see `peek`
        self._has_weights: bool | None = None  # whether it began with weights that were imported; None: not known yet

    def find(self) -> bool:
        """Find the newest checkpoint; returns whether there is one."""
        self.has_looked = True
        if self._has_weights and not self._checkpoints.has_saved:
            return False
        self._found = self._checkpoints.find()
        if self._found is not None and self._found.weights_only:
            self._begin(self._found)
            self._found = None
        if self._found is not None and self.is_ahead:
            progress = self._found.shared_state["progress"]
            self._epochs.resume((progress["loop"], progress["epoch"]))
        return self.is_pending

    def find_in_loops(self) -> None:
        """Find the newest checkpoint, unless it was taken before the first loop over epochs: what is there is repeated.

        A checkpoint of this run itself is never one to resume from.
        """
        if self.find() and not self.is_ahead:
            self._found = None

    def begin(self) -> None:
        """Begin with weights that were imported, if there are no newer checkpoints. Called after each set-up model.

        What the script makes of its model from then on, such as an average, has them.
        """
        if self._has_weights is None and not self.has_looked:
            self._has_weights = False
            if self._checkpoints.begins_with_weights:
                found = self._checkpoints.find()
                if found is not None and found.weights_only:  # and not damaged
                    self._begin(found)

    def _begin(self, found: Checkpoint) -> None:
        self._checkpoints.load_weights(found)
        self._has_weights = True
        if self._group.is_main:
            print(f"paceline: starting with the weights of {found.path}", file=sys.stderr, flush=True)

    def peek(self) -> str:
        """What there was before this run took its first checkpoint: "loops" for one of `Run.epochs`, "other", or "".

        It is "" once the script has resumed.
        """
        if self.has_looked or self._has_weights:
            return ""
        if self._first is None:
            found = self._checkpoints.find()
            self._first = "" if found is None else "loops" if _in_loops(found) else "other"
        return self._first

    @property
    def is_pending(self) -> bool:
        """Whether there is a checkpoint that is not loaded yet."""
        return self._found is not None

    @property
    def is_ahead(self) -> bool:
        """Whether the checkpoint that is not loaded yet is one of a loop over epochs."""
        return self._found is not None and _in_loops(self._found)

    def reach(self, feeds: Sequence[Feed]) -> bool:
        """Load it and go to its epoch, if that is in the loop just entered; returns whether it is.

        In an earlier loop, load only what was set up so far: the script may not have made everything yet.
        """
        assert self._found is not None
        if self._epochs.is_skipped():
            self._loaded |= self._checkpoints.load_some(self._found, but=self._loaded)
            return False
        if self._checkpoints.follows and self._group.is_main:
            log.warning(
                "run.epochs goes on from %s, which an earlier run of this process has saved; for another stage of the "
                "training, pass a checkpoint_dir= of its own to paceline.init", self._found.path,
            )  # fmt: skip
        self.load(feeds, by_epochs=True)
        return True

    def load(self, feeds: Sequence[Feed], *, by_epochs: bool) -> None:
        """Load it into everything that was set up."""
        assert self._found is not None
        found = self._found
        self._checkpoints.load(found, len(feeds))
        progress = found.shared_state["progress"]
        for feed, state in zip(feeds, progress["loaders"], strict=True):
            feed.loader.load_state_dict(state)
        self.step = progress["step"]
        self._metrics.resumed(progress["epoch"], self.step)
        if self._group.is_main:
            is_over = by_epochs and progress["epoch"] == self._epochs.count
            where = f"step {self.step} {'at the end of' if is_over else 'in'} epoch {progress['epoch'] + (not is_over)}"
            if (loop := progress["loop"]) > 0:
                where += f" of loop {loop + 1}"
            history.resumed(self.step, found.path)
            print(f"paceline: resuming after {where}, from {found.path}", file=sys.stderr, flush=True)
        self._checkpoints.load_rank_state(found)
        looks = {
            number: [feed.loader.mark_of(state) for feed, state in zip(feeds, states, strict=False)]
            for number, states in progress["looks"].items()
        }
        starts = [  # none in checkpoints of the first versions
            (feed.loader, feed.loader.mark_of(state))
            for feed, state in zip(feeds, progress.get("starts", ()), strict=False)
        ]
        self._passes.resume(progress["place"], looks, starts, same_ranks=self._checkpoints.has_same_ranks(found))
        if self._passes.target is not None:
            self._near = dataclasses.replace(
                found, shared_state={**dict.fromkeys(found.shared_state), "progress": progress}
            )
            self._passes.set_random()
        self._epochs.reach()
        self._found = None

    def arrive(self) -> None:
        """The script has come to the place in the body where the checkpoint was taken: load it again.

        The code of the body that comes before that place has run again, and may have changed what is in the checkpoint.
        """
        assert self._near is not None
        target = self._passes.target
        self._checkpoints.load_again(self._near, whole=target is not None and bool(target.ended or target.events))
        self.depart()

    def depart(self) -> None:
        """Go on from here, wherever the checkpoint was taken in the body."""
        self._near = self._passes.target = None


def _in_loops(found: Checkpoint) -> bool:
    """Whether a checkpoint was taken in a loop over epochs, or after one."""
    return not found.weights_only and bool(found.shared_state["progress"]["loop"] >= 0)
