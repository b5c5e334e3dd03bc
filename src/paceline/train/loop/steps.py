"""What happens between two batches: steps are counted, checkpoints taken, metrics measured, and stops obeyed."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from paceline.train.control.exit_report import Preempted, record

from .accumulation import Window

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paceline.train.control.watch import Watch
    from paceline.train.data.loader import Loader
    from paceline.train.group.group import Group
    from paceline.train.metrics.metrics import Metrics
    from paceline.train.parallel.prepared import Prepared

    from .checkpointing import Checkpointing


class Feed:
    """A training loader whose batches mark the steps of a `Run`: asking for the next one ends the step before."""

    def __init__(self, loader: Loader, steps: Steps) -> None:
        self.loader = loader
        self.finished_in: int | None = None  # the epoch of `Run.epochs` in which the last iteration came to its end
        self._is_through = False  # a resumed run has done this epoch's training already
        self._steps = steps

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def dataset(self) -> Any:
        """The whole data set, of which each rank gets its share."""
        return self.loader.dataset

    @property
    def samples(self) -> int:
        """This rank's samples in the batch yielded last; 0 if it is a stand-in, which counts nothing."""
        return self.loader.samples

    @property
    def batch_size(self) -> int | None:
        """This rank's samples of a full batch; None where a batch sampler makes the batches."""
        return self.loader.batch_size

    @property
    def batch_index(self) -> int:
        """Number of the batch at hand within its epoch, from 0; outside of a loop that of the batch that comes next."""
        return self.loader.batch_index

    @property
    def sampler(self) -> Any:
        """The script's own sampler, or what stands for it, see `Loader`."""
        return self.loader.sampler

    @property
    def batch_sampler(self) -> Any:
        """The script's own batch sampler, None if there is none."""
        return self.loader.batch_sampler

    def __iter__(self) -> Iterator[Any]:
        if self._steps.accumulates:
            self.loader.look_ahead()
        if self._is_through and self.finished_in == self._steps.epoch:
            self._is_through = False
            return
        self.finished_in = None
        if self._steps.in_loop:  # of loaders that are iterated together, the first one marks the steps
            for batch in self.loader:
                self._steps.add(self.loader)
                yield batch
        else:
            with self._steps.loop(self.loader):
                for batch in self.loader:
                    self._steps.begin(self.loader)
                    yield batch
                    self._steps.end()
                self._steps.epoch_ends()
        self.finished_in = self._steps.epoch

    def resumed(self, finished_in: int | None) -> None:
        """The last iteration of a resumed run came to its end in that epoch, or did not."""
        self.finished_in = finished_in
        self._is_through = finished_in is not None


