"""The data loader of a training script: torch's DataLoader, sharded over ranks, with a position that can be saved.

A batch is consumed when the training loop has received it. Workers read ahead; what they have read but the loop has not
received is read again after a resume.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader

from paceline.train.group.group import Group
from paceline.train.torch_types import StateDict

from .keep_working import KeepWorking
from .sampler import EpochPosition, Mark, Shard, share
from .split import Split
from .stream_parts import Parts
from .to_device import to_device
from .workers import StreamFetch

log = logging.getLogger("paceline")
_MARK = ("epoch", "position", "stream", "is_over", "batches")  # names of what a `Mark` has, in a state


class Loader:
    """Yields this rank's batches, on the device, from where training is to the end of the epoch.

    The next iteration is the next epoch. After a `break`, the next iteration continues with the rest of the epoch, so
    that no sample is left out; in evaluation, it starts again. All ranks get the same number of batches: if the last,
    uneven global batch has no sample for a rank, the rank gets rank 0's first sample as a stand-in, whose loss must not
    count (its `weight` is 0). In evaluation, such a rank stops one batch early instead.

    `state_dict()` is the position after the batch yielded last, the same on every rank: take it once the optimizer has
    stepped on that batch. Built by `make_loader`.
    """

    def __init__(
        self,
        dataset: Any,
        position: EpochPosition,
        build: Callable[[], DataLoader[Any]],
        *,
        made_of: Mapping[str, object],
        sampler: Any,
        batch_sampler: Any,
        batch_size: int | None,
        steps: Callable[[], int],
        rank: int,
        world_size: int,
        ranks: Group | None,
        device: torch.device,
        evaluation: bool,
        stream: StreamFetch | None,
        split: Split | None,
    ) -> None:
        self.dataset = dataset  # the whole data set, of which this rank gets its share
        self.sampler = sampler  # the user's own, or an equivalent with a length that can be iterated; None for a stream
        self.batch_sampler = batch_sampler  # the user's own, if there is one
        self.made_of = made_of  # the data set and everything else that determines the samples, by name
        self.shard: Shard | None = None  # the shard of the batch yielded last; None before the first
        self.on_begin: Callable[[], None] = lambda: None  # called before each iteration
        self.on_evaluation_begins: Callable[[], None] = lambda: None  # called before each evaluation
        # Called with True before each batch of an evaluation, and with False at its end.
        self.on_evaluation: Callable[[bool], None] = lambda _: None
        self.on_evaluated: Callable[[], None] = lambda: None  # called when all its batches were used
        self._split = split
        self._parts: Parts | None = None  # of the epoch, where it is read in parts
        self._is_within = False  # the script has a batch of an iteration that goes on
        self._rank = rank
        self._ranks = ranks if world_size > 1 else None
        self._position = position
        self._build = build
        self._given = batch_size  # samples of each rank, as the script says
        self._steps = steps
        self._world_size = world_size
        self._device = device
        self._is_there = device.type == "cpu"  # whether batches are on the device from the start
        self._evaluation = evaluation
        self._stream = stream
        self._dataloader = build()
        self._workers_follow = False  # persistent workers of an iterable data set will begin at the current position
        self._iterations = 0
        self._before = position.mark()  # where training was before the batch yielded last

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return self._steps()

    def __iter__(self) -> Iterator[Any]:
        refuse_update_bn(sys._getframe(1))
        return self._evaluate() if self._evaluation else self._batches()

    def whole_epoch(self) -> Iterator[Any]:
        """The batches of a whole epoch, after which training goes on where it was."""
        state = self.state_dict()
        self._workers_follow = False
        self._position.rewind()
        try:
            yield from self._batches()
        finally:
            self.load_state_dict(state)

    def _evaluate(self) -> Iterator[Any]:
        """The batches; `on_evaluation` is called for each."""
        self.on_evaluation_begins()
        try:
            for batch in self._batches():
                self.on_evaluation(True)
                yield batch
            self.on_evaluated()
        finally:
            self.on_evaluation(False)

    def _batches(self) -> Iterator[Any]:
        """The batches from where training is to the end of the epoch."""
        self.leave()
        iteration = self._iterations
        self.on_begin()
        if self._evaluation:  # each pass draws the same, since no checkpoint has the number of passes
            self._position.rewind()
            self._position.epoch = 0
        if self._position.is_over:  # after its last batch, the loop was left or a state saved
            self._workers_follow = False
            self._position.end_epoch()
            return
        is_empty = self._position.position == 0
        for batch, shard in self._packets():
            is_empty = False
            if iteration != self._iterations:
                raise RuntimeError(
                    "this iteration of the loader is over, since a later one has begun or a state was loaded: "
                    "iterate the loader once at a time"
                )
            self._before = self._position.mark()
            self._position.advance(shard)
            self.shard = shard
            if not self._is_there:
                batch = to_device(batch, self._device, non_blocking=self._dataloader.pin_memory)  # noqa: PLW2901
            self._is_within = True
            try:
                yield batch
            finally:
                if iteration == self._iterations:
                    self._is_within = False
        if is_empty and self._stream is not None and self._rank == 0:
            log.warning(
                "%s had no elements in epoch %d; if it has had some before, it must go to its beginning at its end",
                type(self.dataset).__name__, self._position.epoch,
            )  # fmt: skip
        self._position.end_epoch()
        self._workers_follow = self._dataloader.persistent_workers and (
            self._split is None or self._split.is_like_next(self._parts)
        )

    def _packets(self) -> Iterator[tuple[Any, Shard]]:
        """Batches with their shards, from the current position."""
        self._parts = self._split.plan(self._position) if self._split is not None else None
        if self._stream is not None and not self._workers_follow:
            self._stream.begin(self._position, self._parts)
            self._dataloader = self._build()  # persistent workers would not begin there
        self._workers_follow = False
        packets = self._start()
        if self._split is None or self._parts is None:
            return packets
        return self._split.join(packets, self._position, self._parts)

    def _start(self) -> Iterator[tuple[Any, Shard]]:
        if not self._dataloader.num_workers and not self._dataloader.pin_memory:
            return _read_here(self._dataloader)
        init = self._dataloader.worker_init_fn
        if not isinstance(init, KeepWorking) or not self._dataloader.num_workers:
            return iter(self._dataloader)
        with init.starting(self._dataloader.multiprocessing_context):
            return iter(self._dataloader)

    @property
    def epoch(self) -> int:
        """The epoch of the batch yielded last; the next one as soon as an iteration has ended."""
        return self._position.epoch

    @property
    def position(self) -> int:
        """Samples of the epoch that all ranks together have received; batches where there is a batch sampler."""
        return self._position.position

    @property
    def batch_size(self) -> int | None:
        """This rank's samples of a full batch; None where a batch sampler makes the batches."""
        size = self._position.global_batch_size
        return share(0, size, self._rank, self._world_size)[2] if size else None

    @property
    def batch_index(self) -> int:
        """Number of the current batch within its epoch, from 0; outside of a loop, that of the next batch."""
        return self._position.batches - self._is_within

    @property
    def done(self) -> int:
        """Batches of the current size up to the current position of the epoch."""
        return self.position // self._position.per_step

    @property
    def samples(self) -> int:
        """This rank's samples in the batch yielded last, 0 for a stand-in."""
        return self.shard.samples if self.shard else 0

    @property
    def total(self) -> int:
        """Samples of all ranks together in this step."""
        return self.shard.total if self.shard else 0

    @property
    def weight(self) -> float:
        """What to multiply this rank's mean loss by, to make the mean over ranks the mean over the step's samples."""
        return self.samples * self._world_size / self.total if self.total else 0.0

    @property
    def remaining(self) -> int | None:
        """Samples of all ranks together that are left in the epoch after this step; None if that is not known."""
        return self._position.remaining(self.shard) if self.shard else None

    @property
    def is_last(self) -> bool:
        """Whether the epoch ends with this step; False also if that is not known, see `look_ahead`."""
        return self.shard.is_last if self.shard else False

    def look_ahead(self) -> None:
        """From the next iteration on, read one element ahead, so that an epoch's last batch is known as such."""
        if not self._position.looks_ahead:
            self._position.looks_ahead = True
            self._workers_follow = False

    def leave(self) -> None:
        """End the iteration under way, also if its iterator is still held."""
        self._iterations += 1
        self._is_within = False

    def put_back(self) -> None:
        """Take back the batch yielded last: the next iteration begins with it."""
        self._position.go_back(self._before)

    def mark(self) -> Mark:
        """The position of training, for `go_back` and `state_dict`."""
        return self._position.mark()

    def go_back(self, mark: Mark, *, ends: bool = False) -> None:
        """Go to the position of `mark` and end an iteration under way; do nothing if that is the position.

        With `ends`, an epoch of which nothing was left there stays ended if an iteration has ended it since.
        """
        if self.is_at(mark):
            return
        epoch = self._position.epoch
        self._position.go_back(mark)
        if ends and mark[3] and epoch > mark[0]:
            self._position.end_epoch()
        self.leave()
        self._workers_follow = False

    def is_at(self, mark: Mark) -> bool:
        """Whether `mark` is the position."""
        now = self._position.mark()
        return (now[:2], now[3:]) == (mark[:2], mark[3:])  # the state of a data set may not be comparable

    @staticmethod
    def mark_of(state: Mapping[str, Any]) -> Mark:
        epoch, position, stream, is_over, batches = (state[name] for name in _MARK)
        return (
            epoch,
            position,
            stream if (parts := state.get("parts")) is None else Parts.from_plain(parts),
            is_over,
            batches,
        )

    def state_dict(self, *, before: bool = False, at: Mark | None = None) -> StateDict:
        """The position of training: small, the same on every rank, valid for any other number of ranks.

        If a stream is read in parts, this is a collective of all ranks.
        """
        state = {**self._position.state_dict(), "batch_size": self._given}
        if before or at is not None:
            state |= dict(zip(_MARK, at or self._before, strict=True))
        if isinstance(parts := state["stream"], Parts):
            if self._ranks is not None:
                parts = parts.merged(self._ranks.gather_objects(parts))
            state |= {"stream": None, "parts": parts.to_plain()}
        return state

    def settings(self) -> dict[str, object]:
        """Settings that must be the same on all ranks, by name."""
        state = self._position.state_dict()
        return {name.replace("_", " "): state[name] for name in ("order", "seed", "global_batch_size")}

    def load_state_dict(self, state: StateDict) -> None:
        """Go to the position of `state`. Reads no data, and ends an iteration that is under way.

        If the loader was made with the `batch_size` of `state`, the global batch size becomes that of `state`, too.
        """
        self._position.load_state_dict(state)
        if (parts := state.get("parts")) is not None:
            if self._split is None:
                raise ValueError(
                    "cannot resume: the checkpoint was made with a stream that was read in parts; "
                    "go back to that data set, or start again without the checkpoint"
                )
            self._position.stream = Parts.from_plain(parts)
        if state["global_batch_size"] not in (0, self._position.global_batch_size):
            self._go_on_with_batches_of(state["global_batch_size"], state["batch_size"])
        self.leave()
        self._workers_follow = False

    def _go_on_with_batches_of(self, size: int, given: int | None) -> None:
        """Keep the global batch size of a checkpoint if it differs because of the ranks alone, and say what is used."""
        now = self._position.global_batch_size
        if self._given is not None and self._given == given:
            self._position.global_batch_size = size
            text = f"a step still takes {size} samples, on {self._world_size} ranks now, since batch_size={given} is "
            text += f"that of each rank at the first start; for steps of {now}, pass global_batch_size={now}"
        else:
            text = f"a step takes {now} samples from here on, since the script says "
            text += f"global_batch_size={now}" if self._given is None else f"batch_size={self._given}"
            text += f" now; it took {size} until the checkpoint, so to go on as before, pass global_batch_size={size}"
        if self._rank == 0:
            print(f"paceline: {text}", file=sys.stderr, flush=True)


def refuse_update_bn(caller: FrameType) -> None:
    """Refuse to be iterated by torch's `update_bn`."""
    if caller.f_code.co_name == "update_bn" and caller.f_globals.get("__name__") == "torch.optim.swa_utils":
        raise RuntimeError(
            "torch's update_bn sees the batches of one rank only, and those for training would count as steps; "
            "call run.update_bn(loader, model) instead"
        )


def _read_here(loader: DataLoader[Any]) -> Iterator[tuple[Any, Shard]]:
    """What a DataLoader of ours without workers yields. torch notes each batch for its profiler, which costs 10 µs."""
    fetch: Any = loader.dataset
    return iter(fetch) if loader.batch_sampler is None else map(fetch.__getitems__, loader.batch_sampler)
