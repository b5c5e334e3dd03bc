"""The collectives, between ranks of this machine. One start of the ranks does many checks."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import pytest
import torch

import paceline.horovod.torch as hvd
from paceline.contract import Placement
from paceline.horovod import basics
from tests.train.launching import launch

NUMBERS = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.int32,
    torch.int64,
)  # fmt: skip


def started() -> tuple[int, int]:
    torch.set_num_threads(1)
    hvd.init()
    return hvd.rank(), hvd.size()


def all_kinds_of_tensors() -> None:
    rank, size = started()
    for dtype in NUMBERS:
        tensor = (torch.arange(6).view(2, 3) + rank).to(dtype)
        total = (torch.arange(6).view(2, 3) * size + sum(range(size))).to(dtype)
        assert torch.equal(hvd.allreduce(tensor, op=hvd.Sum), total), dtype
        low, high = hvd.allreduce(tensor, op=hvd.Min), hvd.allreduce(tensor, op=hvd.Max)
        assert torch.equal(low, torch.arange(6).view(2, 3).to(dtype)), dtype
        assert torch.equal(high, low + size - 1), dtype
        assert torch.equal(
            hvd.allreduce(torch.full((2,), 2).to(dtype), op=hvd.Product), torch.full((2,), 2**size).to(dtype)
        )
        gathered = hvd.allgather(torch.full((rank, 2), rank).to(dtype))
        assert gathered.dtype == dtype
        assert gathered[:, 0].tolist() == [other for other in range(size) for _ in range(other)]
        assert hvd.broadcast(torch.full((3,), rank).to(dtype), 1).tolist() == [1] * 3
        part = hvd.reducescatter(torch.ones(5, 2).to(dtype), op=hvd.Sum)
        assert torch.equal(part, torch.full((5 // size + (rank < 5 % size), 2), size).to(dtype))
        came, received = hvd.alltoall(torch.full((size * (rank + 1),), rank).to(dtype), splits=[rank + 1] * size)
        assert received.tolist() == [other + 1 for other in range(size)]
        assert came.tolist() == [other for other in range(size) for _ in range(other + 1)]
    assert hvd.allreduce(torch.tensor([rank == 0, False]), op=hvd.Sum).tolist() == [True, False]
    assert hvd.broadcast(torch.tensor([rank == 1]), 1).tolist() == [True]
    assert hvd.allgather(torch.empty(0, 3)).shape == (0, 3)
    assert hvd.allreduce(torch.empty(0)).shape == (0,)
    assert hvd.alltoall(torch.empty(0, 2)).shape == (0, 2)
    assert hvd.allreduce(torch.tensor(-7)).item() == -7
    assert hvd.allreduce(
        torch.tensor(float(rank)), prescale_factor=2.0, postscale_factor=0.5, op=hvd.Sum
    ).item() == sum(range(size))
    # In place, and not contiguous.
    base = torch.zeros(3, 4)
    column = base[:, 1]
    column.fill_(1.0)
    assert hvd.allreduce_(column, op=hvd.Sum) is column
    assert base[:, 1].tolist() == [size] * 3
    assert base[:, 0].tolist() == [0.0] * 3
    turned = torch.full((2, 3), float(rank)).t()
    hvd.broadcast_(turned, 1)
    assert turned.tolist() == [[1.0] * 2] * 3
    leaf = torch.nn.Parameter(torch.full((2,), float(rank)))
    hvd.broadcast_(leaf, 0)
    assert leaf.tolist() == [0.0, 0.0]
    # Groups.
    first, second = hvd.grouped_allreduce([torch.ones(2), torch.ones(3)], op=hvd.Sum)
    assert first.tolist() == [size] * 2
    assert second.tolist() == [size] * 3
    one, other = hvd.grouped_allgather([torch.ones(1), torch.zeros(2, dtype=torch.int16)])
    assert (one.shape, other.shape) == ((size,), (2 * size,))
    assert [len(it) for it in hvd.grouped_reducescatter([torch.ones(size), torch.ones(2 * size)])] == [1, 2]
    sparse = torch.sparse_coo_tensor([[rank, 5]], [1.0, 2.0], (8,))
    dense = hvd.synchronize(hvd.sparse_allreduce_async(sparse, "sparse", hvd.Sum)).to_dense()
    assert dense.tolist() == [*[1.0] * size, *[0.0] * (5 - size), 2.0 * size, 0.0, 0.0]


def test_all_kinds_of_tensors() -> None:
    launch(all_kinds_of_tensors, nproc=3)


def any_order_from_several_threads() -> None:
    rank, size = started()
    for step in range(3):
        names = [f"n{index}" for index in range(60)]
        if rank % 2:
            names.reverse()
        handles: dict[str, int] = {}

        def submit(part: list[str], handles: dict[str, int] = handles, step: int = step) -> None:
            for name in part:
                value = torch.full((int(name[1:]) + 1,), float(step))
                handles[name] = hvd.allreduce_async(value, name=name, op=hvd.Sum)

        threads = [threading.Thread(target=submit, args=(names[start::3],)) for start in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for name in sorted(names):
            assert hvd.synchronize(handles[name]).tolist() == [step * size] * (int(name[1:]) + 1)
    assert hvd.synchronize(handles["n0"]) is None  # a handle is good for one call
    with pytest.raises(ValueError, match="was not created or has been cleared"):
        hvd.poll(handles["n0"])


def test_any_order_from_several_threads() -> None:
    launch(any_order_from_several_threads, nproc=2)


def disagreements() -> None:
    rank, size = started()
    odd = rank == size - 1
    for _ in range(2):
        for text, wrong in (
            ("tensor shapes", lambda: hvd.allreduce(torch.ones(2 + odd), name="shape")),
            (
                "data types",
                lambda: hvd.allreduce(torch.ones(2, dtype=torch.int32 if odd else torch.int64), name="type"),
            ),
            ("reduction operations", lambda: hvd.allreduce(torch.ones(2), name="op", op=hvd.Max if odd else hvd.Sum)),
            ("root ranks", lambda: hvd.broadcast(torch.ones(2), int(odd), name="root")),
            ("prescale", lambda: hvd.allreduce(torch.ones(2), name="scale", prescale_factor=1.0 + odd)),
            ("groups", lambda: hvd.grouped_allreduce([torch.ones(1)] * (1 + odd), name="group")),
            ("allgather tensor shapes", lambda: hvd.allgather(torch.ones(2, 2 + odd), name="gather")),
            ("rank-zero tensor", lambda: hvd.allgather(torch.tensor(1.0), name="scalar")),
            (
                "Mismatched collective",
                lambda: (hvd.allgather if odd else hvd.allreduce)(torch.ones(2), name="kind"),
            ),
        ):
            with pytest.raises(hvd.HorovodInternalError, match=text):
                wrong()
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    hvd.barrier()
    handle = hvd.allreduce_async(torch.ones(1), name="twice") if rank == 0 else None
    if handle is not None:
        with pytest.raises(ValueError, match="Duplicate tensor name 'twice'"):
            hvd.allreduce_async(torch.ones(1), name="twice")
    hvd.barrier()  # until here, the other rank has not come
    if handle is None:
        handle = hvd.allreduce_async(torch.ones(1), name="twice")
    hvd.synchronize(handle)
    for splits in ([1] * (size + 1), [9] * size, torch.tensor([1.0] * size), [-1, 3, 0][:size]):
        with pytest.raises(ValueError, match="splits"):
            hvd.alltoall(torch.ones(4), splits=splits)
    with pytest.raises(ValueError, match="multiple of the"):
        hvd.alltoall(torch.ones(size + 1))
    with pytest.raises(ValueError, match="invalid root rank 9"):
        hvd.broadcast(torch.ones(1), 9)
    with pytest.raises(ValueError, match="supersedes average"):
        hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum)


def test_disagreements_are_errors_that_every_rank_survives() -> None:
    launch(disagreements, nproc=2)


def joins() -> int:
    rank, size = started()
    for index in range(rank + 1):
        mean = hvd.allreduce(torch.full((2,), 6.0), name=f"step.{index}")
        took_part = size - index
        assert mean.tolist() == [6.0 * took_part / size] * 2
        known = hvd.allreduce(torch.ones(1), name="again", op=hvd.Sum)
        assert known.item() == took_part
    if rank == size - 1:
        with pytest.raises(hvd.HorovodInternalError, match="Allgather is not supported with Join at this time"):
            hvd.allgather(torch.ones(1), name="gather")
    last = hvd.join()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    return last


def test_joined_ranks_take_part_with_zeros() -> None:
    assert launch(joins, nproc=3) == [2, 2, 2]


def gradients() -> None:
    rank, size = started()
    x = torch.full((2, 2), 1.0 + rank, requires_grad=True)
    hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[size * 0.5] * 2] * 2
    x = torch.ones(1 + rank, requires_grad=True)
    out = hvd.allgather(x)
    (out * torch.arange(len(out))).sum().backward()
    start = sum(1 + other for other in range(rank))
    assert x.grad is not None
    assert x.grad.tolist() == [float(start + index) for index in range(1 + rank)]
    x = torch.ones(2, requires_grad=True)
    (hvd.broadcast(x, 1) * (rank + 1)).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [sum(range(1, size + 1)) / size * (rank == 1)] * 2
    x = torch.ones(size, requires_grad=True)
    out = hvd.alltoall(x)
    (out * (rank + 1)).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [float(other + 1) for other in range(size)]
    x = torch.ones(size, requires_grad=True)
    (hvd.reducescatter(x, op=hvd.Sum) * (rank + 1)).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [float(size * (other + 1)) for other in range(size)]
    a, b = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    left, right = hvd.grouped_allreduce([a, b])
    (left.sum() + 2 * right.sum()).backward()
    assert a.grad is not None
    assert b.grad is not None
    assert (a.grad.tolist(), b.grad.tolist()) == ([1.0] * 2, [2.0] * 3)
    half = hvd.allreduce(torch.full((2,), 0.5), compression=hvd.Compression.fp16)
    assert (half.dtype, half.tolist()) == (torch.float32, [0.5, 0.5])
    left, right = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    assert hvd.allreduce(left if rank else right, op=hvd.Adasum).tolist() == [1.0, 1.0]  # orthogonal: a sum
    assert hvd.allreduce(left, op=hvd.Adasum).tolist() == [1.0, 0.0]  # parallel: a mean


def test_gradients_go_through_all_collectives() -> None:
    launch(gradients, nproc=2)


def process_sets() -> None:
    rank, size = started()
    assert hvd.global_process_set.ranks == list(range(size))
    pair = hvd.add_process_set([0, 2])
    assert (pair.included(), pair.rank(), pair.size()) == (rank != 1, {0: 0, 1: None, 2: 1}[rank], 2)
    if pair.included():
        assert hvd.allreduce(torch.ones(2), process_set=pair, op=hvd.Sum).tolist() == [2.0, 2.0]
        assert hvd.allgather(torch.tensor([rank]), process_set=pair).tolist() == [0, 2]
        assert hvd.broadcast(torch.tensor([rank]), 2, process_set=pair).item() == 2
        hvd.barrier(process_set=pair)
    else:
        with pytest.raises(ValueError, match="rank 1 does not belong to"):
            hvd.allreduce(torch.ones(2), process_set=pair)
    with pytest.raises(ValueError, match="exists already"):
        hvd.add_process_set([2, 0])
    assert hvd.remove_process_set(pair)
    assert pair.process_set_id is None
    assert not hvd.remove_process_set(hvd.global_process_set)
    with pytest.raises(ValueError, match="not registered"):
        hvd.allreduce(torch.ones(1), process_set=pair)
    with pytest.raises(hvd.HorovodInternalError, match="process sets"):
        hvd.add_process_set([0] if rank else [1])
    hvd.shutdown()
    assert not hvd.is_initialized()
    with pytest.raises(ValueError, match="not been initialized"):
        hvd.rank()
    first = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[first, hvd.ProcessSet([2])])
    assert (first.process_set_id, hvd.process_set_by_id(2).ranks) == (1, [2])
    hvd.shutdown()
    if rank != 1:
        hvd.init(comm=[2, 0])
        assert (hvd.rank(), hvd.size()) == ({2: 0, 0: 1}[rank], 2)
        assert hvd.allgather(torch.tensor([rank])).tolist() == [2, 0]


def test_process_sets_and_beginning_again() -> None:
    launch(process_sets, nproc=3)


def timeline(file: str) -> None:
    rank, _ = started()
    hvd.start_timeline(file, mark_cycles=True)
    for _ in range(2):
        hvd.allreduce(torch.ones(2), name="traced")
    hvd.allgather(torch.ones(2), name="gathered")
    hvd.stop_timeline()
    hvd.shutdown()
    if rank == 0:
        events = json.loads(Path(file).read_text())
        names = [event["name"] for event in events]
        for name in ("NEGOTIATE_ALLREDUCE", "ALLREDUCE", "GLOO_ALLREDUCE", "ALLGATHER", "CYCLE_START"):
            assert name in names, name
        for event in {event["pid"] for event in events}:
            depth = 0
            for each in events:
                depth += {"B": 1, "E": -1}.get(each["ph"], 0) if each["pid"] == event else 0
                assert depth >= 0
            assert depth == 0


def test_the_timeline_is_a_trace_whose_activities_end(tmp_path: Path) -> None:
    launch(timeline, (str(tmp_path / "trace.json"),), nproc=2)


def one_rank() -> None:
    rank, size = started()
    assert (rank, size, hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (0, 1, 0, 1, 0, 1)
    assert hvd.is_homogeneous()
    assert hvd.gloo_built()
    assert not hvd.mpi_built()
    tensor = torch.arange(4.0)
    for op in (hvd.Sum, hvd.Average, hvd.Min, hvd.Adasum):
        assert torch.equal(hvd.allreduce(tensor, op=op), tensor)
    assert torch.equal(hvd.alltoall(tensor), tensor)
    assert torch.equal(hvd.allgather(tensor), tensor)
    assert torch.equal(hvd.reducescatter(tensor), tensor)
    assert hvd.broadcast_object({"a": 1}) == {"a": 1}
    assert hvd.join() == 0


def test_a_single_rank_needs_nobody() -> None:
    launch(one_rank)


def test_machines_with_different_numbers_of_ranks() -> None:
    nodes = {0: 1, 1: 2, 2: 2}
    second = Placement(rank=4, world_size=5, local_rank=1, local_world_size=2, node_rank=2, node_count=3)
    assert basics.cross_of(second, nodes) == (1, 2)  # of the two that have a second rank
    first = Placement(rank=3, world_size=5, local_rank=0, local_world_size=2, node_rank=2, node_count=3)
    assert basics.cross_of(first, nodes) == (2, 3)


def test_what_is_not_there_says_what_to_use() -> None:
    for name in ("tensorflow", "keras", "mxnet", "spark", "ray"):
        with pytest.raises(ImportError, match=re.escape(f"horovod.{name} is not part of paceline: ")):
            __import__(f"paceline.horovod.{name}")
