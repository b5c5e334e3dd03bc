"""What waits when a rank is gone, or Horovod is shut down."""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import TYPE_CHECKING

import pytest
import torch

import paceline.horovod.torch as hvd
from paceline.horovod import basics
from tests.conftest import eventually, free_port
from tests.train.launching import launch

if TYPE_CHECKING:
    from multiprocessing.synchronize import Semaphore


def killed(rank: int, port: int, answers: multiprocessing.Queue[str], ended: Semaphore) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    hvd.init()
    hvd.allreduce(torch.ones(1), name="before")
    if rank == 1:
        for _ in range(2):
            ended.acquire()  # else it may fail on the others, for which it has not ended yet
        os.kill(os.getpid(), signal.SIGKILL)
    ended.release()
    for name in ("after", "another"):
        with pytest.raises(hvd.HorovodInternalError, match=r"rank 1 is gone"):
            hvd.allreduce(torch.ones(1), name=name)
    hvd.shutdown()
    answers.put("as it should be")


def test_a_rank_that_is_killed_fails_what_the_others_wait_for() -> None:
    context = multiprocessing.get_context("fork")
    answers, port, ended = context.Queue(), free_port(), context.Semaphore(0)
    processes = [context.Process(target=killed, args=(rank, port, answers, ended)) for rank in range(3)]
    for process in processes:
        process.start()
    try:
        assert [answers.get(timeout=120) for _ in range(2)] == ["as it should be"] * 2
    finally:
        for process in processes:
            process.kill()
            process.join()


def shut_down() -> str:
    torch.set_num_threads(1)
    hvd.init()
    rank = hvd.rank()
    message = ""
    if rank:
        waits = hvd.allreduce_async(torch.ones(1), name="waits")
    done = hvd.allreduce_async(torch.ones(1), name="done", op=hvd.Sum)  # from here on, rank 0 may shut down
    if rank:
        with pytest.raises(hvd.HorovodInternalError) as failure:
            hvd.synchronize(waits)
        message = str(failure.value)
    else:
        hvd.synchronize(done)
        hvd.shutdown()
        hvd.shutdown()
        return message
    assert hvd.synchronize(done).item() == hvd.size()  # it had begun
    with pytest.raises(hvd.HorovodInternalError, match="shut down"):
        hvd.allreduce(torch.ones(1))
    hvd.shutdown()
    return message


def test_shutdown_fails_what_waits_and_completes_what_has_begun() -> None:
    _, *others = launch(shut_down, nproc=3)
    assert others == ["Horovod has been shut down: rank 0 has asked for it"] * 2


def stalled() -> None:
    torch.set_num_threads(1)
    os.environ.update(HOROVOD_STALL_CHECK_TIME_SECONDS="0.1", HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="0.5")
    hvd.init()
    if hvd.rank() == 0:
        with pytest.raises(hvd.HorovodInternalError, match=r"alone has waited .* for ranks \[1\]"):
            hvd.allreduce(torch.ones(1), name="alone")
    else:
        with pytest.raises(hvd.HorovodInternalError, match="alone has waited"):
            eventually(lambda: basics.engine().failure, "the ranks give up")
            hvd.barrier()


def test_ranks_that_are_missing_are_named_and_given_up() -> None:
    launch(stalled, nproc=2)


def only_begins() -> None:
    hvd.init()
    hvd.shutdown()
    hvd.init()


def test_a_rank_may_end_while_others_still_begin() -> None:
    for _ in range(8):  # without order among them about every fourth fails
        launch(only_begins, nproc=4)
