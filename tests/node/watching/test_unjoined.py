"""Ranks that write over each other are told from those that share a file on purpose."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from paceline.node.watching.asking import Asked
from paceline.node.watching.unjoined import Unjoined

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from paceline.contract.stands import Answer

    Processes = list[subprocess.Popen[bytes]]

SHARED = "open('shared', 'w')"
A_PROGRAM = "__import__('subprocess').Popen(['sleep', '100'])"
A_FORK = "os.fork() or __import__('time').sleep(100)"


@pytest.fixture
def processes() -> Iterator[Processes]:
    started: Processes = []
    yield started
    for process in started:
        os.killpg(process.pid, 9)
        process.communicate()


def said(folder: Path, processes: Processes, opens: str, more: str = "", stdout: int | None = None) -> list[str]:
    """What is said of two processes that evaluate `opens`, and write to that."""
    text = f"import fcntl, os, sys\n{more}\nfile = {opens}\nprint('it', file=file, flush=True)\nos.write(2, b'!')\n"
    ranks = []
    for rank in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", f"{text}sys.stdin.read()", str(rank)], cwd=folder, stdin=subprocess.PIPE,
            stdout=stdout, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        processes.append(process)
        assert process.stderr is not None
        assert process.stderr.read(1) == b"!"
        ranks.append(Asked("job", 0, rank, 0, process.pid))
    return heard(ranks, *[({"alone": []}, {"alone": []})] * 3)


def heard(ranks: list[Asked], *looks: tuple[Answer, Answer]) -> list[str]:
    """What is said when two ranks answer so to each look."""
    found: list[str] = []
    unjoined = Unjoined(found.append)
    for answers in looks:
        unjoined.look(ranks)
        for rank, answer in zip(ranks, answers, strict=True):
            unjoined.hear(rank, answer, ranks)
    return found


@pytest.mark.parametrize("more", ["", A_FORK])
def test_ranks_that_write_over_each_other(tmp_path: Path, processes: Processes, more: str) -> None:
    (line,) = said(tmp_path, processes, SHARED, more)
    assert line.startswith(f"ranks 0, 1 write over each other in {tmp_path}/shared, and the script has not asked")


@pytest.mark.parametrize(
    ("opens", "more"),
    [
        ("open('shared', 'a')", ""),
        ("open('shared', 'w+')", ""),
        ("open(f'own-{sys.argv[1]}', 'w')", ""),
        ("open('/dev/null', 'w')", ""),
        ("sys.stdout", ""),  # it was given them
        ("open('/dev/null', 'w')", f"it = {SHARED}"),  # nothing is written to it
        (f"[it := {SHARED}, os.unlink('shared')][0]", ""),  # each has its own
        (f"[it := {SHARED}, fcntl.flock(it, fcntl.LOCK_SH)][0]", ""),
        (SHARED, A_PROGRAM),
    ],
)
def test_ranks_that_do_not(tmp_path: Path, processes: Processes, opens: str, more: str) -> None:
    with open(tmp_path / "given", "w") as given:
        assert said(tmp_path, processes, opens, more, given.fileno()) == []


def test_nothing_is_said_unless_no_rank_has_asked() -> None:
    ranks = [Asked("job", 0, rank, 0, os.getpid()) for rank in range(2)]
    alone: tuple[Answer, Answer] = ({"alone": ["mpi4py"]}, {"alone": ["mpi4py"]})
    assert heard(ranks, alone, alone, alone, ({"alone": ["mpi4py"]}, {}), alone, alone, alone) == []
    assert len(heard(ranks, *[alone] * 9)) == 1
