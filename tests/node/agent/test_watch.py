"""The agent goes on to watch its ranks whatever goes wrong in a look at them."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from paceline.node.agent.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pytest


class Timers:
    """A loop in which only timers are."""

    def __init__(self) -> None:
        self.set: list[Callable[[], None]] = []

    def after(self, seconds: float, callback: Callable[[], None]) -> None:
        self.set.append(callback)


def test_a_look_that_fails_is_not_the_last_one(capsys: pytest.CaptureFixture[str]) -> None:
    looks = 0

    def others() -> Sequence[str]:
        nonlocal looks
        looks += 1
        raise OSError("disk full")

    loop: Any = Timers()
    telemetry: Any = None
    watch = Watch(loop, "job", 60.0, lambda _: None, lambda: None, unjoined=print, telemetry=telemetry, others=others)
    placement = SimpleNamespace(attempt=0, rank=0, node_rank=0)
    rank: Any = SimpleNamespace(status=None, pid=os.getpid(), device=None, placement=placement)
    watch.start({0: rank})
    for _ in range(3):
        loop.set.pop()()
    assert (looks, len(loop.set)) == (3, 1)
    assert capsys.readouterr().err.count("OSError: disk full") == 1
    rank.status = 0
    loop.set.pop()()
    assert (looks, loop.set) == (3, [])