class Steps:
    """The steps of a run: how many were done, where in the epochs they stand, and what is due after each.

    Attributes:
        epoch: the epoch that goes on, counted by `Run.epochs`.
        epochs: how many there will be; None where `Run.epochs` is not used.
        done: batches trained on, over all attempts.
        in_loop: whether a loop over training batches goes on.
        feeds: the training loaders.
    """

    def __init__(
        self,
        group: Group,
        prepared: Prepared,
        checkpoints: Checkpointing,
        metrics: Metrics,
        *,
        watch: Watch | None,
        close: Callable[[], None],
    ) -> None:
        """Begin none yet.

        Args:
            group: the ranks.
            prepared: what was set up.
            checkpoints: of the run.
            metrics: of the run.
            watch: agrees with the other ranks on the last step; None in a job of one process without checkpoints.
            close: closes the run.
        """
        self.epoch = 0
        self.epochs: int | None = None
        self.done = 0
        self.in_loop = False
        self.feeds: list[Feed] = []
        self._group, self._prepared, self._checkpoints = group, prepared, checkpoints
        self._metrics, self._watch, self._close = metrics, watch, close
        self._trained = False  # the batch at hand has been trained on
        self._has_gradients = False  # that no optimizer has used
        self._is_late = False  # a checkpoint was due in the middle of an accumulation
        self._loops = 0
        self._batches: list[Loader] = []  # whose batches are being trained on, the one that marks the steps first
        self._windows: dict[int, Window] = {}  # by the batches per step of the optimizer
        self._outside: dict[int, int] = {}  # backwards of batches from elsewhere, by the same
        self._latest = 1  # the batches per step of the last backward

    # -- a loop over batches -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def loop(self, loader: Loader) -> Iterator[None]:
        """One loop over batches; it may end by a `break`, and in the middle of a step."""
        self._loops += 1
        self.in_loop = True
        self._metrics.epoch_begins(self.epoch, self.epochs, _length(loader), loader.done)
        try:
            yield
        finally:
            self.in_loop = False
            if self.within:
                self._break_off()
            self._metrics.loop_left()
            if self._watch is not None:
                self._watch.loop_ended(self._loops)

    def begin(self, loader: Loader) -> None:
        """A batch of `loader` is there: the step begins, unless the run is to stop before it."""
        if self._watch is not None and not self._watch.begin(self._loops, self.done + 1, may_stop=not self._begun):
            loader.put_back()
            self._stop()
        self._batches = [loader]
        self._trained = self._has_gradients = False
        for every in self._prepared.accumulates:
            window = self._windows.get(every)
            if window is None or not window.begun:
                window = self._windows[every] = Window(every)
            window.begin(loader)
        self._prepared.exchange(lambda every: self._window(every).is_complete)
        self._metrics.data_came(loader.samples, loader.total)

    def add(self, loader: Loader) -> None:
        """Another loader's batch of the same step is there."""
        self._batches.append(loader)

    def end(self) -> None:
        """The step is done: the optimizer has stepped, and the next batch is asked for."""
        self._count()
        is_due = self._checkpoints.is_due(self.done) or self._is_late
        self._is_late = is_due and self._begun
        if is_due and not self._is_late:
            self.save()
        self._metrics.step_done(self.epoch, self.done)
        if self._watch is not None and self._watch.is_to_stop(self.done, may_stop=not self._begun):
            self._stop()

    def epoch_ends(self) -> None:
        """The loader has come to the end of its epoch, on all ranks."""
        self._prepared.share_buffers()
        self._metrics.epoch_ends()

    def training_ends(self) -> None:
        """`Run.epochs` is over: the last state is saved, and signals to stop do what they do without a run."""
        self._metrics.settle()
        if self._checkpoints.is_automatic:
            self.save(block=True)
        if self._watch is not None:
            self._watch.rest()

    def _count(self) -> None:
        self.done += 1
        self._batches = []
        for window in self._windows.values():
            window.end()

    def _break_off(self) -> None:
        """The loop was left within a step: it counts if its batch was trained on, and else the batch comes again."""
        if self.counts:
            self._count()
            return
        for window in self._windows.values():
            window.put_back(self._batches[0])
        for loader in self._batches:
            loader.put_back()
        self._batches = []

    # -- the step at hand ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def backward(self) -> Iterator[float]:
        """Around a backward; gives what to multiply the mean loss of this rank's batch by.

        Raises:
            RuntimeError: it is not known which models the loss was computed with, whose strategies differ.
        """
        every = self._latest = self._prepared.accumulate_of_loss()
        if self.within:
            window = self._window(every)
            if (correction := window.correction()) != 1:
                self._prepared.scale_gradients(every, correction)
            weight = window.weight(self._batches[0], self._group.world_size)
        else:
            weight = 1 / every
        with self._group.guard if self._prepared.exchanges() else contextlib.nullcontext():
            yield weight
        self._trained = self._has_gradients = True
        if not self.within:  # the batches are not of our loader: each backward is one
            self._outside[every] = self._outside.get(every, 0) + 1
            self._prepared.exchange(lambda each: (self._outside.get(each, 0) + 1) % each == 0)
        self._prepared.check_gradients(self)

    def optimizer_stepped(self) -> None:
        """The gradients were used."""
        self._trained, self._has_gradients = True, False

    def is_accumulating(self, every: int | None = None) -> bool:
        """Whether the last backward only added to the gradients, so that the optimizer does not step yet.

        Args:
            every: the batches per step of the optimizer; None means those of the last backward.
        """
        every = every or self._latest
        if self.within:
            return not self._window(every).is_complete
        return self._outside.get(every, 0) % every != 0

    @property
    def counts(self) -> bool:
        """Whether the batch at hand was trained on: gradients were computed, and used where there are optimizers."""
        return self.within and self._trained and not (self._has_gradients and self._prepared.has_optimizers)

    @property
    def within(self) -> bool:
        """Whether a step goes on."""
        return bool(self._batches)

    @property
    def accumulates(self) -> bool:
        """Whether several batches make a step of some optimizer."""
        return max(self._prepared.accumulates) > 1

    @property
    def _begun(self) -> bool:
        """Whether gradients of some batches wait for those of others."""
        return any(window.begun for window in self._windows.values())

    def _window(self, every: int) -> Window:
        """The window of what makes a step of so many batches; of what was set up within this step, this batch alone."""
        return self._windows.get(every) or Window(1)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def save(self, block: bool = False) -> None:
        """Take a checkpoint of everything the run knows of.

        Within a step, the batch counts as trained on if gradients of it were computed.

        Raises:
            RuntimeError: the run has no folder for checkpoints, or an accumulation of gradients has begun.
            paceline.CheckpointError: this one or the one before could not be written.
        """
        if not self._checkpoints.can_save:
            raise RuntimeError("there is no folder for checkpoints; pass checkpoint_dir= to paceline.init")
        for window in self._windows.values():
            begun = window.begun - (self.within and not self._trained)  # batches whose gradients wait for others
            if begun > 0 and not (self.within and self._trained and window.is_complete):
                raise RuntimeError(
                    f"the gradients of {begun} of {window.batches} accumulated batches are in no checkpoint; "
                    "save when run.accumulating is False"
                )
        if self.within and self._has_gradients and self._prepared.has_optimizers:
            raise RuntimeError("the gradients of this step are in no checkpoint; save after optimizer.step()")
        done = self.done + (self.within and self._trained)
        # Saved behind the loop, the epoch counts as done: what comes after is not done twice.
        is_over = bool(self.feeds) and all(feed.finished_in == self.epoch for feed in self.feeds)
        progress = {
            "epoch": self.epoch + is_over,
            "step": done,
            "loaders": [self._position(feed) for feed in self.feeds],
        }
        with self._metrics.checkpointing():
            self._checkpoints.save(done, progress, block=block)

    def _position(self, feed: Feed) -> dict[str, Any]:
        before = feed.loader in self._batches and not self._trained
        return {"finished_in": feed.finished_in, **feed.loader.state_dict(before=before)}

    def resume(self, *, by_epochs: bool = False) -> bool:
        """Go to where the newest checkpoint was taken; returns whether there is one.

        Args:
            by_epochs: the epoch that went on there begins again, but what it has trained on by then is left out.
        """
        found = self._checkpoints.load(len(self.feeds))
        if found is None:
            return False
        progress = found.shared_state["progress"]
        for feed, state in zip(self.feeds, progress["loaders"], strict=True):
            feed.loader.load_state_dict(state)
            feed.resumed(state["finished_in"] if by_epochs else None)
        self.epoch, self.done = progress["epoch"], progress["step"]
        self._metrics.resumed(self.epoch, self.done)
        if self._group.is_main:
            where = f"step {self.done} in epoch {self.epoch + 1}"
            print(f"paceline: going on after {where}, from {found.path}", file=sys.stderr, flush=True)
        self._checkpoints.load_rank_state(found)
        return True

    # -- the end -------------------------------------------------------------------------------------------------------

    def _stop(self) -> NoReturn:
        """Save the state, and leave with the code that asks for a resume."""
        assert self._watch is not None
        why = self._watch.stop_signal
        self.save(block=True)
        if self._group.is_main:
            print(f"paceline: {why}: stopped after step {self.done}, which is saved", file=sys.stderr, flush=True)
        record("Preempted", f"stopped by {why} after step {self.done}")
        self._close()
        raise Preempted

    def close(self) -> None:
        """Write what is left, wait for a checkpoint under way."""
        if self._watch is not None:
            self._watch.ends()
        try:
            # The last steps are not saved where `Run.epochs` was left by a break.
            unsaved = self._checkpoints.is_automatic and self.done > self._checkpoints.saved and not self._begun
            if self._watch is not None and (unsaved or self._metrics.unreduced):
                self._watch.meet()
            if unsaved:
                self.save()
            self._metrics.close()
            self._checkpoints.close(self._watch.explain if self._watch is not None else lambda _: None)
        except BaseException as error:
            if self._watch is not None:
                self._watch.failed(error)
            with contextlib.suppress(RuntimeError):  # what came first is what matters
                self._disconnect()
            raise
        self._disconnect()

    def leave(self) -> None:
        """End without the other ranks, and without what takes all of them."""
        if self._watch is not None:
            self._watch.ends()
        self._checkpoints.leave()
        self._metrics.discard()
        self._metrics.close()
        self._disconnect()

    def abandon(self, error: BaseException) -> None:
        """End without the other ranks, and send them why."""
        self._metrics.discard()
        with contextlib.suppress(OSError):
            self._metrics.close()
        if self._watch is not None:
            self._watch.failed(error)
        self._disconnect()

    def _disconnect(self) -> None:
        self._checkpoints.disconnect()
        if self._watch is not None:
            self._watch.close()


def _length(loader: Loader) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def run_folder() -> Path | None:
    """The job's folder on this machine, when `paceline run` started the rank."""
    folder = os.environ.get("PACELINE_RUN_DIR")
    return Path(folder) if folder else None
