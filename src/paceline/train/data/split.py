"""A stream in parts, as the ranks read it together: which rank reads which part, and when the epoch is over."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from .sampler import EpochPosition, Shard
from .source import Indexed
from .stream_parts import Parts, is_split_by_rank, is_split_by_shard, is_split_by_worker, parts_at_most

if TYPE_CHECKING:
    from paceline.train.group.group import Group

log = logging.getLogger("paceline")


class Split:
    """Reads a stream in parts.

    A rank must learn from the others how many samples they have in a step, and whether they have any left. All ranks
    send this for the next step before they begin the current one, so no rank waits for one that stops after this step.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        rank: int,
        world_size: int,
        workers: int,
        ranks: Group | None,
        evaluation: bool,
        allowed: bool,
    ) -> None:
        self._dataset = dataset
        self._rank, self._world_size, self._workers = rank, world_size, workers
        self._ranks = ranks if world_size > 1 else None
        self._evaluation = evaluation
        self._fresh: int | None = None  # number of parts of an epoch that begins here; None: it is read whole
        self.can_split = (
            allowed
            and (world_size == 1 or ranks is not None)
            and (is_split_by_shard(dataset) or is_split_by_worker(dataset))
            and not Indexed.may_be(dataset)  # then each element is read by index anyway
        )
        if world_size > 1 and is_split_by_rank(dataset):
            warnings.warn(
                f"{type(dataset).__name__} asks for its rank: if it leaves out the elements of other ranks, most of "
                "them are never used, since the loader itself splits them over ranks; yield the elements of all ranks",
                stacklevel=4,
            )

    def plan(self, position: EpochPosition) -> Parts | None:
        """The parts of the epoch from the current position; None if each process reads the whole stream.

        A collective of all ranks. It stores the progress of all ranks in the position.
        """
        begun = position.stream if isinstance(position.stream, Parts) else None
        if begun is not None and not self.can_split:
            raise ValueError(
                f"cannot resume: the epoch was begun with {type(self._dataset).__name__} split in {begun.count} parts, "
                "and now it is read as a whole; go back to that code, or start again without the checkpoint"
            )
        if not self.can_split:
            return None
        workers = max(1, self._workers)
        if self._ranks is not None:
            states = self._ranks.gather_objects((workers, begun))
            workers = states[0][0]
            begun = begun.merged([parts for _, parts in states if parts is not None]) if begun is not None else None
        self._fresh = self._parts_of_new_epoch(self._world_size * workers, position.global_batch_size)
        if begun is None and position.position == 0 and self._fresh is not None:
            begun = Parts(self._fresh)
        if begun is not None:
            position.stream = begun
            if begun.count < self._world_size and self._rank == 0:
                log.warning(
                    "this epoch was begun in %d parts, so until it ends only %d of %d ranks have samples",
                    begun.count, begun.count, self._world_size,
                )  # fmt: skip
        return begun

    def is_like_next(self, parts: Parts | None) -> bool:
        """Whether the next epoch is split in the same way, so that workers can continue with it by themselves."""
        return not self.can_split or (parts.count if parts is not None else None) == self._fresh

    def _parts_of_new_epoch(self, wanted: int, global_batch_size: int) -> int | None:
        """The number of parts; None if splitting has no advantage, or a rank would get no part."""
        count = parts_at_most(self._dataset, wanted)
        return count if count > 1 and self._world_size <= min(count, global_batch_size) else None

    def join(
        self, packets: Iterable[tuple[Any, Shard]], position: EpochPosition, parts: Parts
    ) -> Iterator[tuple[Any, Shard]]:
        """Yield the batches, with the samples of all ranks in their step."""
        own = (each for each in packets)  # a generator, which may be asked again after its end
        packet = next(own, None)
        spare = self._spare(packet)
        end = position.position
        turn = position.batches
        total = self._send_count(packet)
        while samples := total():
            batch, shard = packet if packet is not None else (spare, None)
            if self._evaluation and shard is None:
                return
            # If other ranks wait, the next batch is taken before this step, see above.
            following: Any = None
            is_known = self._waits or position.looks_ahead
            if is_known:
                following = next(own, None)
                total = self._send_count(following)
            if shard is not None:
                part, progress = shard.stream
                parts = parts.after(part, progress.at(turn))
            end, turn = end + samples, turn + 1
            is_last = position.looks_ahead and not total()
            count = shard.samples if shard is not None else 0
            packet = None
            yield batch, Shard([], count, samples, position.epoch, end - samples, end, is_last, parts)
            del batch
            if not is_known:
                following = next(own, None)
                total = self._send_count(following)
            packet = following

    @property
    def _waits(self) -> bool:
        return self._ranks is not None and not self._evaluation

    def _send_count(self, packet: tuple[Any, Shard] | None) -> Callable[[], int]:
        """Send the other ranks how many samples this one has in a step. Returns a function that waits for the sum."""
        mine = packet[1].samples if packet is not None else 0
        if self._ranks is None or self._evaluation:
            return lambda: mine
        wait = self._ranks.start_all_reduce(torch.tensor(mine, dtype=torch.int64))
        return lambda: int(wait())

    def _spare(self, packet: tuple[Any, Shard] | None) -> Any:
        """A stand-in for the steps in which this rank has no batch: its first one, or that of another rank."""
        own = packet[0] if packet is not None else None
        if self._ranks is None or self._evaluation:
            return None
        has = self._ranks.gather_objects(packet is not None)
        if all(has) or not any(has):
            return own
        other = self._ranks.broadcast_object(own, has.index(True))
        return own if packet is not None else other
