"""A trial of `paceline tune`: some steps with one method of exchange, measured."""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from paceline.contract.exchange import TRIAL_STEPS
from paceline.contract.tuning import taken

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paceline.train.group.group import Group


class TrialOver(SystemExit):
    """The trial has measured all its steps; the script ends as if it had done all that it wanted to."""

    def __init__(self) -> None:
        super().__init__(0)


class Trial:
    """Measures steps of the optimizer, and writes the result where `paceline tune` reads it."""

    def __init__(
        self, steps: int, file: Path | None, group: Group, method: Callable[[], str | None], sent: Callable[[], int]
    ) -> None:
        self._steps, self._file, self._device = steps, file if group.is_main else None, group.device
        self._method, self._sent = method, sent
        self._name: str | None = None
        self._counted: int | None = None  # the optimizer whose steps count
        self._times: list[float] = []  # at the end of each step
        self._bytes: list[int] = []
        self._losses: list[float | None] = []
        self._loss: list[torch.Tensor] = []  # of the batches of this step
        self._samples = 0  # of all ranks, in all batches
        atexit.register(self.write)

    def saw_batch(self, samples: int) -> None:
        """Note how many samples all ranks have in a batch."""
        self._samples += samples

    def saw_loss(self, loss: torch.Tensor) -> None:
        self._loss.append(loss.detach())

    def stepped(self, number: int) -> bool:
        """Note a step of an optimizer; returns whether that was the last one of the trial."""
        if self._counted is None:
            self._counted = number
        if number != self._counted:
            return False
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._times.append(time.perf_counter())
        self._bytes.append(self._sent())
        mean = sum(float(each) for each in self._loss) / len(self._loss) if self._loss else math.nan
        self._losses.append(mean if math.isfinite(mean) else None)
        self._loss, self._name = [], self._method()
        return len(self._times) >= self._steps

    def write(self) -> None:
        """Write the result, once."""
        file, self._file = self._file, None
        if file is None:
            return
        result = {
            "method": self._name,
            "seconds": [later - earlier for earlier, later in zip(self._times, self._times[1:], strict=False)],
            "bytes": [later - earlier for earlier, later in zip(self._bytes, self._bytes[1:], strict=False)],
            "losses": self._losses,
            "samples": self._samples / max(1, len(self._times)),
            "settings": taken(),
        }
        text = json.dumps({"time": time.time(), "epoch": 0, "step": len(self._times), "trial": result})
        with contextlib.suppress(OSError):  # then there is no result, and `paceline tune` says so
            new = file.with_name(f".{file.name}.{os.getpid()}")
            new.write_text(text)
            os.replace(new, file)


def trial_steps(env: Mapping[str, str]) -> int | None:
    """The steps of the trial in which this process is a rank; None if it is in none."""
    text = env.get(TRIAL_STEPS, "")
    return int(text) if text.isdecimal() else None
