"""Ranks of Horovod that are copies of this process."""

from __future__ import annotations

import importlib
import multiprocessing
import os
from typing import TYPE_CHECKING

from tests.conftest import GENEROUS, free_port
from tests.late import hvd, torch

if TYPE_CHECKING:
    from collections.abc import Callable


def started(**variables: str) -> tuple[int, int]:
    os.environ.update(variables)
    torch.set_num_threads(1)
    hvd.init()
    return hvd.rank(), hvd.size()


def with_one_killed(fn: Callable[[int], None]) -> None:
    """Call `fn` with its number in three ranks, of which rank 1 kills itself there and the others go on."""
    importlib.import_module("paceline.horovod.torch")  # once, before there are copies
    context = multiprocessing.get_context("fork")
    answers: multiprocessing.Queue[int] = context.Queue()
    port = free_port()
    processes = [context.Process(target=_rank, args=(fn, rank, port, answers)) for rank in range(3)]
    for process in processes:
        process.start()
    try:
        assert sorted(answers.get(timeout=GENEROUS) for _ in range(2)) == [0, 2]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _rank(fn: Callable[[int], None], rank: int, port: int, answers: multiprocessing.Queue[int]) -> None:
    started(RANK=str(rank), WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    fn(rank)
    hvd.shutdown()
    answers.put(rank)
