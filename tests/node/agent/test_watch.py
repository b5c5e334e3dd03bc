"""The agent goes on to watch its ranks whatever goes wrong in a look at them."""

from __future__ import annotations

import itertools
import os
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from paceline.node.agent import watch as watching
from paceline.node.agent.agent import Agent
from paceline.node.agent.watch import Watch
from paceline.node.spec import SIGNALS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


def test_who_asks_where_ranks_are_keeps_no_file_open(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    monkeypatch.setattr(world.watch, "_live", dict)
    monkeypatch.setattr(watching, "ask", lambda *_, **__: None)
    before = len(os.listdir("/proc/self/fd"))
    assert world.watch.places() == []
    assert len(os.listdir("/proc/self/fd")) == before


class Timers:
    """A loop in which only timers are."""

    def __init__(self) -> None:
        self.set: list[Callable[[], None]] = []

    def after(self, seconds: float, callback: Callable[[], None]) -> None:
        self.set.append(callback)


class World:
    """A rank that hangs after a second, in virtual time; what it knows waits in `asked` until that is called.

    Attributes:
        numbers: of its collectives.
        found: what was said of it.
        times: when it was asked for all that it knows.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.numbers = 1000.0, {"0": 1}
        self.found: list[list[Any]] = []
        self.asked: list[Callable[[list[Any]], None]] = []
        self.times: list[float] = []
        self._loop: Any = Timers()
        monkeypatch.setattr(watching, "time", SimpleNamespace(**{**vars(time), "monotonic": lambda: self.now}))
        threads = [{"name": "MainThread", "frames": [["/home/ada/train.py", 5, "main"]]}]
        monkeypatch.setattr(
            watching, "question",
            lambda loop, rank, what, then: then({"numbers": dict(self.numbers), "threads": threads}),
        )  # fmt: skip
        monkeypatch.setattr(watching, "ask", lambda loop, ranks, activities, then: self._ask(then))
        telemetry: Any = SimpleNamespace(lately=lambda seconds: {}, known=lambda gpus: {})
        self.watch = Watch(
            self._loop, "job", 1.0, self.found.append, lambda: None, unjoined=print, telemetry=telemetry,
            others=list,
        )  # fmt: skip
        self.starts()

    def _ask(self, then: Callable[[list[Any]], None]) -> None:
        self.times.append(self.now)
        self.asked.append(then)

    def starts(self, number: int = 0) -> None:
        placement = SimpleNamespace(attempt=0, rank=number, node_rank=0)
        rank: Any = SimpleNamespace(status=None, pid=os.getpid(), device="", placement=placement)
        self._loop.set.clear()
        self.watch.start({0: rank})

    def looks(self, times: int = 1, *, moves: bool = False) -> None:
        for _ in range(times):
            self.now += 0.25
            self.numbers = {"0": self.numbers["0"] + moves}
            self._loop.set.pop()()


def test_ranks_that_stand_still_are_asked_again_as_often_as_is_said_that_a_hang_lasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch)
    for _ in range(80):
        world.looks()
        for then in world.asked:
            then([{"pid": 1, "still": 1.0}])
        world.asked.clear()
    assert max(after - before for before, after in itertools.pairwise(world.times)) <= 1.25


@pytest.mark.parametrize("then", ["goes on", "starts again"])
def test_ranks_that_go_on_while_they_are_asked_do_not_hang(monkeypatch: pytest.MonkeyPatch, then: str) -> None:
    world = World(monkeypatch)
    world.looks(6)
    (answered,) = world.asked
    if then == "goes on":
        world.numbers = {"0": 2}
        world.looks()
    else:
        world.starts()
    answered([{"pid": 1, "still": 1.0}])
    assert not any(world.found)
    world.looks(6)
    world.asked[-1]([{"pid": 1, "still": 1.0}])
    assert any(world.found), "the next one is said"


def test_what_was_seen_of_ranks_that_are_here_no_more_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.starts(5)
    world.looks(30, moves=True)
    world.starts(5)
    assert set(world.watch.of_ranks()) == {5}, "those that start again are the same"
    world.starts(1)
    assert world.watch.spent() is None
    world.looks(30, moves=True)
    spent = world.watch.spent()
    assert spent is not None
    assert (set(world.watch.of_ranks()), spent["ranks"], spent["samples"]) == ({1}, 1, 30)


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


def test_a_disk_that_does_not_answer_repeats_no_signal(tmp_path: Path) -> None:
    signals = tmp_path / SIGNALS
    signals.write_text("10\n12\n")
    agent: Any = SimpleNamespace(
        state=SimpleNamespace(finish=None), spec=SimpleNamespace(current=None, stop_file=str(tmp_path / "stop")),
        loop=Timers(), urgent=[], signals=2, _look_at_disk=None,
    )  # fmt: skip
    agent._signals = lambda: Agent._signals(agent)
    signals.rename(tmp_path / "elsewhere")
    signals.mkdir()  # it cannot be read
    Agent._look_at_disk(agent)
    signals.rmdir()
    signals.write_text("10\n12\n10\n")
    Agent._look_at_disk(agent)
    assert [it["signal"] for it in agent.urgent] == [10]
