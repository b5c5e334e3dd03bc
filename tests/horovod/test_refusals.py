"""What is refused, on which ranks, and how they go on; process sets, joins and settings."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import eventually
from tests.late import hvd, torch
from tests.train.launching import launch

from .ranks import started

if TYPE_CHECKING:
    from collections.abc import Callable


def wrong_arguments() -> None:
    """These are errors at once, on the rank that makes them, and nothing is sent."""
    started()
    x = torch.ones(4)
    operations: list[Callable[[Any], Any]] = [
        hvd.allreduce, hvd.allreduce_, hvd.allreduce_async, hvd.allreduce_async_, hvd.allgather, hvd.allgather_async,
        hvd.alltoall, hvd.alltoall_async, hvd.reducescatter, hvd.reducescatter_async,
        lambda y: hvd.broadcast(y, 0), lambda y: hvd.broadcast_(y, 0), lambda y: hvd.broadcast_async(y, 0),
        lambda y: hvd.broadcast_async_(y, 0), lambda y: hvd.sparse_allreduce_async(y, "s", hvd.Sum),
    ]  # fmt: skip
    for operation in operations:
        for wrong in (None, 1.0, [1.0], [x], "x"):
            with pytest.raises((TypeError, ValueError), match=r"torch.Tensor"):
                operation(wrong)
    groups: list[Callable[[Any], Any]] = [
        hvd.grouped_allreduce, hvd.grouped_allreduce_, hvd.grouped_allreduce_async, hvd.grouped_allreduce_async_,
        hvd.grouped_allgather, hvd.grouped_allgather_async, hvd.grouped_reducescatter,
        hvd.grouped_reducescatter_async,
    ]  # fmt: skip
    for operation in groups:
        for wrong in (None, 1.0, [1.0], [x, None], x, []):
            with pytest.raises((TypeError, ValueError), match="tensors"):
                operation(wrong)
    for op in (17, -1, "sum", None.__class__):
        with pytest.raises((TypeError, ValueError), match="op="):
            hvd.allreduce(x, op=op)
    with pytest.raises(ValueError, match="average"):
        hvd.allreduce(x, average=True, op=hvd.Average)
    with pytest.warns(DeprecationWarning, match="average"):
        assert hvd.allreduce(x, average=False).tolist() == [hvd.size()] * 4
    with pytest.warns(DeprecationWarning, match="average"):
        assert hvd.synchronize(hvd.allreduce_async(x, average=True)).tolist() == [1.0] * 4
    for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
        with pytest.raises((NotImplementedError, ValueError), match="reducescatter"):
            hvd.reducescatter(x, op=op)
        with pytest.raises((NotImplementedError, ValueError), match="sparse"):
            hvd.sparse_allreduce_async(x.to_sparse(), "s", op)
    for root in (-1, hvd.size(), 99):
        with pytest.raises(ValueError, match="root rank"):
            hvd.broadcast(x, root)
    for root in (None, "0", 0.5):
        with pytest.raises((TypeError, ValueError), match="root"):
            hvd.broadcast(x, root)
    with pytest.raises(ValueError, match="dense"):
        hvd.allreduce(x.to_sparse())
    for splits in ([1], [1, 1, 1], [5, 5], [-1, 2], [[1, 1]], torch.tensor([1.0, 1.0]), torch.tensor([1, 1])):
        with pytest.raises(ValueError, match="splits"):
            hvd.alltoall(x, splits=splits)
    with pytest.raises(ValueError, match="multiple of"):
        hvd.alltoall(torch.ones(hvd.size() + 1))
    for text in ("x", 3, None):
        with pytest.raises((TypeError, ValueError), match=r"process_set|ProcessSet"):
            hvd.allreduce(x, process_set=text)
    for params in (None, 3, "model", x):
        with pytest.raises(ValueError, match="invalid params"):
            hvd.broadcast_parameters(params, root_rank=0)
    with pytest.raises(ValueError, match="root rank"):
        hvd.broadcast_object({}, root_rank=9)
    with pytest.raises(ValueError, match="handle"):
        hvd.poll(12345678)
    assert hvd.allreduce(x, op=hvd.Sum).tolist() == [hvd.size()] * 4
    hvd.shutdown()
    for operation in (hvd.rank, hvd.size, hvd.local_rank, hvd.local_size, hvd.cross_rank, hvd.cross_size,
                      hvd.is_homogeneous, hvd.join, hvd.barrier, hvd.mpi_enabled, hvd.gloo_enabled,
                      lambda: hvd.allreduce(x), lambda: hvd.broadcast(x, 0), lambda: hvd.add_process_set([0]),
                      lambda: hvd.broadcast_object(1), lambda: hvd.start_timeline("/not/there")):  # fmt: skip
        with pytest.raises(ValueError, match=r"not been initialized; use hvd.init\(\)"):
            operation()
    hvd.init()
    assert hvd.allreduce(x, op=hvd.Sum).tolist() == [hvd.size()] * 4


def test_wrong_arguments() -> None:
    launch(wrong_arguments, nproc=2)


def duplicates() -> None:
    rank, size = started()
    x = torch.ones(2)
    kinds: list[Callable[[], int]] = [
        lambda: hvd.allreduce_async(x, name="d"), lambda: hvd.allgather_async(x, name="d"),
        lambda: hvd.broadcast_async(x, 0, name="d"), lambda: hvd.alltoall_async(x, name="d"),
        lambda: hvd.reducescatter_async(x, name="d"), lambda: hvd.grouped_allreduce_async([x], name="e"),
        lambda: hvd.grouped_allgather_async([x], name="e"), lambda: hvd.grouped_reducescatter_async([x], name="e"),
    ]  # fmt: skip
    for submit in kinds:
        if rank == 0:
            handle = submit()
            with pytest.raises(ValueError, match=r"Duplicate tensor name '[de]'"):
                submit()
            assert not hvd.poll(handle)  # the other rank has not come
            hvd.barrier()
        else:
            hvd.barrier()
            handle = submit()
        hvd.synchronize(handle)
        handles = [submit()]  # the name is free again
        hvd.synchronize(handles[0])
        assert hvd.synchronize(handles[0]) is None
    handle = hvd.allreduce_async(x, name="polled")
    eventually(lambda: hvd.poll(handle), "the operation has ended")
    assert hvd.synchronize(handle).tolist() == [1.0] * 2
    # Numbers, and names with any characters, are names.
    for name in ("a/b c", "ü", "", "x" * 3000, 7):
        assert hvd.allreduce(x, name=name, op=hvd.Sum).tolist() == [size] * 2


def test_names_that_are_taken() -> None:
    launch(duplicates, nproc=2)


def differences() -> list[str]:
    """Every rank gets the same error, and goes on; so it is with the cached operation of the same name."""
    rank, _ = started()
    odd = rank == 1
    x = torch.ones(4, 2)
    other = torch.ones(4, 3)
    cases: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "shape": (lambda: hvd.allreduce(x, name="n"), lambda: hvd.allreduce(other, name="n")),
        "dims": (lambda: hvd.allreduce(x, name="n"), lambda: hvd.allreduce(x.view(-1), name="n")),
        "type": (lambda: hvd.allreduce(x, name="n"), lambda: hvd.allreduce(x.double(), name="n")),
        "reduction": (lambda: hvd.allreduce(x, name="n"), lambda: hvd.allreduce(x, name="n", op=hvd.Sum)),
        "prescale": (lambda: hvd.allreduce(x, name="n"), lambda: hvd.allreduce(x, name="n", prescale_factor=2.0)),
        "postscale": (lambda: hvd.allreduce(x, name="n"), lambda: hvd.allreduce(x, name="n", postscale_factor=2.0)),
        "gather shape": (lambda: hvd.allgather(x, name="n"), lambda: hvd.allgather(other, name="n")),
        "gather type": (lambda: hvd.allgather(x, name="n"), lambda: hvd.allgather(x.int(), name="n")),
        "scalar": (lambda: hvd.allgather(torch.tensor(1), name="n"), lambda: hvd.allgather(torch.tensor(1), name="n")),
        "root": (lambda: hvd.broadcast(x, 0, name="n"), lambda: hvd.broadcast(x, 1, name="n")),
        "cast shape": (lambda: hvd.broadcast(x, 0, name="n"), lambda: hvd.broadcast(other, 0, name="n")),
        "cast type": (lambda: hvd.broadcast(x, 0, name="n"), lambda: hvd.broadcast(x.half(), 0, name="n")),
        "exchange": (lambda: hvd.alltoall(x, name="n"), lambda: hvd.alltoall(other, name="n")),
        "exchange type": (lambda: hvd.alltoall(x, name="n"), lambda: hvd.alltoall(x.int(), name="n")),
        "scatter": (lambda: hvd.reducescatter(x, name="n"), lambda: hvd.reducescatter(other, name="n")),
        "scatter op": (lambda: hvd.reducescatter(x, name="n"), lambda: hvd.reducescatter(x, name="n", op=hvd.Sum)),
        "scatter scalar": (lambda: hvd.reducescatter(x[0, 0], name="n"), lambda: hvd.reducescatter(x[0, 0], name="n")),
        "group": (lambda: hvd.grouped_allreduce([x, x], name="n"), lambda: hvd.grouped_allreduce([x], name="n")),
        "group type": (
            lambda: hvd.grouped_allreduce([x, x], name="n"),
            lambda: hvd.grouped_allreduce([x, x.int()], name="n"),
        ),
        "kinds": (lambda: hvd.allreduce(x, name="n"), lambda: hvd.allgather(x, name="n")),
    }
    messages = []
    for same in (False, True):
        for what, (ours, theirs) in cases.items():
            if same and "scalar" not in what:
                ours()  # now it is cached
            with pytest.raises(hvd.HorovodInternalError) as failure:
                (theirs if odd else ours)()
            if same:
                messages.append(f"{what}: {failure.value}")
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
    # In place, nothing has changed.
    own = torch.full((3 + odd,), 5.0)
    with pytest.raises(hvd.HorovodInternalError):
        hvd.allreduce_(own, op=hvd.Sum)
    assert own.tolist() == [5.0] * (3 + odd)
    # Of many operations that wait, only the wrong one fails.
    handles = [hvd.allreduce_async(torch.ones(2 + (odd and index == 5)), name=f"many{index}") for index in range(10)]
    for index, handle in enumerate(handles):
        if index == 5:
            with pytest.raises(hvd.HorovodInternalError, match="many5"):
                hvd.synchronize(handle)
        else:
            assert hvd.synchronize(handle).tolist() == [1.0] * 2
    return messages


def test_differences_are_errors_on_every_rank() -> None:
    first, second = launch(differences, nproc=2)
    assert first == second
    assert all("(n)" in message for message in first), first
    found = dict(message.split(": ", 1) for message in first)
    for what, text in {
        "shape": "allreduce tensor shapes", "type": "data types", "reduction": "reduction operations",
        "prescale": "prescale", "root": "root ranks", "gather shape": "allgather tensor shapes",
        "scalar": "rank-zero tensor", "group": "groups", "kinds": "Mismatched collective",
    }.items():  # fmt: skip
        assert text in found[what]


def sets() -> None:
    rank, size = started()
    even, odd = hvd.ProcessSet(range(0, size, 2)), hvd.ProcessSet(range(1, size, 2))
    with pytest.raises(ValueError, match="not registered"):
        even.included()
    assert hvd.add_process_set(even) is even
    hvd.add_process_set(odd)
    alone = hvd.add_process_set([size - 1])
    assert [one.process_set_id for one in (hvd.global_process_set, even, odd, alone)] == [0, 1, 2, 3]
    assert [one.ranks for one in hvd.process_sets()] == [list(range(size)), [0, 2], [1, 3], [3]]
    assert hvd.process_set_by_id(1) is even
    with pytest.raises(ValueError, match="No known process set"):
        hvd.process_set_by_id(9)
    mine, theirs = (odd, even) if rank % 2 else (even, odd)
    assert (mine.included(), theirs.included(), alone.included()) == (True, False, rank == size - 1)
    assert (mine.rank(), mine.size(), theirs.rank()) == (rank // 2, 2, None)
    total = sum(mine.ranks)
    x = torch.full((2,), float(rank))
    assert hvd.allreduce(x, op=hvd.Sum, process_set=mine, name="same").tolist() == [total] * 2
    assert hvd.allreduce(x, process_set=mine).tolist() == [total / 2] * 2
    assert hvd.allreduce(x, op=hvd.Sum, name="same").tolist() == [sum(range(size))] * 2
    assert hvd.allgather(torch.full((rank + 1,), rank), process_set=mine).tolist() == [
        other for other in mine.ranks for _ in range(other + 1)
    ]
    assert hvd.broadcast(torch.tensor(rank), mine.ranks[1], process_set=mine).item() == mine.ranks[1]
    with pytest.raises(ValueError, match="root rank"):
        hvd.broadcast(torch.tensor(rank), theirs.ranks[0], process_set=mine)
    came, received = hvd.alltoall(torch.tensor([rank] * 3), splits=[1, 2], process_set=mine)
    assert came.tolist() == [other for other in mine.ranks for _ in range(1 + mine.rank())]
    assert received.tolist() == [1 + mine.rank()] * 2
    with pytest.raises(ValueError, match="splits"):
        hvd.alltoall(torch.ones(4), splits=[1] * 4, process_set=mine)
    assert hvd.reducescatter(torch.ones(3, 2), op=hvd.Sum, process_set=mine).tolist() == [[2.0] * 2] * (2 - mine.rank())
    assert hvd.broadcast_object(rank, mine.ranks[0], process_set=mine) == mine.ranks[0]
    assert hvd.allgather_object(rank, process_set=mine) == mine.ranks
    sparse = torch.sparse_coo_tensor([[rank]], [2.0], (size,))
    dense = hvd.synchronize(hvd.sparse_allreduce_async(sparse, "sp", hvd.Average, process_set=mine)).to_dense()
    assert dense.tolist() == [1.0 if other in mine.ranks else 0.0 for other in range(size)]
    leaf = torch.ones(2, requires_grad=True)
    (hvd.broadcast(leaf, mine.ranks[1], process_set=mine) * (rank + 1)).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [(total + 2) / 2 if rank == mine.ranks[1] else 0.0] * 2
    leaf = torch.ones(rank + 1, requires_grad=True)
    (hvd.allgather(leaf, process_set=mine) * (rank + 1)).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [(total + 2) / 2] * (rank + 1)
    hvd.barrier(process_set=mine)
    for operation in (lambda: hvd.allreduce(x, process_set=theirs), lambda: hvd.allgather(x, process_set=theirs),
                      lambda: hvd.broadcast(x, theirs.ranks[0], process_set=theirs),
                      lambda: hvd.alltoall(x, process_set=theirs), lambda: hvd.reducescatter(x, process_set=theirs),
                      lambda: hvd.barrier(process_set=theirs)):  # fmt: skip
        with pytest.raises(ValueError, match="does not belong to"):
            operation()
    with pytest.raises(NotImplementedError, match="Adasum"):
        hvd.allreduce(x, op=hvd.Adasum, process_set=mine)
    if alone.included():
        assert hvd.allreduce(x, op=hvd.Sum, process_set=alone).tolist() == [rank] * 2
    # A set whose ranks disagree: its ranks alone get the error.
    if rank % 2:
        with pytest.raises(hvd.HorovodInternalError, match="shapes"):
            hvd.allreduce(torch.ones(rank), name="wrong", process_set=odd)
    for wrong in ([0, 0], [-1], [size], []):
        with pytest.raises(ValueError, match="process set"):
            hvd.add_process_set(wrong)
    for wrong in (3, None, ["0"]):
        with pytest.raises(ValueError, match="ProcessSet should be initialized"):
            hvd.ProcessSet(wrong)
    with pytest.raises(ValueError, match="exists already"):
        hvd.add_process_set(range(size))
    assert hvd.remove_process_set(alone)
    assert not hvd.remove_process_set(alone)
    assert hvd.add_process_set([0, 3]).process_set_id not in (None, 0, 1, 2)
    hvd.shutdown()
    hvd.init(process_sets="dynamic")
    assert len(hvd.process_sets()) == 1
    assert even.process_set_id is None or not even.ranks


def test_process_sets() -> None:
    launch(sets, nproc=4)


def joined() -> list[int]:
    rank, size = started()
    last = []
    for dtype in (torch.float32, torch.float64, torch.float16, torch.int32, torch.int64):
        # Uneven data: rank r has r + 1 batches.
        for step in range(rank + 1):
            there = size - step
            one = torch.full((3,), 2).to(dtype)
            assert hvd.allreduce(one, op=hvd.Sum).tolist() == [2 * there] * 3
            mean = hvd.allreduce(torch.full((3,), 12).to(dtype), name="mean")
            assert mean.tolist() == [12 * there / size] * 3
            pair = hvd.grouped_allreduce([one, torch.ones(1, dtype=torch.int64)], name="pair", op=hvd.Sum)
            assert pair[1].item() == there
        last.append(hvd.join())
    if rank == 0:
        last.append(hvd.join())
    else:
        for kind, refused in (
            ("Allgather", lambda: hvd.allgather(torch.ones(1), name="g")),
            ("Broadcast", lambda: hvd.broadcast(torch.ones(1), 1, name="b")),
            ("Alltoall", lambda: hvd.alltoall(torch.ones(size), name="a")),
            ("Reducescatter", lambda: hvd.reducescatter(torch.ones(size), name="r")),
            ("Allreduce with op Min", lambda: hvd.allreduce(torch.ones(1), op=hvd.Min, name="m")),
            ("Allreduce with op Product", lambda: hvd.allreduce(torch.ones(1), op=hvd.Product, name="p")),
        ):
            with pytest.raises(hvd.HorovodInternalError, match=rf"{kind} is not supported with Join .* ranks \[0\]"):
                refused()
        hvd.barrier()
        last.append(hvd.join(hvd.local_rank()))
    assert last[-1] != 0
    last[-1] = 0
    assert hvd.allgather(torch.tensor([rank])).tolist() == list(range(size))  # all are back
    return last


def test_joins() -> None:
    answers = launch(joined, nproc=3)
    assert answers == [[2] * 5 + [0]] * 3


def stall() -> list[str]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("paceline").addHandler(handler)
    rank, size = started(HOROVOD_STALL_CHECK_TIME_SECONDS="0.2")
    hvd.allreduce(torch.ones(1), name="known")
    hvd.allreduce(torch.ones(1), name="quick")
    hvd.barrier()
    if rank == 0:
        handles = [hvd.allreduce_async(torch.ones(1), name=name) for name in ("known", "new")]
        eventually(lambda: "known" in "".join(messages) and "new" in "".join(messages), "both are named")
        hvd.barrier()
    else:
        hvd.barrier()
        handles = [hvd.allreduce_async(torch.ones(1), name=name) for name in ("known", "new")]
    assert [hvd.synchronize(handle).item() for handle in handles] == [1.0, 1.0]
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    return messages


def test_the_stall_warning_names_operations_and_missing_ranks() -> None:
    messages, others = launch(stall, nproc=2)
    assert others == []
    text = "\n".join(messages)
    assert "One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks" in text
    assert "for more than 0.2 seconds" in text
    assert "allreduce.known [missing ranks: 1]" in text
    assert "allreduce.new [missing ranks: 1]" in text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("HOROVOD_FUSION_THRESHOLD", "many"), ("HOROVOD_CYCLE_TIME", "-1"), ("HOROVOD_CACHE_CAPACITY", "x"),
        ("HOROVOD_STALL_CHECK_TIME_SECONDS", "nan"), ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "-3"),
        ("HOROVOD_ELASTIC_TIMEOUT", "soon"),
    ],
)  # fmt: skip
def test_variables_that_are_no_numbers(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=f"{name}={text} is not a number of 0 or more; correct or unset it"):
        hvd.init()
    assert not hvd.is_initialized()


def with_variables(variables: dict[str, str]) -> None:
    _, size = started(**variables)
    for step in range(3):
        handles = [hvd.allreduce_async(torch.full((50,), float(step)), name=f"v{i}", op=hvd.Sum) for i in range(30)]
        handles.append(hvd.allreduce_async(torch.ones(1 << 20), name="large", op=hvd.Sum))
        for handle in handles[:-1]:
            assert hvd.synchronize(handle).tolist() == [step * size] * 50
        assert hvd.synchronize(handles[-1])[-1].item() == size
    hvd.shutdown()


@pytest.mark.parametrize(
    "variables",
    [
        {"HOROVOD_FUSION_THRESHOLD": "0", "HOROVOD_CYCLE_TIME": "0"},
        {"HOROVOD_FUSION_THRESHOLD": "1000", "HOROVOD_CACHE_CAPACITY": "0"},
        {"HOROVOD_CACHE_CAPACITY": "5", "HOROVOD_CYCLE_TIME": "20", "HOROVOD_STALL_CHECK_DISABLE": "1"},
    ],
)
def test_results_do_not_depend_on_the_variables(variables: dict[str, str]) -> None:
    launch(with_variables, (variables,), nproc=2)


def sharded() -> None:
    """Horovod gives all ranks one rank's tensors, and here each rank has a part of them."""
    from torch.distributed.fsdp import fully_shard

    started()
    model = torch.nn.Linear(4, 4)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    momentum = [state["momentum_buffer"].to_local().clone() for state in optimizer.state.values()]
    for call in (
        lambda: hvd.broadcast_parameters(model.state_dict(), root_rank=0),
        lambda: hvd.allreduce(model.weight.detach()),
        lambda: hvd.grouped_allreduce([torch.ones(1), model.weight.detach()]),
    ):
        with pytest.raises(TypeError, match=r"takes a tensor of this rank, and this one is a DTensor"):
            call()
    with pytest.raises(TypeError, match=r'this SGD is sharded, .*: parameter "0" of group 0 is a DTensor'):
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for values, found in (
        ({"model": model}, 'model is sharded, .*: parameter "weight" is a DTensor'),
        ({"optimizer": optimizer}, 'optimizer is sharded, .*: parameter "0" of group 0 is a DTensor'),
        ({"best": [model.weight.detach()]}, r"best is sharded, .*: best\[0\] is a DTensor"),
    ):
        with pytest.raises(TypeError, match=found):
            hvd.elastic.TorchState(**values)
    state = hvd.elastic.TorchState(torch.nn.Linear(4, 4))
    fully_shard(state.model)
    with pytest.raises(TypeError, match=r'model is sharded, .*: parameter "weight" is a DTensor'):
        state.sync()
    after = [state["momentum_buffer"].to_local() for state in optimizer.state.values()]
    assert all(map(torch.equal, momentum, after))
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2


def test_what_is_sharded_is_given_to_no_other_rank() -> None:
    launch(sharded, nproc=2)
