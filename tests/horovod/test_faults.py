"""What waits when a rank is gone, or Horovod is shut down."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.conftest import eventually
from tests.late import hvd, process, torch
from tests.train.launching import launch

from .ranks import started, with_one_killed

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.synchronize import Semaphore


def killed(ended: Semaphore, rank: int) -> None:
    hvd.allreduce(torch.ones(1), name="before")
    if rank == 1:
        for _ in range(2):
            ended.acquire()  # else it may fail on the others, for which it has not ended yet
        os.kill(os.getpid(), signal.SIGKILL)
    ended.release()
    for name in ("after", "another"):
        with pytest.raises(hvd.HorovodInternalError, match=r"rank 1 is gone"):
            hvd.allreduce(torch.ones(1), name=name)


def test_a_rank_that_is_killed_fails_what_the_others_wait_for() -> None:
    with_one_killed(functools.partial(killed, multiprocessing.get_context("fork").Semaphore(0)))


def shut_down() -> str:
    rank, _ = started()
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
    rank, _ = started(HOROVOD_STALL_CHECK_TIME_SECONDS="0.1", HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="0.5")
    if rank == 0:
        with pytest.raises(hvd.HorovodInternalError, match=r"alone has waited .* for ranks \[1\]"):
            hvd.allreduce(torch.ones(1), name="alone")
    else:
        with pytest.raises(hvd.HorovodInternalError, match="alone has waited"):
            eventually(lambda: process.engine().failure, "the ranks give up")
            hvd.barrier()


def test_ranks_that_are_missing_are_named_and_given_up() -> None:
    launch(stalled, nproc=2)


class Interrupted(Exception):
    """Raised by a signal handler."""


def at_signal(act: Callable[[], object]) -> None:
    """Have a signal handler act while this thread waits."""
    signal.signal(signal.SIGALRM, lambda *_: act())
    signal.setitimer(signal.ITIMER_REAL, 0.5)


def signals() -> None:
    rank, size = started()
    one = torch.ones(1)

    def interrupt() -> None:
        raise Interrupted

    if rank == 0:
        at_signal(lambda: hvd.allreduce(one, name="during"))
    else:
        hvd.allreduce(one, name="during")
    assert hvd.allreduce(one, name="waits", op=hvd.Sum).item() == size
    if rank == 0:
        at_signal(interrupt)
        with pytest.raises(Interrupted):
            hvd.allreduce(one, name="goes on")
    hvd.allreduce(one, name="then")
    if rank:
        assert hvd.allreduce(one, name="goes on", op=hvd.Average).item() == 1.0
        at_signal(hvd.shutdown)
    with pytest.raises(hvd.HorovodInternalError, match="shut down: rank 1 has asked for it"):
        hvd.allreduce(one, name=f"never of {rank}")


def test_signal_handlers_in_a_thread_that_waits() -> None:
    launch(signals, nproc=2)


def only_begins() -> None:
    hvd.init()
    hvd.shutdown()
    hvd.init()


def test_a_rank_may_end_while_others_still_begin() -> None:
    for _ in range(8):  # without order among them about every fourth fails
        launch(only_begins, nproc=4)
