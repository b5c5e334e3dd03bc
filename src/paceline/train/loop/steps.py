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
from .feed import Feed
from .first_steps import FirstSteps
from .gradients import Gradients
from .optimizers import OtherOptimizers
from .passes import EpochLoops, Pass, Passes, Place, length_of
from .replicas import Replicas
from .resuming import Resuming
from .tune_trial import TrialOver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

    from paceline.train.checkpoint.errors import CheckpointError
    from paceline.train.control.watch import Watch
    from paceline.train.data.sampler import Mark
    from paceline.train.group.group import Group
    from paceline.train.metrics.metrics import Metrics
    from paceline.train.parallel.prepared import Prepared
    from paceline.train.torch_types import Arguments, StateDict

    from .checkpointing import Checkpointing
    from .passes import Body
    from .tune_trial import Trial

log = logging.getLogger("paceline")
_UNSEEN = (
    "run.save: the loop calls neither run.backward nor an optimizer of torch, so it is not known whether this batch is "
    "done, and a resumed run might train on it again; call run.step_done() when a batch is done, before run.save"
)
_REPEATS = (
    "run.steps begins with its first item again, and trains on items once more: the checkpoint is of another number of "
    "ranks, or of other groups of them that share data, with which items that are no sequence may be others; iterate "
    "run.dataloader to use each sample once"
)
_AHEAD = (
    "something requests the batches of a training loader ahead of the loop, so a resumed run would leave out those "
    "between; iterate run.dataloader itself, with num_workers= and prefetch_factor= to read ahead"
)
_LEFT = (
    "this iteration of a training loader is over, since the loader was iterated anew, or an epoch of run.epochs has "
    "begun or ended and nothing was trained before; iterate the loader again: for batch in loader"
)


