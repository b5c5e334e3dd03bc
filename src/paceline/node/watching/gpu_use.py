"""How much the GPUs of ranks are used, from what nvidia-smi says now and then."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Callable

if TYPE_CHECKING:
    from collections.abc import Collection

    from paceline.contract.stands import Spent
    from paceline.node.machine.gpus import Gpu

_LEAST = 5  # samples before it is said


class GpuUse:
    """Samples of the GPUs of a node's ranks; `ask` gives the GPUs, and may take seconds."""

    def __init__(self, ask: Callable[[], tuple[Gpu, ...]] | None = None) -> None:
        self._ask = ask
        self._use: list[float] = []
        self._memory: list[float] = []
        self._thread: threading.Thread | None = None

    def sample(self, pids: Collection[int]) -> None:
        """Take a sample, beside the caller, unless the last one is not there yet; `pids` are the ranks and their
        descendants."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self.take, args=(frozenset(pids),), daemon=True)
            self._thread.start()

    def take(self, pids: Collection[int]) -> None:
        """Take a sample of the GPUs on which these processes are."""
        from paceline.node.machine import gpus

        found = (self._ask or gpus.in_use)()
        mine = [gpu for gpu in found if any(process.pid in pids for process in gpu.processes)]
        if not mine and not any(os.path.exists(f"/proc/{it.pid}") for gpu in found for it in gpu.processes):
            mine = list(found)  # in a container, whose processes nvidia-smi numbers as the machine does
        use = [gpu.use for gpu in mine if gpu.use is not None]
        if use:
            self._use.append(sum(use) / len(use) / 100)
        memory = [gpu.memory_used / gpu.memory for gpu in mine if gpu.memory and gpu.memory_used is not None]
        if memory:
            self._memory.append(max(memory))

    def known(self) -> Spent:
        """Their mean use, and the most memory of one."""
        if len(self._use) < _LEAST or not self._memory:
            return {}
        return {"gpu_use": round(sum(self._use) / len(self._use), 3), "gpu_memory": round(max(self._memory), 3)}
