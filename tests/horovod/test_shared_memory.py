"""Sums of large tensors between ranks of one machine, which go through memory that they share."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.conftest import eventually
from tests.late import hvd, process, torch
from tests.train.launching import launch

from .ranks import started, with_one_killed

LARGE = 3 << 20  # numbers: several pieces, for all types


def activities(file: str) -> str:
    hvd.stop_timeline()
    return Path(file).read_text() if hvd.rank() == 0 else ""


def sums(file: str) -> str:
    rank, size = started()
    hvd.start_timeline(file)
    total = sum(range(1, size + 1))
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        ramp = (torch.arange(LARGE + 5) % 64).to(dtype)
        tensor = ramp * (rank + 1)
        assert torch.equal(hvd.allreduce(tensor, op=hvd.Sum), ramp * total), dtype
        assert torch.equal(tensor, ramp * (rank + 1))  # not in place
        assert hvd.allreduce_(tensor, op=hvd.Average, prescale_factor=4.0, postscale_factor=0.5) is tensor
        assert torch.equal(tensor, (ramp * 2 * total).div_(size)), dtype
    # Others are not added up there.
    whole = torch.full((LARGE,), rank + 1, dtype=torch.int32)
    assert torch.equal(hvd.allreduce(whole, op=hvd.Sum), torch.full_like(whole, total))
    assert torch.equal(hvd.allreduce(whole.float(), op=hvd.Max), torch.full((LARGE,), float(size)))
    # Many at once, of all sizes, in another order on each rank; one is not contiguous.
    lengths = [1, 7, 70_000, 2 << 20, 13, 1 << 20, 3, 300_000]
    order = list(range(len(lengths)))
    for step in range(4):
        tensors = [torch.full((length,), float(rank + index + step)) for index, length in enumerate(lengths)]
        turned = torch.full((300, 500), float(rank)).t()
        handles = {
            index: hvd.allreduce_async_(tensors[index], name=f"many.{index}", op=hvd.Sum)
            for index in (order[rank:] + order[:rank])
        }
        also = hvd.allreduce_async_(turned, name="turned", op=hvd.Sum)
        for index, tensor in enumerate(tensors):
            hvd.synchronize(handles[index])
            assert torch.equal(tensor, torch.full_like(tensor, (index + step) * size + total - size)), (step, index)
        assert hvd.synchronize(also) is turned
        assert torch.equal(turned, torch.full_like(turned, total - size))
    return activities(file)


def test_large_tensors_are_added_up_in_shared_memory(tmp_path: Path) -> None:
    first, *_ = launch(sums, (str(tmp_path / "trace.json"),), nproc=3)
    assert "SHARED_MEMORY_ALLREDUCE" in first


def one_will_not(file: str) -> str:
    if os.environ["RANK"] == "1":
        os.environ["PACELINE_SHARED_MEMORY"] = "0"
    return sums(file)


def test_if_one_rank_does_not_want_to_share_memory_none_does(tmp_path: Path) -> None:
    first, *_ = launch(one_will_not, (str(tmp_path / "trace.json"),), nproc=2)
    assert "SHARED_MEMORY_ALLREDUCE" not in first
    assert "GLOO_ALLREDUCE" in first


def sets_and_joins() -> None:
    rank, size = started()
    pair = hvd.add_process_set([0, 2])
    if pair.included():
        for _ in range(2):
            assert hvd.allreduce(torch.ones(LARGE), process_set=pair, op=hvd.Sum).sum().item() == 2 * LARGE
    assert hvd.remove_process_set(pair)
    for index in range(rank + 1):
        mean = hvd.allreduce(torch.full((LARGE,), 6.0), name=f"step.{index}")
        assert torch.equal(mean, torch.full((LARGE,), 6.0 * (size - index) / size))
    hvd.join()
    hvd.shutdown()
    hvd.init()
    assert hvd.allreduce(torch.ones(LARGE), op=hvd.Sum).sum().item() == size * LARGE


def test_process_sets_joined_ranks_and_beginning_again() -> None:
    launch(sets_and_joins, nproc=3)


def killed(rank: int) -> None:
    hvd.allreduce(torch.ones(LARGE), name="before")
    tensors = [torch.ones(LARGE) for _ in range(8)]
    with pytest.raises(hvd.HorovodInternalError, match=r"is gone"):
        while True:
            handles = [hvd.allreduce_async_(tensor, name=f"large.{index}") for index, tensor in enumerate(tensors)]
            if rank == 1:
                hvd.synchronize(handles[0])  # the others are under way
                os.kill(os.getpid(), signal.SIGKILL)
            for handle in handles:
                hvd.synchronize(handle)
    # In shared memory it is known at once; a shutdown that is faster than the rest would fail the third rank with that.
    eventually(lambda: process.engine().failure, "all of the rank is gone")


def test_a_rank_that_is_killed_meanwhile_fails_the_others() -> None:
    with_one_killed(killed)