class Steps:
    """The steps of a run: how many were done, their position in the epochs, and what is due after each."""

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
        self.done = 0  # batches trained on, or steps of the optimizer in loops of another form; over all attempts
        self.feeds: list[Feed] = []  # the training loaders
        self._group, self._prepared, self._checkpoints = group, prepared, checkpoints
        self._metrics, self._watch, self._close, self._trial = metrics, watch, close, trial
        self._epochs = EpochLoops(keep_random=checkpoints.can_save)
        self._passes = self._journal = Passes(keep_random=checkpoints.can_save)  # the latter is that of the last pass
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
        # Those that were not set up.
        self.optimizers = OtherOptimizers(prepared, stepped=self._other_stepped, refuses=self._needs_states)
        self.ending = Ending(group, checkpoints, metrics, watch)  # ends the run; see also `close`
        self._loops = 0
        self._source: Loader | Pass | None = None  # of the loop under way whose batches are counted as steps
        self._came_in: Body | None = None  # the body that its current batch came in
        self._batches: list[Loader | Pass] = []  # with the current batches; the first one counts the steps
        self._counting: int | None = None  # number of the optimizer whose steps are counted, if no batches are
        # The last pass, which is under way, or of which it is not known whether it was a look.
        self._is_whole = False  # whether it has come to its end
        self._is_open = False  # whether it has ended with gradients that an optimizer may still use
        self._is_unused: bool | None = None  # whether nothing used its first batch; None: that batch has not ended
        self._is_ahead = False  # whether it has ended, so that a step after it uses its last batch
        self._pending = 0  # batches that count if a step follows in the pass
        self._tentative = 0  # batches that were counted since gradients were computed, and do not count without a step
        self._unseen = 0  # looks before any step, and without an optimizer
        self._looked = 0  # batches of looks, over all passes
        self._asked = 0  # steps after which it was asked whether a checkpoint is due
        self._marks: list[Mark] = []  # where the loaders were at its start
        # This epoch's body.
        self._has_looped = False  # whether there was a pass that has trained
        self._uncounted = 0  # steps of the optimizer outside of such loops
        # Checkpoints.
        self._is_late = False  # whether one was due where none could be taken
        self._is_fresh = False  # whether one was taken since the last batch came
        self._is_asked = False  # whether one was asked for before any training was seen
        self._is_stopping = self._is_closing = False
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

    @property
    def loaders_before(self) -> int:
        """Number of training loaders that the script has made so far, without those of other epochs' bodies."""
        return sum(feed.made_in in (None, self.body) for feed in self.feeds)

    def over_epochs(self, count: int) -> Iterator[int]:
        self._leave_look()
        self._settle()
        if self._epochs.number < 0 and not self._resuming.is_pending:
            self._resuming.find_in_loops()
        if self._passes.target is not None:
            self._arrive()
        self._epochs.enter(count)
        self._passes.restart()
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
        self._is_ahead = False

    def _body_ends(self) -> None:
        """At the end of an epoch's body: write what was logged in it, and take a checkpoint that was due."""
        self._leave_look()
        self._settle()
        if self._passes.target is not None:
            self._arrive()
        self._prepared.evaluation_begins()  # the script may evaluate without a loader of the run
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
            and self._watch.is_to_stop(self._number, may_stop=not waits)
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

    @property
    def in_loop(self) -> bool:
        """Whether a loop whose steps are counted is under way."""
        return self._source is not None

    def over(self, items: Iterable[Any]) -> Iterator[Any]:
        feed = items if isinstance(items, Feed) else None
        source = feed.loader if feed is not None else Pass(items, self._group.data_size)
        if self.encloses(source):
            raise RuntimeError(
                "run.steps was iterated within another loop whose steps are counted; iterate one of them only, or both "
                "together: for a, b in zip(loader, items)"
            )
        is_first = self._is_before_loops and not self._resuming.has_looked
        if is_first and self._resuming.find() and not self._resuming.is_ahead:
            self._load()
        if feed is not None:
            feed.begins()
        yield from self.count(source, is_numbered=True)

    def encloses(self, source: Loader | Pass) -> bool:
        """Whether a loop over `source` that begins now is one within the loop under way.

        If not, an iterator of the latter is only held: its loader is iterated anew, or gave no batch in this body.
        """
        outer = self._source
        if outer is None or outer is source:
            return False
        return isinstance(outer, Pass) or self._came_in == self.body

    def count(self, source: Loader | Pass, *, is_numbered: bool = False) -> Iterator[Any]:
        """The batches of `source`, which are steps. Ends the loop under way."""
        self._leave()
        # Before `Run.epochs`, the script itself continues its loops over loaders.
        if not self._enter(source, is_numbered=is_numbered or not self._is_before_loops):
            return
        with self._loop(source) as number:
            for batch in source:
                self._begin(source)
                yield batch
                if number != self._loops or not self.in_loop:
                    raise RuntimeError(_LEFT)
                self._end()
            self._epoch_ends()

    @property
    def _is_before_loops(self) -> bool:
        """Whether the script has not come to `Run.epochs`."""
        return self._epochs.number < 0

    def _enter(self, source: Loader | Pass, *, is_numbered: bool) -> bool:
        """Begin a pass; returns False if a resumed run leaves it out, as one that has trained and ended before."""
        self._settle()
        self._journal = self._passes if is_numbered else Passes(keep_random=False)
        if self._journal.skips():
            self._has_looped = True
            return False
        if self._journal.is_behind():
            self._arrive()
        look = self._journal.seen_look()
        self._marks = [feed.loader.mark() for feed in self.feeds]
        starts = [(feed.loader, mark) for feed, mark in zip(self.feeds, self._marks, strict=True)]
        if self._journal.begin(source, starts):
            self._arrive()
            if isinstance(source, Pass) and source.repeats:
                self._warn(_REPEATS)
        elif look is not None:
            for feed, mark in zip(self.feeds, look, strict=False):
                feed.loader.go_back(mark)
        return True

    @contextlib.contextmanager
    def _loop(self, source: Loader | Pass) -> Iterator[int]:
        """The context of a loop over batches, which may end by a `break`, and in the middle of a step; its number."""
        if self._is_before_loops and not self._resuming.has_looked and self._checkpoints.is_automatic:
            self._warn(
                "checkpoint_every: checkpoints are taken, but nothing here resumes from them; iterate run.epochs(…), "
                "or call run.resume() before the first batch"
            )
        self._loops += 1
        number = self._loops
        self._source, self._asked, self._is_whole = source, self.done, False
        self._is_unused, self._is_ahead = None, False
        self._has_looped = self._has_looped or self._journal.trains
        self._gradients.pass_begins()
        self._metrics.epoch_begins(self._epochs.epoch, self._epochs.count, length_of(source), source.done)
        try:
            yield number
        finally:
            if number == self._loops:
                self._leave()

    def _leave(self) -> None:
        """End the loop under way, if there is one."""
        if (source := self._source) is None:
            return
        self._source = None
        if self.within:
            self._break_off()
        if isinstance(source, Loader):
            source.leave()
        self._pass_ends()
        self._metrics.loop_exited()
        if self._watch is not None:
            self._watch.loop_ended(self._loops)

    def _leave_look(self) -> None:
        """Before and behind an epoch's body: end a look, of which an iterator is held."""
        if isinstance(self._source, Loader) and not self._has_trained:
            self._leave()

    def _begin(self, source: Loader | Pass) -> None:
        """Start a step with a batch of `source`, unless the run is to stop before it."""
        if not self._journal.trains and self._journal.event():
            self._arrive()
        if self._watch is not None:
            may_stop = not self._is_accumulating
            if not self._watch.begin(self._loops, self._number + 1, may_stop=may_stop):
                source.put_back()
                self._stop()
        self._batches, self._came_in = [source], self.body
        self._is_fresh = False
        self._gradients.batch_begins(source)
        self._metrics.data_received(source.samples, source.total)
        if self._trial is not None:
            self._trial.saw_batch(source.total)

    def add(self, loader: Loader) -> None:
        """Add another loader's batch to the current step; between two steps, the next item is made of it."""
        if self.within:
            self._batches.append(loader)

    def _end(self) -> None:
        if self._is_asked and not (self._gradients.has_seen or self._prepared.has_optimizers):
            raise RuntimeError(_UNSEEN)
        self._is_asked = False
        waits = self._is_last or self._gradients.is_accumulating_by_hand(self.done)
        self._count()
        waits = waits or self._gradients.is_begun
        if self._journal.trains:
            if self._checkpoints.is_due(self.done, self._asked) and not self._keeps_first():
                self._is_late = True
            self._asked = self.done
            if self._is_late and not waits:
                self._take()
        self._metrics.step_done(self._epochs.epoch, self.done)
        if self._watch is not None and self._watch.is_to_stop(self._number, may_stop=not waits):
            self._stop()

    def _epoch_ends(self) -> None:
        """At the end of a loader's epoch, on all ranks."""
        self._is_whole = True
        self._is_ahead = self._is_unused is True and self._journal.trains and self._checkpoints.can_save
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
        """Count the batch: as a step, if one of the pass was seen; else that is known when one follows."""
        if self._is_unused is None:
            self._is_unused = not (self._gradients.trained or self._prepared.was_called)
        if not self._journal.trains and self._has_trained:
            self._train()
        if self._journal.trains:
            self.done += 1
        elif self._gradients.is_open(self.done):
            self.done += 1
            self._tentative += 1
        else:
            self._pending += 1
        self._batches = []
        self._gradients.batch_ends()

    @property
    def _has_trained(self) -> bool:
        """Whether a step was seen in the pass under way."""
        used = self._gradients.has_stepped or self._gradients.is_used
        return self._journal.trains or used or self._is_unseen

    @property
    def _is_unseen(self) -> bool:
        """Whether nothing was set up, or has stepped, by whose steps training is told from looking."""
        is_loop = self.body is not None or isinstance(self._journal.source, Pass)
        return is_loop and not (self._gradients.has_seen or self._prepared.has_optimizers)

    def _train(self) -> None:
        """Note that the pass trains: its batches so far count."""
        self._journal.trains = self._has_looped = True
        self.done += self._pending
        self._pending = self._tentative = 0

    @property
    def _number(self) -> int:
        """Number of batches done, those of looks included: ranks agree by it where to stop."""
        return self.done + self._pending + self._looked

    def _pass_ends(self) -> None:
        """End the pass: where no step was seen, and none can follow, it was a look."""
        if self._gradients.has_stepped and not self._journal.trains:
            self._train()
        self._is_open = not self._journal.trains and self._gradients.is_open(self.done)
        if self._journal.trains:
            self._journal.end(None, is_whole=self._is_whole)
        elif not self._is_open:
            self._look_ends()

    def _settle(self) -> None:
        """A pass whose gradients were not used until now was a look."""
        if self._is_open and not self.in_loop:
            self._is_open = False
            self._look_ends()

    def _look_ends(self) -> None:
        """Take back all of a pass that has not trained."""
        if not (self._gradients.has_seen or self._prepared.has_optimizers):
            self._unseen += 1
            if self._unseen == 2:  # the first one may come before anything is set up
                self._warn(
                    "no step was seen in two loops over run.dataloader, so their batches do not count, and come again "
                    "in the same order; if the loops train, call run.step_done() after each batch"
                )
        seen = self._journal.seen_look()
        self.done -= self._tentative
        self._looked += self._pending + self._tentative
        self._pending = self._tentative = 0
        self._gradients.look_ends()
        for feed, mark in zip(self.feeds, self._marks, strict=False):
            feed.loader.go_back(mark, ends=seen is None)
        self._journal.end(seen or self._marks, is_whole=True)

    def _arrive(self) -> None:
        """A resumed run has come to the place in the epoch's body where the checkpoint was taken."""
        self._resuming.arrive()
        self.done = self._resuming.step + self._tentative

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
        # Of loops within the step, those that have come to their end have no current batch.
        batches = self._batches[:1] + [each for each in self._batches[1:] if isinstance(each, Pass) or each.position]
        self._gradients.backward(compute, batches, self.done + 1, weight, is_sum=is_sum, inputs=inputs)
        self._prepared.check_gradients(self, again)

    def optimizer_stepped(self, number: int) -> None:
        """Note that an optimizer has used the gradients; `number` is its place in the order of `setup`, from 0."""
        self._stepped(number)
        if self._trial is not None and self._trial.stepped(number):
            self._trial.write()
            self._close()
            raise TrialOver

    def step_done(self) -> None:
        self._stepped(-1)

    def _stepped(self, number: int) -> None:
        """Note a step of an optimizer that was set up, by its number, of another one, by its id, or by hand."""
        if self._first is not None and number >= 0:
            source = self._batches[0] if self._batches else None
            if not self._first.optimizer_stepped(self._gradients, source, max(self._prepared.accumulates)):
                self._first = None
        self._gradients.optimizer_stepped()
        if self._is_ahead and not self.in_loop:
            self._warn(_AHEAD)
        if self._is_open and not self.in_loop:  # with the gradients of the whole pass
            self._is_open = False
            self._train()
            self._journal.end(None, is_whole=self._is_whole)
        if self._is_before_loops and self._passes.target is not None:
            self._resuming.depart()  # the script continues in a loop of its own
        if not self.in_loop and not self._has_looped and not (self.feeds and self.body is None):
            self._count_outside(number)
        if self._replicas is not None:
            self._replicas.stepped(number, self.done + self.within)

    def _model_called(self, given: Arguments) -> bool:
        """Look at a forward pass of the first steps; returns whether to look at the next one."""
        if self._replicas is not None:
            self._replicas.begins(self.done)
        divided = any(isinstance(batch, Loader) for batch in self._batches)
        return self._first is not None and self._first.model_called(given, divided=divided)

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
        """Whether the last backward only added to the gradients, so that the optimizer does not step yet."""
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
    def step(self) -> int:
        return self.done + (self._pending + 1 if self.counts else 0)

    @property
    def within(self) -> bool:
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
        """
        self._check_state()
        self.optimizers.check()
        if self._epochs.is_resuming or self._keeps_first():
            return  # the newest checkpoint is of a place that the script has not reached yet
        self._settle()
        trains = self.in_loop and (self._journal.trains or self._gradients.is_used)
        if not (trains or self._is_before_loops) and self._passes.event():
            self._arrive()
            return
        if self._passes.target is not None:
            return
        self._check_seen()
        # Of loaders that are nested, the inner one may go on in this step.
        waits = self._is_asked or (self._gradients.trained and len(self._batches) > 1)
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
                waits = not self.in_loop and self._passes.has_any
        if block or not waits:
            self._take(block=block)
        self._is_late = waits

    def _keeps_first(self) -> bool:
        """Whether a checkpoint taken now would take the place of one that the script will still resume from."""
        if not self._is_before_loops or not (first := self._resuming.peek()):
            return False
        if first != "loops" and (self.done or self._gradients.has_seen):
            return False  # a loop by hand, which begins anew each time
        self._warn(
            "a checkpoint that is asked for before the run has resumed is not taken: it would replace the last one"
        )
        return True

    def _check_seen(self) -> None:
        """Check that it is known which steps were done; within a first step, that is known at its end."""
        if self._gradients.has_seen:
            return
        if self.within:
            if self._gradients.number == 1:
                self._is_asked = True
            elif not self._prepared.has_optimizers:  # until one steps, the batches are only looked at
                raise RuntimeError(_UNSEEN)
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
        if self._passes.target is not None or self._resuming.is_pending:
            return  # what is repeated here is in the newest checkpoint
        self._check_state()
        self._settle()
        if self.within and self._gradients.is_used and not self._journal.trains:
            self._train()
        is_look = self.in_loop and not self._journal.trains
        now = not is_look and self.within and self._gradients.trained
        before = self.within and not now
        epoch, place = self._epochs.epoch, self._passes.place(before=before)
        if self._is_over():
            epoch, place = epoch + 1, Place()
        elif self._is_closing and not self._epochs.is_active and self._passes.left is not None:
            place = self._passes.left  # both loops were left: the next start goes on in the middle of the pass
        done = self.done + now - self._tentative
        marks = self._marks if is_look else []
        progress = {
            "epoch": epoch,
            "loop": self._epochs.number,
            "step": done,
            "place": tuple(place),
            "looks": {number: self._states(look) for number, look in self._passes.looks.items()},
            "starts": self._states([mark for _, mark in self._passes.starts]),
            "loaders": [
                *self._states(marks),
                *(
                    feed.loader.state_dict(before=before and feed.loader in self._batches)
                    for feed in self.feeds[len(marks) :]
                ),
            ],
        }
        with self._metrics.checkpointing():
            compared = self._replicas.saved() if self._replicas is not None else None
            self._checkpoints.save(done, progress, block=block, compared=compared)
        self._is_late, self._is_fresh = False, True

    def _states(self, marks: list[Mark]) -> list[StateDict]:
        """The positions of the loaders, of which some may have been made later."""
        return [feed.loader.state_dict(at=mark) for feed, mark in zip(self.feeds, marks, strict=False)]

    def _is_over(self) -> bool:
        """Whether the loop over epochs was left by a break, and the rest of the body is not to be repeated.

        So it is behind training whose place in the body is not known, and where the run ends behind whole passes.
        """
        if self._is_before_loops or self.in_loop or self._epochs.is_active:
            return False
        is_left = self._epochs.epoch < (self._epochs.count or 0)
        return (self._uncounted > 0 and not self._has_looped) or (
            self._is_closing and is_left and self._has_looped and self._is_whole
        )

    @property
    def lost(self) -> CheckpointError | None:
        """Why the last state is not on the disk, unless the run stops in order to be resumed."""
        return None if self._is_stopping else self._checkpoints.lost

    # -- resuming ------------------------------------------------------------------------------------------------------

    def model_is_set_up(self) -> None:
        self._resuming.begin()

    def resume(self) -> bool:
        if not self._resuming.find():
            return False
        self._load()
        return True

    def _load(self) -> None:
        """Load the checkpoint that was found, outside of `Run.epochs`."""
        self._resuming.load(self.feeds, by_epochs=False)
        self.done = self._resuming.step

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
        self._settle()
        self._is_closing = True
        # If `Run.epochs` was left by a break, the last steps are not saved.
        unsaved = self._checkpoints.is_automatic and self.done > self._checkpoints.saved
        unsaved = (unsaved or self._is_late) and not self._gradients.is_begun and not self._epochs.is_resuming
        self.ending.close(self._take if unsaved else None, self._compare_last)

    def leave(self, error: BaseException | None) -> None:
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


def run_folder() -> Path | None:
    """The job's folder on this machine, when `paceline run` started the rank."""
    folder = os.environ.get("PACELINE_RUN_DIR")
    return Path(folder) if folder else None
