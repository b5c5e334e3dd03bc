"""What happens between two batches: steps are counted, checkpoints taken, metrics told, stops heeded."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from paceline.train.checkpoint.store import (
    CheckpointError,
    CheckpointStore,
    ExchangeError,
    SingleExchange,
    SocketExchange,
)
from paceline.train.control.exit_report import Preempted, record
from paceline.train.control.watch import Collective, Watch
from paceline.train.data.random_state import random_states, set_random_states
from paceline.train.group.join import on_one_machine, share_object
from paceline.train.metrics.metrics import Metrics

from .accumulation import ONE, Window
from .checkpointing import Interval, check_parts, load

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.train.data.loader import Loader
    from paceline.train.run import Run

log = logging.getLogger("paceline")
_AGREE_EVERY = 10  # steps between two looks at rank 0's clock, which decides for all


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

    def __iter__(self) -> Iterator[Any]:
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
        trained: whether the batch handed out last has been trained on.
    """

    def __init__(self, run: Run, folder: Path | None, every: Interval | None, keep: int, metrics: Metrics) -> None:
        self.epoch = 0
        self.epochs: int | None = None
        self.done = 0
        self.trained = False
        self._has_gradients = False  # that no optimizer has used
        self.feeds: list[Feed] = []
        self._run = run
        self._every = every
        self._due = time.monotonic() + every.seconds if every else 0.0
        self._is_late = False  # a checkpoint was due in the middle of an accumulation
        self._loops = 0
        self._saved = 0  # the step of the checkpoint begun or loaded last
        self.in_loop = False
        self._batches: list[Loader] = []  # whose batches are being trained on, the one that marks the steps first
        self._window = ONE
        self._batch = 0  # which one of the window
        self._exchange: SocketExchange | SingleExchange | None = None
        self._store: CheckpointStore | None = None
        if folder is None and every is not None and run.is_main:
            log.warning("no checkpoints are taken: without `paceline run`, pass checkpoint_dir= to paceline.init")
        if folder is not None:
            self._exchange = SocketExchange() if run.world_size > 1 else SingleExchange()
            self._store = CheckpointStore(
                folder, rank=run.rank, world_size=run.world_size, exchange=self._exchange, keep=keep
            )
            self._store.hold()
        self._watch: Watch | None = None
        if run.world_size > 1 or self._store is not None:
            local = run.world_size == 1 or on_one_machine()
            self._watch = Watch(run.rank, run.world_size, share_object, local=local, stops=self._store is not None)
        self._collective = contextlib.nullcontext() if self._watch is None else Collective(self._watch)
        self.metrics = metrics

    @property
    def saves(self) -> bool:
        """Whether checkpoints are taken without being asked for."""
        return self._every is not None and self._store is not None

    def rest(self) -> None:
        """The training is over."""
        if self._watch is not None:
            self._watch.rest()

    @property
    def stops(self) -> bool:
        """Whether a signal to stop lets the step finish, and saves the state."""
        return self._watch is not None and self._store is not None

    # -- a loop over batches -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def loop(self, loader: Loader) -> Iterator[None]:
        """One loop over batches; it may end by a `break`, and in the middle of a step."""
        self._loops += 1
        self.in_loop = True
        self.metrics.epoch_begins(self.epoch, self.epochs, _length(loader), loader.done)
        try:
            yield
        finally:
            self.in_loop = False
            if self.within:
                self._break_off()
            self.metrics.loop_left()
            if self._watch is not None:
                self._watch.loop_ended(self._loops)

    def begin(self, loader: Loader) -> None:
        """A batch of `loader` is there: the step begins, unless the run is to stop before it."""
        if self._watch is not None and not self._watch.begin(self._loops, self.done + 1, may_stop=self._batch == 0):
            loader.put_back()
            self._stop()
        self._batches = [loader]
        self.trained = self._has_gradients = False
        if self._batch == 0:
            self._window = Window.ahead(loader, self._run.strategy.accumulate)
        self._batch += 1
        self._run.exchange_gradients(self.completes_window)
        self.metrics.data_came(loader.samples, loader.total)

    def add(self, loader: Loader) -> None:
        """Another loader's batch of the same step is there."""
        self._batches.append(loader)

    def end(self) -> None:
        """The step is done: the optimizer has stepped, and the next batch is asked for."""
        self._count()
        is_due = self._is_due() or self._is_late
        self._is_late = is_due and self._batch != 0
        if is_due and not self._is_late:
            self.save()
        self.metrics.step_done(self.epoch, self.done)
        if self._watch is not None and self._watch.is_to_stop(self.done, may_stop=self._batch == 0):
            self._stop()

    def epoch_ends(self) -> None:
        """The loader has come to the end of its epoch, on all ranks."""
        self._run.share_buffers()
        self.metrics.epoch_ends()

    def _count(self) -> None:
        self.done += 1
        self._batches = []
        if self.completes_window:
            self._batch = 0

    def _break_off(self) -> None:
        """The loop was left within a step: it counts if its batch was trained on, and else the batch comes again."""
        if self.counts:
            self._count()
            return
        for loader in self._batches:
            loader.put_back()
        self._batches = []
        self._batch -= 1

    def gradients_came(self) -> None:
        """Gradients of the batch at hand were computed."""
        self.trained = self._has_gradients = True

    def optimizer_stepped(self) -> None:
        """They were used."""
        self.trained, self._has_gradients = True, False

    @property
    def counts(self) -> bool:
        """Whether the batch at hand was trained on: gradients were computed, and used where there are optimizers."""
        return self.within and self.trained and not (self._has_gradients and self._run.has_optimizers)

    @property
    def within(self) -> bool:
        """Whether a step goes on."""
        return bool(self._batches)

    @property
    def completes_window(self) -> bool:
        """Whether the batch that is being trained on is the last one of its accumulation."""
        return self._batch >= self._window.batches

    @property
    def weight(self) -> float:
        """What to multiply the mean loss of this rank's batch by."""
        return self._window.weight(self._batches[0], self._run.world_size)

    def collective(self) -> contextlib.AbstractContextManager[None]:
        """Something that all ranks do together; what it raises in their stead is `Watch.enter`'s and `explain`'s."""
        return self._collective

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _is_due(self) -> bool:
        if self._every is None or not self.saves:
            return False
        if self._every.steps:
            return self.done % self._every.steps == 0
        if self.done % _AGREE_EVERY:
            return False
        due = self._run.broadcast_object(time.monotonic() >= self._due)
        if due:
            self._due = time.monotonic() + self._every.seconds
        return due

    def save(self, block: bool = False) -> None:
        """Take a checkpoint of everything the run knows of.

        Within a step, the batch counts as trained on if gradients of it were computed.

        Raises:
            RuntimeError: the run has no folder for checkpoints, or an accumulation of gradients has begun.
            paceline.CheckpointError: this one or the one before could not be written.
        """
        if self._store is None:
            raise RuntimeError("there is no folder for checkpoints; pass checkpoint_dir= to paceline.init")
        begun = self._batch - (self.within and not self.trained)  # batches whose gradients wait for others
        if begun and not self.completes_window:
            raise RuntimeError(
                f"the gradients of {begun} of {self._window.batches} accumulated batches are in no checkpoint; "
                "save when run.accumulating is False"
            )
        if self.within and self._has_gradients and self._run.has_optimizers:
            raise RuntimeError("the gradients of this step are in no checkpoint; save after optimizer.step()")
        done = self.done + (self.within and self.trained)
        # Saved behind the loop, the epoch counts as done: what comes after is not done twice.
        is_over = bool(self.feeds) and all(feed.finished_in == self.epoch for feed in self.feeds)
        progress = {
            "epoch": self.epoch + is_over,
            "step": done,
            "loaders": [self._position(feed) for feed in self.feeds],
        }
        with self.metrics.checkpointing(), self.collective():
            shared = {name: thing.state_dict() for name, thing in self._run.stateful().items()}
            self._store.save(done, {**shared, "progress": progress}, random_states(), block=block)
        self._saved = done

    def _position(self, feed: Feed) -> dict[str, Any]:
        before = feed.loader in self._batches and not self.trained
        return {"finished_in": feed.finished_in, **feed.loader.state_dict(before=before)}

    def resume(self, *, by_epochs: bool = False) -> bool:
        """Go to where the newest checkpoint was taken; returns whether there is one.

        Args:
            by_epochs: the epoch that went on there begins again, but what it has trained on by then is left out.
        """
        with self.collective() if self._store is not None else contextlib.nullcontext():
            saved = self._store.load(self._run.device) if self._store is not None else None
        if saved is None:
            return False
        progress = saved.shared_state["progress"]
        check_parts(self._run.stateful(), saved.shared_state, len(self.feeds), len(progress["loaders"]))
        for name, thing in self._run.stateful().items():
            load(name, thing, saved.shared_state[name])
        for feed, state in zip(self.feeds, progress["loaders"], strict=True):
            feed.loader.load_state_dict(state)
            feed.resumed(state["finished_in"] if by_epochs else None)
        self.epoch, self.done = progress["epoch"], progress["step"]
        self._saved = self.done
        self.metrics.resumed(self.epoch, self.done)
        if self._run.is_main:
            where = f"step {self.done} in epoch {self.epoch + 1}"
            print(f"paceline: going on after {where}, from {saved.path}", file=sys.stderr, flush=True)
        if saved.rank_state is not None and saved.world_size == self._run.world_size:
            set_random_states(saved.rank_state)
        return True

    # -- the end -------------------------------------------------------------------------------------------------------

    def _stop(self) -> NoReturn:
        """Save the state, and leave with the code that asks for a resume."""
        assert self._watch is not None
        why, here = self._watch.stop_signal, self._run.is_main
        self.save(block=True)
        if here:
            print(f"paceline: {why}: stopped after step {self.done}, which is saved", file=sys.stderr, flush=True)
        record("Preempted", f"stopped by {why} after step {self.done}")
        self._run.close()
        raise Preempted

    def close(self) -> None:
        """Write what is left, wait for a checkpoint under way."""
        if self._watch is not None:
            self._watch.ends()
        try:
            unsaved = self.saves and self.done > self._saved and not self._batch  # `Run.epochs` was left by a break
            if self._watch is not None and (unsaved or self.metrics.unreduced):
                self._watch.meet()
            if unsaved:
                self.save()
            self.metrics.close()
            if self._store is not None:
                self._close_store(self._store)
        except BaseException as error:
            if self._watch is not None:
                self._watch.failed(error)
            with contextlib.suppress(RuntimeError):  # what came first is what matters
                self._part()
            raise
        self._part()

    def _close_store(self, store: CheckpointStore) -> None:
        try:
            store.close()
        except ExchangeError as error:
            if self._watch is not None:
                self._watch.explain(error)
            raise

    def leave(self) -> None:
        """End without a word from the other ranks, and without what takes all of them."""
        if self._watch is not None:
            self._watch.ends()
        try:
            if self._store is not None:
                self._store.close()
        except CheckpointError as error:
            log.error("%s", error)
        self.metrics.discard()
        self.metrics.close()
        self._part()

    def abandon(self, error: BaseException) -> None:
        """End without the other ranks, and tell them why."""
        self.metrics.discard()
        with contextlib.suppress(OSError):
            self.metrics.close()
        if self._watch is not None:
            self._watch.failed(error)
        self._part()

    def _part(self) -> None:
        if isinstance(self._exchange, SocketExchange):
            self._exchange.close()
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
