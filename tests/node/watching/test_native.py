"""Frames of a process that does not answer, as py-spy sees them: here a program that says what py-spy 0.4 does."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
from tests.node.watching.test_hang import stand

from paceline.node.eventloop.loop import Loop
from paceline.node.watching import asking
from paceline.node.watching.asking import Asked
from paceline.node.watching.outside import Activity
from paceline.node.watching.typical import place

if TYPE_CHECKING:
    from pathlib import Path

LIBC = "/usr/lib/x86_64-linux-gnu/libc.so.6"
FRAMES = [
    {"name": "clock_nanosleep", "filename": LIBC, "module": LIBC, "line": 0},
    {"name": "call", "filename": "/build/_ctypes.c", "module": "/usr/lib/_ctypes.so", "line": 943},
    {"name": "Trainer.main", "filename": "/home/ada/train.py", "module": None, "line": 6},
]


def dump(folder: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> tuple[list[Any], str]:
    """What is seen of process 7 when py-spy is this program; "" for none."""
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.setattr("sys.executable", str(folder / "python"))
    if program:
        (folder / "py-spy").write_text(program if program.startswith("#!") else f"#!/bin/sh\n{program}\n")
        (folder / "py-spy").chmod(0o700)
    loop, found = Loop(), list[Any]()
    asking.dump(loop, 7, lambda *answer: found.append(answer))
    loop.run_until(lambda: bool(found))
    threads, problem = found[0]
    return threads, problem


def test_the_frames_of_all_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = [
        {"os_thread_id": 8, "thread_name": None, "frames": FRAMES[:1]},
        {"os_thread_id": 7, "thread_name": "MainThread", "frames": FRAMES},
    ]
    (tmp_path / "said").write_text(json.dumps(told))
    program = f'test "$*" = "dump --pid 7 --native --json" && echo warned >&2 && cat {tmp_path}/said'
    threads, problem = dump(tmp_path, monkeypatch, program)
    assert ([it["name"] for it in threads], problem) == (["MainThread", "8"], "")
    found = place(stand(1, None, seen=threads))
    assert found["where"] == "train.py:6 in main"
    assert found["why"] == "C code holds the interpreter's lock, in clock_nanosleep of libc.so.6"


def test_many_silent_ranks_are_looked_at_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    dumps: list[Any] = []
    monkeypatch.setattr(asking, "dump", lambda loop, pid, then: dumps.append(then))
    ranks = {number: Asked("none", 0, number, 0, 1 << 30) for number in range(9)}
    loop, found = Loop(), list[Any]()
    asking.ask(loop, ranks, {number: Activity(0.0) for number in ranks}, found.extend)
    loop.run_until(lambda: len(dumps) == asking._MOST_DUMPS)
    at_once = asking._MOST_DUMPS
    for number in range(9):
        assert len(dumps) == min(9, at_once + number)
        dumps[number]([], "")
        loop.run_until(lambda: len(dumps) == min(9, at_once + number + 1))  # noqa: B023
    assert len(found) == 9


def test_silent_ranks_are_told_once_where_no_program_looks_at_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "dump", lambda loop, pid, then: then([], ""))
    ranks = {number: Asked("none", 0, number, 0, 1 << 30) for number in range(9)}
    loop, found, later = Loop(), list[Any](), list[None]()
    asking.ask(loop, ranks, {number: Activity(0.0) for number in ranks}, found.extend)
    loop.run_until(lambda: bool(found))
    loop.after(0.01, lambda: later.append(None))
    loop.run_until(lambda: bool(later))
    assert len(found) == 9


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("", ""),
        (
            "echo 'Permission Denied: Try running again' >&2; exit 1",
            "py-spy may not look at it (ptrace is not permitted)",
        ),
        ("echo 'Error: no Python' >&2; exit 1", "py-spy cannot read it"),
        ('echo \'[{"os_thread_id": 7, "thread_name": "", "frames": [null]}]\'', "py-spy cannot read it"),
        ("#!/no/such/interpreter\n", "py-spy cannot be started: No such file or directory"),
    ],
)
def test_what_cannot_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, said: str) -> None:
    assert dump(tmp_path, monkeypatch, program) == ([], said)
    why = place(stand(1, None, unseen=said))["why"]
    assert why == (
        "it does not answer; C code may hold the interpreter's lock, or the program is not Python's"
        + (f"; {said}" if said else "")
    )


def test_a_rank_whose_socket_is_closed_has_ended() -> None:
    assert place(stand(1, None, unseen="it has ended"))["why"] == "it has ended"
