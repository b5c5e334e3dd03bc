"""What a rank spends its time on, from samples of its main thread's stack. Pure state.

A sample says in which part of a step the thread is, and at which line of the script. It is taken by the rank's own
thread, so a moment in which C code holds the interpreter's lock counts for the line that follows.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from typing import TYPE_CHECKING

from .typical import is_of_user

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.contract.stands import Spent

# The part of a step, from the file and the function of a frame, the innermost first. The first that fits counts.
_OF_FRAMES = tuple(
    (re.compile(file), re.compile(function), part)
    for file, function, part in (
        (r"torch/utils/data/_utils/fetch\.py", "", "loading"),
        (r"torch/utils/data/dataloader\.py", r"_(try_)?get_data", "workers"),
        (r"torch/utils/data/", "", "loading"),
        (r"paceline/train/data/", "", "workers"),
        (r"torch/(serialization\.py|distributed/checkpoint/)|paceline/train/checkpoint/", "", "checkpoint"),
        (r"torch/_(dynamo|inductor)/", "", "compile"),
        (r"torch/autograd/", "", "backward"),
        (r"torch/optim/", "", "optimizer"),
        (r"torch/distributed/|paceline/train/group/", "", "exchange"),
        (r"/(tensorboard|tensorboardX|wandb|mlflow)/|/logging/__init__\.py|/tqdm/", "", "logging"),
        (r"torch/nn/modules/", "", "forward"),
    )
)
_OF_LINES = ((re.compile(r"\.(item|cpu|tolist|numpy)\("), "item"), (re.compile(r"\.(cuda|to)\("), "copy"),
             (re.compile(r"\bprint\("), "logging"))  # fmt: skip


class Samples:
    """The samples of the ranks of a node."""

    def __init__(self) -> None:
        self._count = 0
        self._parts: Counter[str] = Counter()
        self._lines: dict[str, Counter[str]] = {}

    def add(self, frames: Sequence[tuple[str, int, str]]) -> None:
        """Take in the frames of a main thread, the innermost first."""
        own = next((frame for frame in frames if is_of_user(frame[0])), None)
        if own is None:  # it has not come to the script, or has left it
            return
        part = _part(frames)
        self._count += 1
        self._parts[part] += 1
        self._lines.setdefault(part, Counter())[f"{os.path.basename(own[0])}:{own[1]}"] += 1

    def spent(self) -> Spent:
        """The shares of the time until now."""
        parts = {part: round(count / max(self._count, 1), 3) for part, count in self._parts.most_common()}
        lines = {part: lines.most_common(1)[0][0] for part, lines in self._lines.items()}
        return {"samples": self._count, "parts": parts, "lines": lines}


def _part(frames: Sequence[tuple[str, int, str]]) -> str:
    for file, _, function in frames:
        for path, name, part in _OF_FRAMES:
            if path.search(file) and name.search(function):
                return part
    return next((_of_line(file, line) for file, line, _ in frames if is_of_user(file)), "script")


def _of_line(file: str, line: int) -> str:
    """What a line of the script does itself."""
    import linecache

    text = linecache.getline(file, line)
    return next((part for words, part in _OF_LINES if words.search(text)), "script")
