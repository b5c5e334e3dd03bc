"""Between two batches: counts steps, takes checkpoints, measures metrics, and stops the run when asked to."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from paceline.train.control.exit_report import Preempted, record
from paceline.train.data.loader import Loader

from .closing import Ending
from .epochs import EpochLoops
from .first_steps import FirstSteps
from .gradients import Gradients
from .optimizers import OtherOptimizers
from .passes import Pass, Passes
from .replicas import Replicas
from .resuming import Resuming
from .tune_trial import TrialOver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

    from paceline.train.checkpoint.errors import CheckpointError
    from paceline.train.control.watch import Watch
    from paceline.train.group.group import Group
    from paceline.train.metrics.metrics import Metrics
    from paceline.train.parallel.prepared import Prepared

    from .checkpointing import Checkpointing
    from .epochs import Body
    from .feed import Feed
    from .tune_trial import Trial

log = logging.getLogger("paceline")
_UNSEEN = (
    "run.save: the loop calls neither run.backward nor an optimizer of torch, so it is not known whether this batch is "
    "done, and a resumed run might train on it again; call run.step_done() when a batch is done, before run.save"
)


class Steps:
    """The steps of a run: how many were done, their position in the epochs, and what is due after each.

    Attributes:
        done: steps done, over all attempts: batches trained on, or steps of the optimizer in loops of another form.
        in_loop: whether a loop whose steps are counted is under way.
        feeds: the training loaders.
        optimizers: those that were not set up.
        ending: ends the run; see also `close`.
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
        trial: Trial | None = None,
    ) -> None:
        """Initialize before the first step.

        Args:
            group: the ranks.
            prepared: what was set up.
            checkpoints: checkpoints of the run.
            metrics: metrics of the run.
            watch: agrees with the other ranks on the last step; None in a job of one process without checkpoints.
            close: closes the run.
            trial: measures some steps, after which the run ends; None goes on.
        """
        self.done = 0
        self.in_loop = False
        self.feeds: list[Feed] = []
        self._group, self._prepared, self._checkpoints = group, prepared, checkpoints
        self._metrics, self._watch, self._close, self._trial = metrics, watch, close, trial
        self._epochs = EpochLoops(keep_random=checkpoints.can_save)
        self._passes = Passes()
        if checkpoints.can_save:
            prepared.register_on_rank("run.epochs", self._epochs)
            prepared.register_on_rank("run.steps", self._passes)
        self._resuming = Resuming(group, checkpoints, metrics, self._epochs, self._passes)
        self._gradients = Gradients(group, prepared)
        self._first: FirstSteps | None = FirstSteps(group, prepared, watch)  # until those are over
        prepared.look = self._model_called
        self._replicas: Replicas | None = None
        if watch is not None and group.world_size > 1:
            self._replicas = Replicas(prepared, watch, group.device)
        self.optimizers = OtherOptimizers(prepared, stepped=self._other_stepped, refuses=self._needs_states)
        self.ending = Ending(group, checkpoints, metrics, watch)
        self._loops = 0
        self._batches: list[Loader | Pass] = []  # with the current batches; the first one counts the steps
        self._counting: int | None = None  # number of the optimizer whose steps are counted, if no batches are
        # This epoch's body.
        self._has_looped = False  # whether there was a loop over batches that are counted
        self._uncounted = 0  # steps of the optimizer outside of such loops
        # Checkpoints.
        self._is_late = False  # whether one was due where none could be taken
        self._is_fresh = False  # whether one was taken since the last batch came
        self._is_asked = False  # whether one was asked for before any training was seen
        self._is_stopping = False
        self._warned: set[str] = set()

    # -- epochs --------------------------------------------------------------------------------------------------------

    @property
    def body(self) -> Body | None:
        """The epoch under way and the number of its loop; None outside of `Run.epochs`."""
        return self._epochs.body

    @property
    def needs_ends(self) -> bool:
        """Whether an epoch's last batch must be known as such before the next batch is requested."""
        return self.accumulates or (self._checkpoints.can_save and self.body is not None)

    def over_epochs(self, count: int) -> Iterator[int]:
        """See `Run.epochs`."""
        if self._epochs.number < 0:
            self._resuming.find()
        self._epochs.enter(count)
        if self._resuming.is_pending:
            if not self._resuming.reach(self.feeds):
                self._epochs.skip()
                return
            self.done = self._resuming.step
        first = self._epochs.epoch
        self._epochs.is_active = first < count
        try:
            while self._epochs.epoch < count:
                self._body_begins()
                self._metrics.body_begins(self._epochs.epoch, count)
                yield self._epochs.epoch
                self._body_ends()
        finally:
            self._epochs.leave()
        self._training_ends(has_trained=first < count)

    def _body_begins(self) -> None:
        self._has_looped, self._uncounted, self._counting = False, 0, None

    def _body_ends(self) -> None:
        """At the end of an epoch's body: write what was logged in it, and take a checkpoint that was due."""
        self._metrics.body_ends(self._epochs.epoch, self.done)
        is_uncounted = self._is_uncounted()
        if is_uncounted and self._checkpoints.is_due_after(self.done, epoch_counts=not self._uncounted):
            self._is_late = True
            self._warn(
                "checkpoint_every: the steps of this loop come neither from run.dataloader nor from run.steps, so "
                "checkpoints are taken at the end of its epochs only; iterate run.steps(…) to take them in between"
            )
        has_looped = self._has_looped
        self._epochs.epoch += 1
        self._passes.restart()
        self._body_begins()
        is_last = self._epochs.epoch >= (self._epochs.count or 0)
        if is_last and self._checkpoints.is_automatic:
            return  # the last state is saved anyway
        waits = self._is_accumulating
        if self._is_late and (is_uncounted or not waits):
            self._take()
        if (
            has_looped
            and not is_last
            and self._watch is not None
            and self._watch.is_to_stop(self.done, may_stop=not waits)
        ):
            self._stop()

    def _training_ends(self, *, has_trained: bool) -> None:
        """At the end of `Run.epochs`: save the last state. From now on, signals act as without a run."""
        self._metrics.settle()
        if has_trained and self._replicas is not None:
            self._replicas.settle(self.done)
        if has_trained and (self._checkpoints.is_automatic or self._is_late):
            self._take(block=True)
        if self._watch is not None:
            self._watch.rest()

    def _is_uncounted(self) -> bool:
        """Whether this epoch's body trains with steps whose position in it is not known."""
        return not self._has_looped and (self._uncounted > 0 or not (self.feeds or self._prepared.has_optimizers))

    # -- a loop over batches -------------------------------------------------------------------------------------------

    def over(self, items: Iterable[Any]) -> Iterator[Any]:
        """See `Run.steps`."""
        if self.in_loop:
            raise RuntimeError(
                "run.steps was iterated within another loop whose steps are counted; iterate one of them only, or both "
                "together: for a, b in zip(loader, items)"
            )
        if self.body is None and not self._resuming.has_looked:
            self.resume()
        one = self._passes.begin(items, self._group.world_size, keep_random=self._checkpoints.can_save)
        if one is None:
            return
        with self.loop(one):
            for item in one:
                self.begin(one)
                yield item
                self.end()
            self.epoch_ends()

    @contextlib.contextmanager
    def loop(self, loader: Loader | Pass) -> Iterator[None]:
        """The context of a loop over batches, which may end by a `break`, and in the middle of a step."""
        if self.body is None and not self._resuming.has_looked and self._checkpoints.is_automatic:
            self._warn(
                "checkpoint_every: checkpoints are taken, but nothing here resumes from them; iterate run.epochs(…), "
                "or call run.resume() before the first batch"
            )
        self._loops += 1
        self.in_loop = self._has_looped = True
        self._metrics.epoch_begins(self._epochs.epoch, self._epochs.count, _length(loader), loader.done)
        try:
            yield
        finally:
            self.in_loop = False
            if self.within:
                self._break_off()
            if isinstance(loader, Pass):
                self._passes.end()
            self._metrics.loop_exited()
            if self._watch is not None:
                self._watch.loop_ended(self._loops)

    def begin(self, loader: Loader | Pass) -> None:
        """Start a step with a batch of `loader`, unless the run is to stop before it."""
        if self._watch is not None:
            may_stop = not self._is_accumulating
            if not self._watch.begin(self._loops, self.done + 1, may_stop=may_stop):
                loader.put_back()
                self._stop()
        self._batches = [loader]
        self._is_fresh = False
        self._gradients.batch_begins(loader)
        self._metrics.data_received(loader.samples, loader.total)
        if self._trial is not None:
            self._trial.saw_batch(loader.total)

    def add(self, loader: Loader) -> None:
        """Add another loader's batch to the current step."""
        self._batches.append(loader)

    def end(self) -> None:
        """End the step: the next batch was requested."""
        if self._is_asked and not self._gradients.has_seen:
            raise RuntimeError(_UNSEEN)
        self._is_asked = False
        waits = self._is_last or self._gradients.is_accumulating_by_hand(self.done)
        self._count()
        waits = waits or self._gradients.is_begun
        if self._checkpoints.is_due(self.done):
            self._is_late = True
        if self._is_late and not waits:
            self._take()
        self._metrics.step_done(self._epochs.epoch, self.done)
        if self._watch is not None and self._watch.is_to_stop(self.done, may_stop=not waits):
            self._stop()

    def epoch_ends(self) -> None:
        """At the end of a loader's epoch, on all ranks."""
        if self._is_fresh and self.body is not None:
            self._is_late = True  # only now it is known that it was the last batch
        self._prepared.share_buffers()
        self._prepared.check_steps()
        self._metrics.epoch_ends()

    @property
    def _is_last(self) -> bool:
        """Whether the current batch is the last one of its loop, and code of the epoch's body follows."""
        return self.body is not None and any(loader.is_last for loader in self._batches)

    def _count(self) -> None:
        self.done += 1
        self._batches = []
        self._gradients.batch_ends()

    def _break_off(self) -> None:
        """End a step in which the loop was left: count it if its batch was trained on, else take the batch back."""
        if self.counts:
            self._count()
            self._metrics.step_exited(self._epochs.epoch, self.done)
            return
        self._gradients.put_back(self._batches[0])
        for loader in self._batches:
            loader.put_back()
        self._batches = []

    # -- the current step ----------------------------------------------------------------------------------------------

    def backward(
        self,
        compute: Callable[[float | Tensor], None],
        weight: float | Tensor | None = None,
        *,
        is_sum: bool = False,
        inputs: Sequence[Tensor] | None = None,
        again: bool = False,
    ) -> None:
        """Do a backward; see `Gradients.backward`."""
        batch = self._batches[0] if self._batches else None
        self._gradients.backward(compute, batch, self.done + 1, weight, is_sum=is_sum, inputs=inputs)
        self._prepared.check_gradients(self, again)

    def optimizer_stepped(self, number: int) -> None:
        """Note that an optimizer has used the gradients; `number` is its place in the order of `setup`, from 0."""
        self._stepped(number)
        if self._trial is not None and self._trial.stepped(number):
            self._trial.write()
            self._close()
            raise TrialOver

    def step_done(self) -> None:
        """See `Run.step_done`."""
        self._stepped(-1)

    def _stepped(self, number: int) -> None:
        """Note a step of an optimizer that was set up, by its number, of another one, by its id, or by hand."""
        if self._first is not None and number >= 0:
            source = self._batches[0] if self._batches else None
            if not self._first.optimizer_stepped(self._gradients, source, max(self._prepared.accumulates)):
                self._first = None
        self._gradients.optimizer_stepped()
        if not self.in_loop and not self._has_looped and not (self.feeds and self.body is None):
            self._count_outside(number)
        if self._replicas is not None:
            self._replicas.stepped(number, self.done + self.within)

    def _model_called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Look at a forward pass of the first steps; returns whether to look at the next one."""
        if self._replicas is not None:
            self._replicas.begins(self.done)
        divided = any(isinstance(batch, Loader) for batch in self._batches)
        return self._first is not None and self._first.model_called(args, kwargs, divided=divided)

    def _other_stepped(self, number: int) -> None:
        """Note a step of an optimizer that was not set up, unless nothing is part of the run yet."""
        if self.in_loop or self.body is not None or self._prepared.has_models or self._prepared.registered:
            self._stepped(number)

    def _needs_states(self) -> bool:
        """Whether checkpoints are on, so that they must hold the states of all optimizers."""
        if self.in_loop or self.body is not None:
            return self._checkpoints.can_save
        is_before = not self._has_looped and self._epochs.number < 0
        return is_before and self._resuming.has_looked and self._checkpoints.can_save

    def _count_outside(self, number: int) -> None:
        """Count a step in a loop of another form; of several optimizers, the one that steps first counts."""
        if self._counting is None:
            self._counting = number
        if number != self._counting:
            return
        self.done += 1
        self._uncounted += 1
        if self.body is None and self._checkpoints.is_automatic:
            self._warn(
                "checkpoint_every: no checkpoints are taken in a loop of this form; iterate run.steps(…) to have them, "
                "or call run.save() and run.resume(), and begin the loop at run.step"
            )

    def is_accumulating(self, every: int | None = None) -> bool:
        """Whether the last backward only added to the gradients, so that the optimizer does not step yet.

        Args:
            every: the batches per step of the optimizer; None means those of the last backward.
        """
        return self._gradients.is_accumulating(every, within=self.within)

    @property
    def _is_accumulating(self) -> bool:
        """Whether there are gradients of an accumulation that is not complete."""
        return self._gradients.is_begun or self._gradients.is_accumulating_by_hand(self.done)

    @property
    def counts(self) -> bool:
        """Whether the current batch was trained on: gradients were computed, and used if there are optimizers."""
        return self.within and self._gradients.is_used

    @property
    def within(self) -> bool:
        """Whether a step is under way."""
        return bool(self._batches)

    @property
    def accumulates(self) -> bool:
        """Whether a step of some optimizer takes several batches."""
        return max(self._prepared.accumulates) > 1

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def save(self, block: bool = False) -> None:
        """See `Run.save`.

        If a resumed run would repeat the rest of the epoch's body, without batches or with the same ones, the
        checkpoint is taken at the end of the body.

        Raises:
            RuntimeError: the run has no folder for checkpoints, or an accumulation of gradients has begun.
            paceline.CheckpointError: this checkpoint or the previous one could not be written.
        """
        self._check_state()
        self.optimizers.check()
        if self._epochs.is_resuming:
            return  # the newest checkpoint is of a later loop, which the script has not reached yet
        self._check_seen()
        waits = self._is_asked
        if self.body is not None:
            if self.within:
                waits = waits or (self._gradients.trained and self._is_last)
            elif not self.in_loop and self._is_uncounted():
                self._is_late = True
                self._warn(
                    "run.save: the steps of this epoch come neither from run.dataloader nor from run.steps, so the "
                    "checkpoint is taken at the end of the epoch's body"
                )
                return
            else:
                waits = not self.in_loop and self._has_looped and not self._is_over()
        if block or not waits:
            self._take(block=block)
        self._is_late = waits

    def _check_seen(self) -> None:
        """Check that it is known which steps were done; within a first step, that is known at its end.

        Raises:
            RuntimeError: they are those of a loop by hand.
        """
        if self._gradients.has_seen:
            return
        if self.within:
            if self._gradients.number > 1:
                raise RuntimeError(_UNSEEN)
            self._is_asked = True
            return
        is_before = self.body is None and not self._has_looped and self._epochs.number < 0
        if is_before and not self.done and (self._prepared.has_models or self._prepared.registered):
            self._warn(
                "run.save: no step was counted so far, so a resumed run begins at run.step 0; in a loop by hand, call "
                "run.step_done() after each step"
            )

    def _check_state(self) -> None:
        """Check that a checkpoint can hold the state: it does not hold gradients."""
        if not self._checkpoints.can_save:
            raise RuntimeError("there is no folder for checkpoints; pass checkpoint_dir= to paceline.init")
        if not self._gradients.check_saved(within=self.within):
            self._warn("gradients that no optimizer.step() has used are in no checkpoint; save after optimizer.step()")

    def _take(self, block: bool = False) -> None:
        """Take a checkpoint here."""
        self._check_state()
        done = self.done + (self.within and self._gradients.trained)
        before = self.within and not self._gradients.trained
        epoch, passes = self._epochs.epoch, self._passes.position(before=before)
        if self._is_over():  # saved after the loop: the rest of the body is not repeated
            epoch, passes = epoch + 1, (0, 0)
        progress = {
            "epoch": epoch,
            "loop": max(0, self._epochs.number),
            "step": done,
            "passes": passes,
            "loaders": [feed.state_dict(before=before and feed.loader in self._batches) for feed in self.feeds],
        }
        with self._metrics.checkpointing():
            compared = self._replicas.saved() if self._replicas is not None else None
            self._checkpoints.save(done, progress, block=block, compared=compared)
        self._is_late, self._is_fresh = False, True

    def _is_over(self) -> bool:
        """Whether this epoch's training is done, as far as that is known before the end of its body."""
        loop, epoch = self._epochs.number, self._epochs.epoch
        if loop < 0 or self.in_loop:
            return False
        if self._uncounted and not self._has_looped:
            return not self._epochs.is_active  # it was left by a break
        feeds = [feed for feed in self.feeds if epoch == 0 or (feed.used_in is not None and feed.used_in[0] == loop)]
        return bool(feeds) and not self._passes.ended and all(feed.finished_in == (loop, epoch) for feed in feeds)

    @property
    def lost(self) -> CheckpointError | None:
        """Why the last state is not on the disk, unless the run stops in order to be resumed."""
        return None if self._is_stopping else self._checkpoints.lost

    # -- resuming ------------------------------------------------------------------------------------------------------

    def resume(self) -> bool:
        """See `Run.resume`."""
        if not self._resuming.find():
            return False
        self._resuming.load(self.feeds, by_epochs=False)
        self.done = self._resuming.step
        return True

    # -- the end -------------------------------------------------------------------------------------------------------

    def _stop(self) -> NoReturn:
        """Save the state, and exit with the code that asks for a resume."""
        assert self._watch is not None
        why = self._watch.stop_signal
        self._take(block=True)
        self._metrics.stops()
        if self._group.is_main:
            saved = "is saved" if self.lost is None else "is not saved"
            print(f"paceline: {why}: stopped after step {self.done}, which {saved}", file=sys.stderr, flush=True)
        self._is_stopping = True
        record("Preempted", f"stopped by {why} after step {self.done}")
        self._close()
        raise Preempted

    def close(self) -> None:
        """Write what is left, and leave the other ranks."""
        self.optimizers.stop()
        # If `Run.epochs` was left by a break, the last steps are not saved.
        unsaved = self._checkpoints.is_automatic and self.done > self._checkpoints.saved
        unsaved = (unsaved or self._is_late) and not self._gradients.is_begun and not self._epochs.is_resuming
        self.ending.close(self._take if unsaved else None, self._compare_last)

    def leave(self, error: BaseException | None) -> None:
        """End with the process; see `Ending.leave`."""
        self.optimizers.stop()
        self.ending.leave(error, self._compare_last)

    def _compare_last(self) -> None:
        if self._replicas is not None:
            self._replicas.ends(self.done)

    # -- helpers -------------------------------------------------------------------------------------------------------

    def warn_of_new_loader(self) -> None:
        """Warn of a loader that is made within the epoch that iterates it, and so again in every epoch."""
        if self._checkpoints.can_save:
            self._warn(
                "a run.dataloader made within an epoch begins with the order of the first one each time, and the epoch "
                "cannot be resumed in its middle; make the loader before run.epochs"
            )

    def _warn(self, text: str) -> None:
        """Warn on rank 0, once."""
        if self._group.is_main and text not in self._warned:
            self._warned.add(text)
            log.warning(text)


def _length(loader: Loader | Pass) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def run_folder() -> Path | None:
    """The job's folder on this machine, when `paceline run` started the rank."""
    folder = os.environ.get("PACELINE_RUN_DIR")
    return Path(folder) if folder else None
