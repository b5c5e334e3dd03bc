"""A loader worker that hangs as it is forked, before its first instruction, does not stop the training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Paceline

pytestmark = pytest.mark.torch

TRAIN = """
    import os, signal, sys, torch, paceline
    from torch.utils.data import DataLoader

    def in_child():
        try:
            os.close(os.open("first", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        HERE

    with paceline.init() as run:
        os.register_at_fork(after_in_child=in_child)
        loader = run.dataloader(torch.arange(12), global_batch_size=2, num_workers=2, shuffle=False)
        for epoch in run.epochs(2):
            print(*(int(each) for batch in loader for each in batch), flush=True)
"""


def train(paceline: Paceline, what: str) -> str:
    return paceline.script(TRAIN.replace("HERE", what))


def test_a_worker_that_hangs_before_it_begins_is_replaced(paceline: Paceline) -> None:
    done = paceline.succeeds("run", "-n", "1", train(paceline, "signal.pause()"))
    assert done.stdout.splitlines() == ["0 1 2 3 4 5 6 7 8 9 10 11"] * 2
    assert "a loader worker did not begin within" in done.stderr  # of another one, too, on a busy machine


def test_a_worker_that_ends_before_it_begins_is_an_error(paceline: Paceline) -> None:
    done = paceline.run("-n", "1", train(paceline, "os._exit(3)"))
    assert done.returncode == 1
    assert "DataLoader worker" in done.stderr
    assert "exited unexpectedly" in done.stderr
