"""How much the GPUs of a node's ranks have been used so far."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline.contract.stands import Spent
    from paceline.node.machine.gpus import Gpu

_LEAST = 5  # samples before it is said


class GpuUse:
    """Sums up samples of the GPUs of a node's ranks."""

    def __init__(self) -> None:
        self._use: list[float] = []
        self._memory: list[float] = []
        self._hottest: float | None = None

    def add(self, gpus: Iterable[Gpu]) -> None:
        """Take in a sample."""
        gpus = tuple(gpus)
        use = [gpu.use for gpu in gpus if gpu.use is not None]
        if use:
            self._use.append(sum(use) / len(use) / 100)
        memory = [gpu.memory_used / gpu.memory for gpu in gpus if gpu.memory and gpu.memory_used is not None]
        if memory:
            self._memory.append(max(memory))
        self._hottest = max((gpu.temperature for gpu in gpus if gpu.temperature is not None), default=None)

    def known(self) -> Spent:
        """Their mean use, the most memory of one, and how hot the hottest is now."""
        found: Spent = {} if self._hottest is None else {"hottest": self._hottest}
        if len(self._use) >= _LEAST and self._memory:
            found["gpu_use"] = round(sum(self._use) / len(self._use), 3)
            found["gpu_memory"] = round(max(self._memory), 3)
        return found
