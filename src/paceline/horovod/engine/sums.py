"""The thread in which a rank adds up tensors with the other ranks of its machine, in memory that they share."""

from __future__ import annotations

import queue
import sys
import threading
from typing import TYPE_CHECKING, NamedTuple

import torch

from paceline.train.group.shared_memory import SharedMemory, SharedMemoryError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch._C._distributed_c10d import Store


class Sum(NamedTuple):
    """What is added up.

    Attributes:
        sources: contiguous tensors of one dimension and one floating-point type.
        targets: where the results go: the sources themselves, or tensors like them.
        prescale: factor before.
        divisor: of the sums.
        postscale: factor after it.
    """

    sources: list[Tensor]
    targets: list[Tensor]
    prescale: float
    divisor: int
    postscale: float


class Sums:
    """Adds up one thing after the other.

    Args:
        memory: which the ranks share.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._broken = ""
        self._waiting: queue.SimpleQueue[tuple[Sum, Callable[[str], None]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="paceline-horovod-sums", daemon=True).start()

    def add_up(self, wanted: Sum, done: Callable[[str], None]) -> None:
        """Add up tensors of all ranks, which call this in the same order.

        Args:
            wanted: alike on all ranks.
            done: called in another thread, with the reason of a failure or "".
        """
        self._waiting.put((wanted, done))

    def close(self) -> None:
        """End. What has not been completed fails, here and on the other ranks."""
        self._memory.close()
        self._waiting.put(None)

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            wanted, done = item
            if not self._broken:
                try:
                    self._add_up(wanted)
                except Exception as failure:  # the ranks are no longer in step
                    self._broken = str(failure) or type(failure).__name__
                    self._memory.close()
            done(self._broken)
            del item, wanted, done  # they may hold much

    def _add_up(self, wanted: Sum) -> None:
        with torch.no_grad():
            self._memory.sum(
                wanted.sources,
                wanted.targets,
                prescale=wanted.prescale,
                divisor=wanted.divisor,
                postscale=wanted.postscale,
            )


def share_memory(store: Store, index: int, size: int, *, wanted: bool) -> Sums | None:
    """Share memory with the other ranks, which call this at the same time; None if one of them cannot or will not.

    Args:
        store: of these ranks.
        index: of this rank.
        size: number of ranks.
        wanted: whether this rank wants to.
    """
    calls = 0

    def tell(text: str) -> list[str]:
        nonlocal calls
        calls += 1
        store.set(f"{calls}-{index}", text)
        return [bytes(store.get(f"{calls}-{other}")).decode() for other in range(size)]

    if not all([said == "yes" for said in tell("yes" if wanted and sys.platform == "linux" else "no")]):
        return None
    try:
        return Sums(SharedMemory(index, size, tell))
    except SharedMemoryError:
        return None
