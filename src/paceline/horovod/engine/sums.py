"""The thread in which a rank adds up tensors with the other ranks of its machine, in memory that they share."""

from __future__ import annotations

import queue
import sys
import threading
from typing import TYPE_CHECKING

import torch

from paceline.train.group.shared_memory import SharedMemory, SharedMemoryError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._C._distributed_c10d import Store


class Sums:
    """Adds up one thing after the other."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._broken = ""
        self._waiting: queue.SimpleQueue[tuple[Callable[[SharedMemory], None], Callable[[str], None]] | None]
        self._waiting = queue.SimpleQueue()
        threading.Thread(target=self._run, name="paceline-horovod-sums", daemon=True).start()

    def add_up(self, add: Callable[[SharedMemory], None], done: Callable[[str], None]) -> None:
        """Add up tensors of all ranks, which call this in the same order."""
        self._waiting.put((add, done))

    def close(self) -> None:
        """End. What has not been completed fails, here and on the other ranks."""
        self._memory.close()
        self._waiting.put(None)

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            add, done = item
            if not self._broken:
                try:
                    with torch.no_grad():
                        add(self._memory)
                except Exception as failure:  # the ranks are no longer in step
                    self._broken = str(failure) or type(failure).__name__
                    self._memory.close()
            done(self._broken)
            del item, add, done  # they may hold much


def share_memory(store: Store, index: int, size: int, *, wanted: bool) -> Sums | None:
    """Share memory with the other ranks, which call this at the same time; None if one of them cannot or will not."""
    calls = 0

    def exchange(text: str) -> list[str]:
        nonlocal calls
        calls += 1
        store.set(f"{calls}-{index}", text)
        return [bytes(store.get(f"{calls}-{other}")).decode() for other in range(size)]

    if not all([answer == "yes" for answer in exchange("yes" if wanted and sys.platform == "linux" else "no")]):
        return None
    try:
        return Sums(SharedMemory(index, size, exchange))
    except SharedMemoryError:
        return None
