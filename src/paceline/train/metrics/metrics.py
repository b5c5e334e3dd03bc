"""Values of `Run.log` and the times of steps: means over ranks, in files and on the screen."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import torch

from paceline.train.group.sharded import kind_of

from .progress import Progress
from .reduction import LogMismatch, Reduction, Span, Sum
from .step_times import PARTS, StepTimes, make_clock
from .writers import JsonLines, TensorBoard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from paceline.contract.records import ReplicasRecord, SyncRecord
    from paceline.train.group.group import Group

_FEWEST, _MOST = 10, 100  # steps between two reductions of what the ranks have logged
_SECONDS = 1.0  # approximate time between two reductions, if steps are short
_OWN_NAMES = {"time", "epoch", "step", "attempt", "sent_bytes", "sync_method", *(f"{part}_seconds" for part in PARTS)}
_SHOWN = {f"{part}_seconds": f"step_seconds/{part}" for part in PARTS}  # names in TensorBoard


class Metrics:
    """Means of the values of `Run.log`, and the times of steps, in files and as progress on the screen.

    Every `every` steps, and at the end of an epoch, the ranks start a reduction. When rank 0 has the result, it shows
    it, and appends a line to `metrics.jsonl` and values to the event files in `tensorboard/`; each rank appends its own
    times to `steps/rank-<rank>.jsonl`.
    """

    def __init__(
        self,
        group: Group,
        folder: Path | None,
        *,
        progress: bool = True,
        progress_file: Path | None = None,
        every: int | None = None,
        sent: Callable[[], int] = lambda: 0,
        method: Callable[[], str | None] = lambda: None,
        replicas: Callable[[], ReplicasRecord | None] = lambda: None,
    ) -> None:
        self._group = group
        self._sent, self._sent_before, self._method = sent, 0, method
        self._folder = folder
        self.times = StepTimes(make_clock(group.device), exchanges=group.world_size > 1)
        self._progress: Progress | None = None
        if group.is_main:
            self._progress = Progress(screen=progress, file=progress_file, replicas=replicas)
        self._sums: dict[str, Sum] = {}
        self._names: list[str] = []  # all names logged so far: the same list on every rank
        self._has_begun = False  # whether an epoch has
        self._in_step = False
        self._samples = self._total = 0  # in this step: of this rank, of all ranks
        self._steps = 0  # since the last reduction
        self._first = self._last = (0, 0)  # epoch and step of the first and the last of them
        self._resumed_at = 0
        self._lines = JsonLines(folder / "metrics.jsonl") if folder is not None and group.is_main else None
        self._step_lines = JsonLines(folder / "steps" / f"rank-{group.rank}.jsonl") if folder is not None else None
        self._board: TensorBoard | None = None
        self._pending: Reduction | None = None
        self._reported: Reduction | None = None  # the last one whose result was shown
        self._every = every or _FEWEST
        self._adapts = every is None

    def resumed(self, epoch: int, step: int) -> None:
        """Continue after `step` steps: TensorBoard hides what an earlier attempt wrote of later ones."""
        self._last = (epoch, step)
        self._resumed_at = step

    # -- events of the loop --------------------------------------------------------------------------------------------

    def body_begins(self, epoch: int, epochs: int) -> None:
        if self._progress is not None:
            self._progress.epoch_begins(epoch, epochs)

    def epoch_begins(self, epoch: int, epochs: int | None, steps: int | None, done: int) -> None:
        """Start the loop over the batches of an epoch, or of the rest of it. A collective of all ranks."""
        # The previous epoch was left by a break; or values were logged after the last loop, outside of `Run.epochs`.
        if self._steps or (epochs is None and self._has_begun and self._may_have_values()):
            self.flush()
        self.settle()  # what belongs to the previous loop is not shown with this one
        self._has_begun = True
        self.times.restart()
        if self._progress is not None:
            self._progress.begin(epoch, epochs, steps, done)

    def body_ends(self, epoch: int, step: int) -> None:
        """At the end of an epoch's body: write what was logged in it after the loop over its batches."""
        self._last = (epoch, step)
        if self._steps or self._may_have_values():
            self.flush()
        self.settle()

    def stops(self) -> None:
        """Before a stop: write and show what was logged. A collective of all ranks."""
        if self._steps or self._may_have_values():
            self.flush()
        self.settle()
        self.loop_exited()

    def _may_have_values(self) -> bool:
        """Whether some rank may have logged something since the last reduction; the same on all ranks."""
        return self.has_values or self._group.world_size > 1

    def epoch_ends(self) -> None:
        """At the end of an epoch: show what was logged. A collective of all ranks."""
        if self._steps:
            self.flush()
        self.settle()
        if self._progress is not None:
            self._progress.end()

    def loop_exited(self) -> None:
        """At the end of a loop, or after a `break` or an error within a step. Not a collective."""
        self._in_step = False
        self.times.leave()
        if self._progress is not None:
            self._progress.leave()

    def data_received(self, samples: int, total: int) -> None:
        """The loop has received its batch: the time since the last step was spent waiting for data."""
        self._in_step, self._samples, self._total = True, samples, total
        self.times.data_received()

    @contextlib.contextmanager
    def checkpointing(self) -> Iterator[None]:
        """The block's time counts as that of a checkpoint."""
        self.times.checkpoint_begins()
        yield
        self.times.checkpoint_ends()

    def step_done(self, epoch: int, step: int) -> None:
        self._count(epoch, step)
        if self._steps >= self._every:
            self.flush()
        self._report_if_there()
        if self._progress is not None:
            self._progress.step_done(self._total)

    def step_exited(self, epoch: int, step: int) -> None:
        """A `break` has left the loop within a step that counts. Not a collective. See `step_done`."""
        self._count(epoch, step)
        if self._progress is not None:
            self._progress.step_done(self._total)

    def _count(self, epoch: int, step: int) -> None:
        self.times.step_done()
        self._in_step = False
        self._last = (epoch, step)
        if not self._steps:
            self._first = self._last
        self._steps += 1

    def log(self, values: Mapping[str, Any]) -> None:
        """Add values of this step, weighted by its samples; outside of a step their weight is 1."""
        weight = float(self._samples) if self._in_step else 1.0
        for name, value in values.items():
            if name in _OWN_NAMES:
                raise ValueError(f"every line of metrics.jsonl has its own {name}; log yours under another name")
            if isinstance(value, torch.Tensor) and value.numel() != 1:
                raise ValueError(f"{name} has the shape {list(value.shape)}; log a single number, such as its mean")
            if kind := kind_of(value):
                raise ValueError(f"{name} is {kind}; log its value, {name}.full_tensor()")
            if name not in self._sums:
                self._sums[name] = Sum()
            self._sums[name].add(value, weight)

    # -- reductions over the ranks -------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Start to reduce what was logged since the last call, after the last reduction. A collective of all ranks."""
        self.settle()
        times = self.times.read()
        self._write_times(times)
        if not self._steps:
            self._first = self._last
        steps, sums = self._steps, self._sums
        self._steps, self._sums = 0, {}
        sent = self._sent()
        costs = [sum(times[part]) / max(steps, 1) for part in PARTS] + [(sent - self._sent_before) / max(steps, 1)]
        self._sent_before = sent
        span = Span(steps, self._first, self._last)
        self._pending = Reduction(self._group, self._names, values=self._values(sums), costs=costs, span=span)
        if self._group.world_size == 1:  # there is nobody to wait for
            self.settle()

    def settle(self) -> None:
        """Write and show what was reduced; waits for ranks that are not that far yet."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        while not pending.is_complete():
            self._compare_names(pending)
            pending = pending.again(self._names)
        _, (*seconds, _) = pending.results()
        if self._adapts and pending.span.steps:  # these seconds are the same on all ranks, and so is the choice
            self._every = min(_MOST, max(_FEWEST, round(_SECONDS / max(seconds[PARTS.index("total")], 1e-9))))
        self._report(pending)

    def _report_if_there(self) -> None:
        """Write and show what was reduced, if that does not wait for other ranks."""
        pending = self._pending
        if pending is not None and pending is not self._reported and self._group.is_main and pending.is_there():
            self._report(pending)

    def _report(self, pending: Reduction) -> None:
        """Write and show a result, once."""
        if pending is self._reported:
            return
        self._reported = pending
        means, (*parts, sent) = pending.results()
        seconds = {part: round(value, 6) for part, value in zip(PARTS, parts, strict=True)}
        # Written first: when other ranks fail, a signal may end this one here, and what was shown is in the file.
        if self._lines is not None and (pending.span.steps or means):
            costs = {**{f"{part}_seconds": value for part, value in seconds.items()}, "sent_bytes": round(sent)}
            self._write(pending.span.last, means, costs if pending.span.steps else {})
        if self._progress is not None:
            method = self._method() if pending.span.steps else None
            sync: SyncRecord | None = None
            if method is not None:
                sync = {
                    "method": method, "sent_bytes": round(sent),
                    "sync_seconds": seconds["sync"], "step_seconds": seconds["total"],
                }  # fmt: skip
            self._progress.measured(means, sync)

    def _values(self, sums: dict[str, Sum]) -> dict[str, tuple[float, float, float]]:
        """For each name: the weighted sum, the weight, and 1 for this rank; waits for the tensors, once."""
        if not sums:
            return {}
        totals = torch.stack([s.tensor(self._group.device) for s in sums.values()]).tolist()
        return {name: (total, s.weight, 1.0) for (name, s), total in zip(sums.items(), totals, strict=True)}

    def _compare_names(self, pending: Reduction) -> None:
        """Add new names, if all ranks have logged them."""
        mine = sorted(pending.values)
        everyone = self._group.gather_objects(mine)
        for rank, names in enumerate(everyone):
            if names != everyone[0]:
                raise LogMismatch(
                    f"since step {pending.span.first[1]} rank 0 has logged {_list(everyone[0])}, and rank {rank} "
                    f"{_list(names)}: means are taken over all ranks, so call run.log with the same names on each"
                )
        self._names = sorted({*self._names, *mine})

    def _write_times(self, times: dict[str, list[float]]) -> None:
        if self._step_lines is None or not self._steps:
            return
        epoch, step = self._first
        rounded = {part: [round(seconds, 6) for seconds in row] for part, row in times.items()}
        self._step_lines.append({"epoch": epoch, "step": step, "attempt": self._group.attempt, **rounded})

    def _write(self, last: tuple[int, int], means: dict[str, float], costs: dict[str, float]) -> None:
        assert self._lines is not None
        assert self._folder is not None
        (epoch, step), now = last, time.time()
        line = {"time": now, "epoch": epoch, "step": step, "attempt": self._group.attempt, **means, **costs}
        method = self._method() if costs else None
        self._lines.append(line if method is None else {**line, "sync_method": method})
        if self._board is None:
            again = self._resumed_at > 0 or self._group.attempt > 0
            self._board = TensorBoard(self._folder / "tensorboard", self._resumed_at + 1 if again else None)
        renamed = {_SHOWN.get(name, name): value for name, value in costs.items()}
        self._board.add({**means, **renamed}, step, now)

    @property
    def has_values(self) -> bool:
        """Whether this rank has logged something since the last reduction."""
        return bool(self._sums)

    @property
    def unreduced(self) -> bool:
        """Whether steps were done since the last reduction."""
        return self._steps > 0

    def discard(self) -> None:
        """After an error, when the others may be gone: discard what was not reduced; a single rank writes it."""
        if self._group.world_size == 1 and (self._steps or self._sums):
            with contextlib.suppress(RuntimeError):  # the device has failed, and a value was there
                self.flush()
        self._report_if_there()
        self._steps, self._sums, self._pending = 0, {}, None

    def _flush_after_the_last_step(self) -> None:
        """As `flush`, but another rank may have nothing to flush, and so may have left."""
        names = _list(sorted(self._sums))
        try:
            self.flush()
            self.settle()
        except LogMismatch:
            raise
        except RuntimeError as error:
            raise LogMismatch(
                f"rank {self._group.rank} has logged {names} after the last step, and another rank has left without: "
                "means are taken over all ranks, so call run.log with the same names on each"
            ) from error

    def close(self) -> None:
        """Write what is left. A collective of all ranks; another `init` may follow."""
        try:
            if self._steps:
                self.flush()
            elif self._sums:
                self._flush_after_the_last_step()
            self.settle()
        finally:
            for file in (self._lines, self._step_lines, self._board, self._progress):
                if file is not None:
                    file.close()


def _list(names: list[str]) -> str:
    return ", ".join(names) or "nothing"
