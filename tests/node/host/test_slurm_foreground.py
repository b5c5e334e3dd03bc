"""A client in the foreground that is gone: its job is stopped before the process that followed it ends."""

from __future__ import annotations

import itertools
import os
import queue
import threading
from typing import TYPE_CHECKING, Any

from paceline.node.host.slurm.end import stop as stopping
from paceline.node.host.slurm.job_folder import JobFolder
from paceline.node.host.slurm.place import foreground
from paceline.node.store.home import Home

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_job_is_stopped_before_its_follower_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone, stopped, ended = threading.Event(), threading.Event(), threading.Event()

    class Answers:
        def __init__(self, *_: Any) -> None:
            pass

        def answers(self) -> Any:
            return ({"waiting": str(number)} for number in itertools.count())

    def order() -> str:
        gone.wait(60)
        return ""

    def stop(*_: Any, **__: Any) -> None:
        assert not stopped.wait(0.5), "Slurm takes a moment"
        stopped.set()

    monkeypatch.setattr(foreground, "_Following", Answers)
    monkeypatch.setattr(foreground, "next_order", order)
    monkeypatch.setattr(stopping, "stop", stop)
    monkeypatch.setattr(os, "_exit", lambda _: ended.set())
    answers = foreground.follow(Home(tmp_path), JobFolder(tmp_path / "it"), {})
    assert next(answers) == {"waiting": "0"}
    gone.set()
    answers.close()  # as a write fails that nobody reads
    assert stopped.is_set() and ended.is_set()


def test_it_is_said_once_what_lets_a_suspended_job_go_on(tmp_path: Path) -> None:
    following = foreground._Following(Home(tmp_path), JobFolder(tmp_path / "it"), {}, queue.SimpleQueue())
    record = {"state": "SUSPENDED", "waiting": "paceline resume it lets it go on"}
    said = [*following._report_waiting(record), *following._report_waiting(record)]  # type: ignore[arg-type]
    assert said == [{"waiting": record["waiting"]}]
