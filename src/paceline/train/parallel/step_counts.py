"""Checks that all ranks step their optimizers at the same times."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from paceline.train.collective_trace import line_of, script_call

from .errors import OptimizerMismatch

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType

    from paceline.train.group.group import Group

_RARELY = 64  # exchanges of gradients between two comparisons, after the first ones
_BITS = 24  # of a checksum, so that the sum of squares over thousands of ranks fits into 64 bits


@dataclass
class _Span:
    """The exchanges and steps of this rank since the last comparison.

    Attributes:
        exchanges: for each exchange of gradients, its step and the line of the script.
        stepped: for each optimizer and each of its steps, the number of exchanges before it.
        calls: for each optimizer, the line of its first step; None if it has not stepped.
    """

    exchanges: list[tuple[int, tuple[CodeType | None, int]]] = field(default_factory=list)
    stepped: list[list[int]] = field(default_factory=list)
    calls: list[tuple[CodeType | None, int] | None] = field(default_factory=list)


class StepCounts:
    """Compares over the ranks after which exchanges of gradients each optimizer has stepped.

    A comparison is a reduction of two numbers per optimizer, which runs during the training; the next comparison reads
    its result. It begins after 1, 2, 4, … exchanges, and later after every 64.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._names: list[str] = []
        self._span = _Span()
        self._total = 0  # exchanges
        self._next = 1
        self._compared: tuple[Callable[[], torch.Tensor], _Span] | None = None

    def add(self, optimizer: torch.optim.Optimizer) -> int:
        """Add an optimizer whose steps are counted; returns its number."""
        self._names.append(type(optimizer).__name__)
        self._span.stepped.append([])
        self._span.calls.append(None)
        return len(self._names) - 1

    def stepped(self, number: int) -> None:
        """An optimizer has stepped."""
        span = self._span
        span.stepped[number].append(len(span.exchanges))
        if span.calls[number] is None:  # only once: finding the line costs as much as everything else here
            span.calls[number] = script_call()

    def exchanges(self, step: int) -> None:
        """Gradients are about to be exchanged, on all ranks."""
        if not self._names or self._group.world_size == 1:
            return
        if self._total >= self._next:
            self.begin()
            self._next = self._total + min(self._total, _RARELY)
        self._total += 1
        self._span.exchanges.append((step, script_call()))

    def compare(self) -> None:
        """Compare now, on all ranks."""
        if self._names and self._group.world_size > 1:
            self.begin()
            self._settle()

    def begin(self) -> None:
        """Start to compare what was done since the last comparison, and read the result of that one."""
        self._settle()
        sums = [zlib.crc32(repr(times).encode()) >> (32 - _BITS) for times in self._span.stepped]
        tensor = torch.tensor([*sums, *(x * x for x in sums)], dtype=torch.int64, device=self._group.device)
        self._compared = self._group.start_all_reduce(tensor), self._span
        self._span = _Span(stepped=[[] for _ in self._names], calls=[None for _ in self._names])

    def _settle(self) -> None:
        compared, self._compared = self._compared, None
        if compared is None:
            return
        wait, span = compared
        sums = wait().tolist()
        half = len(sums) // 2
        # All are equal if and only if their variance is 0.
        if any(self._group.world_size * sums[half + i] != sums[i] ** 2 for i in range(half)):
            self._explain(span, half)

    def _explain(self, span: _Span, optimizers: int) -> None:
        exchanges = [(step, line_of(call)) for step, call in span.exchanges]
        everyone = self._group.gather_objects(
            (span.stepped, exchanges, [line_of(call) if call else "" for call in span.calls])
        )
        for number in range(optimizers):
            for index in range(len(exchanges) + 1):
                counts = [stepped[number].count(index) for stepped, _, _ in everyone]
                if len(set(counts)) == 1:
                    continue
                less, more = counts.index(min(counts)), counts.index(max(counts))
                step, line = everyone[less][1][index - 1] if index else (exchanges[0][0] - 1, "an earlier line")
                raise OptimizerMismatch(
                    f"after the backward of step {step} ({line}) rank {less} {_called(counts[less])} "
                    f"{self._names[number]}.step(), and rank {more} {_called(counts[more])} it "
                    f"({everyone[more][2][number]}), so their weights differ; all ranks must step, or none: "
                    "decide by what is the same on all, such as run.all_reduce(...)"
                )


def _called(times: int) -> str:
    return "did not call" if times == 0 else "called" if times == 1 else f"called {times} times"
