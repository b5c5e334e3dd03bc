"""Every operation with every type, number of dimensions and variant. One start of the ranks does many checks."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest

from tests.late import hvd, torch
from tests.train.launching import launch

from .ranks import started

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SHAPES = ((), (5,), (3, 2), (2, 3, 4), (0,), (2, 0, 3))


def dtypes(names: str) -> list[torch.dtype]:
    return [getattr(torch, name) for name in names.split()]


def floats() -> list[torch.dtype]:
    return dtypes("float16 bfloat16 float32 float64")


def integers() -> list[torch.dtype]:
    return dtypes("uint8 int8 int16 int32 int64 uint16 uint32 uint64")


def complexes() -> list[torch.dtype]:
    return dtypes("complex64 complex128")


def values(shape: Sequence[int], dtype: torch.dtype, rank: int) -> torch.Tensor:
    """Small whole numbers that differ between ranks, exact in every type."""
    count = int(torch.tensor(shape).prod()) if shape else 1
    return ((torch.arange(count) % 5) + 1 + rank).view(tuple(shape)).to(dtype)


def same(result: torch.Tensor, expected: torch.Tensor) -> None:
    assert result.dtype == expected.dtype, (result.dtype, expected.dtype)
    assert result.shape == expected.shape, (result.shape, expected.shape)
    assert torch.equal(result.double() if not result.is_complex() else result, _double(expected)), (result, expected)


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_complex() else tensor.double()


def reductions() -> None:
    """Each way to call allreduce gives the result that was computed from all ranks' tensors."""
    rank, size = started()
    combine: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {
        hvd.Sum: lambda all_: all_.sum(0),
        hvd.Average: lambda all_: all_.sum(0) / size,
        hvd.Min: lambda all_: all_.min(0).values,
        hvd.Max: lambda all_: all_.max(0).values,
        hvd.Product: lambda all_: all_.prod(0),
    }
    number = itertools.count()
    for dtype, op in itertools.product((*floats(), *integers()), combine):
        shapes = SHAPES if op == hvd.Sum else SHAPES[1:3]
        inputs = [values(shape, dtype, rank) for shape in shapes]
        everyone = [torch.stack([values(shape, torch.float64, other) for other in range(size)]) for shape in shapes]
        expected = [combine[op](one) for one in everyone]
        if not dtype.is_floating_point:
            expected = [one.trunc() for one in expected]
        expected = [one.to(dtype) for one in expected]
        tolerance = {"rtol": 1e-2, "atol": 1e-2} if dtype.itemsize == 2 else {}
        before = [one.clone() for one in inputs]

        def check(results: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor] = expected) -> None:
            for one, other in zip(results, wanted, strict=True):
                assert (one.dtype, one.shape) == (dtype, other.shape)  # noqa: B023 - called in this round
                torch.testing.assert_close(one.double(), other.double(), **tolerance)  # noqa: B023

        check([hvd.allreduce(one, op=op) for one in inputs])
        check(hvd.grouped_allreduce(inputs, op=op))
        handles = [hvd.allreduce_async(one, op=op, name=f"r{next(number)}") for one in inputs]
        check([hvd.synchronize(handle) for handle in reversed(handles)][::-1])
        check(hvd.synchronize(hvd.grouped_allreduce_async(inputs, op=op, name=f"g{next(number)}")))
        for one, other in zip(inputs, before, strict=True):
            same(one, other)  # not changed
        copies = [one.clone() for one in inputs]
        for one in copies:
            assert hvd.allreduce_(one, op=op) is one
        check(copies)
        copies = [one.clone() for one in inputs]
        for one, result in zip(copies, hvd.grouped_allreduce_(copies, op=op), strict=True):
            assert result is one
        check(copies)
        copies = [one.clone() for one in inputs]
        handles = [hvd.allreduce_async_(one, op=op) for one in copies]
        assert all(hvd.synchronize(handle) is one for handle, one in zip(handles, copies, strict=True))
        check(copies)
        copies = [one.clone() for one in inputs]
        hvd.synchronize(hvd.grouped_allreduce_async_(copies, op=op))
        check(copies)
    for dtype, op in itertools.product(complexes(), (hvd.Sum, hvd.Average)):
        own = torch.tensor([1 + 2j, rank * 1j], dtype=dtype)
        total = torch.tensor([size * (1 + 2j), sum(range(size)) * 1j], dtype=dtype)
        torch.testing.assert_close(hvd.allreduce(own, op=op), total / (size if op == hvd.Average else 1))
        torch.testing.assert_close(hvd.allreduce(own, op=hvd.Sum, prescale_factor=2.0), total * 2)
    for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
        with pytest.raises((ValueError, NotImplementedError), match=r"complex|power of 2"):
            hvd.allreduce(torch.tensor([1j]), op=op)
    assert hvd.allreduce(torch.tensor(-7)).item() == -7
    assert hvd.allreduce(torch.tensor([rank == 0, True, False]), op=hvd.Sum).tolist() == [True, True, False]
    assert hvd.allreduce(torch.tensor([rank == 0, True, False]), op=hvd.Min).tolist() == [False, True, False]
    assert hvd.allreduce(torch.tensor([rank == 0, True, False]), op=hvd.Max).tolist() == [True, True, False]


def test_reductions() -> None:
    launch(reductions, nproc=3)


def scales_and_groups() -> None:
    rank, size = started()
    total = sum(range(1, size + 1))
    for dtype in (*floats(), torch.int32, torch.int64, torch.uint8):
        own = torch.full((4,), rank + 1).to(dtype)
        for pre, post in ((2.0, 1.0), (1.0, 3.0), (2.0, 2.0), (0.5, 1.0)):
            if dtype.is_floating_point:
                expected = total * pre * post
            else:
                expected = int(sum(int((other + 1) * pre) for other in range(size)) * post)
            for result in (
                hvd.allreduce(own, op=hvd.Sum, prescale_factor=pre, postscale_factor=post),
                hvd.grouped_allreduce([own], op=hvd.Sum, prescale_factor=pre, postscale_factor=post)[0],
                hvd.allreduce_(own.clone(), op=hvd.Sum, prescale_factor=pre, postscale_factor=post),
                hvd.reducescatter(own, op=hvd.Sum, prescale_factor=pre, postscale_factor=post),
            ):
                assert result.dtype == dtype
                assert set(result.tolist()) <= {expected}, (dtype, pre, post, result)
    # Groups of several types keep every bit.
    large = 2**53 + 1
    group = [
        torch.tensor([large, -large]), torch.tensor([0.1], dtype=torch.float64), torch.ones(3, dtype=torch.float16),
        torch.tensor([large + 2]), torch.tensor([rank == 0]), torch.full((2,), 7, dtype=torch.uint8),
    ]  # fmt: skip
    expected = [
        torch.tensor([large * size, -large * size]),
        torch.tensor([0.1 + 0.1 + 0.1], dtype=torch.float64),
        torch.full((3,), size, dtype=torch.float16),
        torch.tensor([(large + 2) * size]),
        torch.tensor([True]),
        torch.full((2,), 7 * size, dtype=torch.uint8),
    ]
    for results in (
        hvd.grouped_allreduce(group, op=hvd.Sum),
        hvd.synchronize(hvd.grouped_allreduce_async(group, op=hvd.Sum, name="mixed")),
        hvd.synchronize(hvd.grouped_allreduce_async(group, op=hvd.Sum, name="mixed")),
        hvd.grouped_allreduce_([one.clone() for one in group], op=hvd.Sum),
    ):
        for one, other in zip(results, expected, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other), (one, other)
    parts = hvd.grouped_reducescatter([torch.full((size, 1), large), torch.ones(size * 2), group[0]], op=hvd.Sum)
    assert parts[0].tolist() == [[large * size]]
    assert parts[1].tolist() == [size] * 2
    assert parts[2].tolist() == ([[large * size], [-large * size]][rank] if rank < 2 else [])
    gathered = hvd.grouped_allgather([torch.full((rank, 2), large), torch.tensor([rank == 1])])
    assert gathered[0].shape == (sum(range(size)), 2)
    assert set(gathered[0].flatten().tolist()) == {large}
    assert gathered[1].tolist() == [other == 1 for other in range(size)]
    # A gradient goes through the floats of such a group.
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, dtype=torch.float64, requires_grad=True)
    left, right = hvd.grouped_allreduce([x, y], op=hvd.Sum)
    (left.double() * right).sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    assert (x.grad.dtype, y.grad.dtype) == (torch.float32, torch.float64)
    assert (x.grad.tolist(), y.grad.tolist()) == ([size * size] * 2, [size * size] * 2)


def test_scale_factors_and_groups_of_several_types() -> None:
    launch(scales_and_groups, nproc=3)


def large_tensors() -> None:
    """Tensors that may go other ways than small ones, among them through memory that ranks share."""
    rank, size = started()
    count = (1 << 17) + 13
    total = sum(range(1, size + 1))
    for dtype in (*floats(), torch.int64, torch.int32, torch.uint8):
        own = torch.full((count,), rank + 1).to(dtype)
        exact = dtype.is_floating_point

        def check(result: torch.Tensor, value: float, count: int = count, dtype: torch.dtype = dtype) -> None:
            assert result.dtype == dtype
            torch.testing.assert_close(result.double(), torch.full((count,), float(value)).double(), rtol=1e-2, atol=0)

        check(hvd.allreduce(own, op=hvd.Sum), total)
        check(hvd.allreduce(own, name="large"), total / size if exact else total // size)
        check(hvd.allreduce(own, op=hvd.Max), size)
        check(hvd.allreduce(own, op=hvd.Product), 6 if size == 3 else 2)
        check(hvd.allreduce(own, op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0), 6 * total)
        check(hvd.allreduce_(own.clone(), op=hvd.Sum), total)
        wide = torch.zeros(count, 2, dtype=dtype)
        wide[:, 1] = own
        check(hvd.allreduce_(wide[:, 1], op=hvd.Sum), total)
        check(wide[:, 1], total)
        check(wide[:, 0], 0)
        handles = [hvd.allreduce_async(own * other, op=hvd.Sum, name=f"large{other}") for other in (1, 2)]
        check(hvd.synchronize(handles[1]), 2 * total)
        check(hvd.synchronize(handles[0]), total)
        check(hvd.reducescatter(own.repeat(size), op=hvd.Sum), total)
        check(hvd.broadcast(own, size - 1), size)
        check(hvd.allgather(own)[-count:], size)
        assert set(own.tolist()) == {rank + 1}
    group = [torch.full((count,), rank + 1).to(dtype) for dtype in (*floats(), torch.int64)]
    for results in (hvd.grouped_allreduce(group, op=hvd.Sum), hvd.grouped_allreduce(group[::-1], op=hvd.Sum)[::-1]):
        for one, result in zip(group, results, strict=True):
            assert result.dtype == one.dtype
            assert set(result.tolist()) == {total}
    # Some ranks have joined.
    for _ in range(2):
        if rank:
            assert set(hvd.allreduce(torch.ones(count), op=hvd.Sum, name="joined").tolist()) == {size - 1}
        hvd.join()
    with pytest.raises(hvd.HorovodInternalError, match="shapes"):
        hvd.allreduce(torch.ones(count + rank), name="large")
    assert hvd.allreduce(torch.ones(count), name="large")[-1].item() == 1.0


def test_large_tensors() -> None:
    launch(large_tensors, nproc=3)


def movements() -> None:
    """allgather, broadcast, alltoall and reducescatter move every type as it is."""
    rank, size = started()
    assert hvd.allgather(torch.empty(0, 3)).shape == (0, 3)
    assert hvd.alltoall(torch.empty(0, 2)).shape == (0, 2)
    sparse = torch.sparse_coo_tensor([[rank, 5]], [1.0, 2.0], (8,))
    dense = hvd.synchronize(hvd.sparse_allreduce_async(sparse, "sparse", hvd.Sum)).to_dense()
    assert dense.tolist() == [*[1.0] * size, *[0.0] * (5 - size), 2.0 * size, 0.0, 0.0]
    for dtype in (*floats(), *integers(), *complexes(), torch.bool):
        for rest in ((), (2,), (2, 3)):
            own = values((rank + 1, *rest), dtype, rank)
            whole = torch.cat([values((other + 1, *rest), dtype, other) for other in range(size)])
            same(hvd.allgather(own), whole)
            same(hvd.synchronize(hvd.allgather_async(own, name="gather")), whole)
            for result in hvd.grouped_allgather([own, own]):
                same(result, whole)
            for result in hvd.synchronize(hvd.grouped_allgather_async([own, own], name="gathers")):
                same(result, whole)
            splits = torch.tensor([rank + other for other in range(size)], dtype=torch.int32)
            sent = values((int(splits.sum()), *rest), dtype, rank)
            came, received = hvd.alltoall(sent, splits=splits)
            same(received, torch.tensor([other + rank for other in range(size)], dtype=torch.int32))
            parts = []
            for other in range(size):
                first = sum(other + each for each in range(rank))
                theirs = values((sum(other + each for each in range(size)), *rest), dtype, other)
                parts.append(theirs[first : first + other + rank])
            same(came, torch.cat(parts))
            even = values((size, *rest), dtype, 0)
            same(hvd.alltoall(even), torch.cat([even[rank : rank + 1]] * size))
        for shape in SHAPES:
            for root in (0, size - 1):
                own, wanted = values(shape, dtype, rank), values(shape, dtype, root)
                same(hvd.broadcast(own, root), wanted)
                same(hvd.synchronize(hvd.broadcast_async(own, root, name="cast")), wanted)
                same(own, values(shape, dtype, rank))
                assert hvd.broadcast_(own, root) is own
                same(own, wanted)
                own = values(shape, dtype, rank)
                assert hvd.synchronize(hvd.broadcast_async_(own, root)) is own
                same(own, wanted)
        if dtype == torch.bool or dtype.is_complex:
            continue
        for rows in (size, 2 * size + 1, 1, 0):
            own = values((rows, 2), dtype, rank)
            total = sum(values((rows, 2), torch.float64, other) for other in range(size))
            each, odd = divmod(rows, size)
            first = rank * each + min(rank, odd)
            mine = total[first : first + each + (rank < odd)]
            same(hvd.reducescatter(own, op=hvd.Sum), mine.to(dtype))
            same(hvd.synchronize(hvd.reducescatter_async(own, op=hvd.Sum, name="scatter")), mine.to(dtype))
            for result in hvd.grouped_reducescatter([own, own], op=hvd.Sum):
                same(result, mine.to(dtype))
            for result in hvd.synchronize(hvd.grouped_reducescatter_async([own, own], op=hvd.Sum, name="scatters")):
                same(result, mine.to(dtype))
            same(hvd.reducescatter(torch.full_like(own, 3)), torch.full_like(mine.to(dtype), 3))  # the average


def test_movements() -> None:
    launch(movements, nproc=3)


def strides() -> None:
    """Tensors that are not contiguous, share memory or are expanded."""
    rank, size = started()
    base = torch.arange(24.0).view(4, 6)
    for view in (base.t(), base[::2], base[:, 1:3], base[:, ::3], base[1], base.view(2, 2, 6).permute(2, 0, 1)):
        own = view.clone(memory_format=torch.preserve_format)
        torch.testing.assert_close(hvd.allreduce(view, op=hvd.Sum), view * size)
        torch.testing.assert_close(hvd.allgather(view), torch.cat([view] * size))
        torch.testing.assert_close(hvd.broadcast(view + rank, 1), view + 1)
        for target in (own, torch.zeros(8, 8, 8)[: view.shape[0], 1, : view[0].numel() if view.dim() > 1 else 1]):
            if target.shape == view.shape:
                target.copy_(view)
                assert hvd.allreduce_(target, op=hvd.Sum) is target
                torch.testing.assert_close(target, view * size)
    whole = torch.zeros(4, 4)
    columns = [whole[:, 0], whole[:, 2]]
    for column in columns:
        column.fill_(rank)
    hvd.grouped_allreduce_(columns, op=hvd.Max)
    assert whole.sum(0).tolist() == [4 * (size - 1), 0, 4 * (size - 1), 0]
    hvd.broadcast_(whole.fill_(rank)[::2], 1)
    assert whole.tolist() == [[1] * 4, [rank] * 4] * 2
    expanded = torch.tensor([[float(rank)]]).expand(2, 3)
    assert hvd.allreduce(expanded, op=hvd.Sum).tolist() == [[sum(range(size))] * 3] * 2
    last = torch.rand(1, 3, 4, 5).to(memory_format=torch.channels_last)
    torch.testing.assert_close(hvd.allreduce(last * 0 + 1, op=hvd.Sum), torch.full((1, 3, 4, 5), float(size)))
    parameter = torch.nn.Parameter(torch.full((2, 2), float(rank)))
    assert hvd.broadcast_(parameter, 1) is parameter
    assert parameter.tolist() == [[1.0] * 2] * 2
    assert hvd.allreduce_(parameter, op=hvd.Sum).tolist() == [[size] * 2] * 2
    # What autograd would need is noticed.
    x = torch.ones(2, requires_grad=True)
    y = (x * 2).exp()
    hvd.allreduce_(y, op=hvd.Sum)
    result = hvd.allreduce(torch.ones(2), op=hvd.Sum)
    assert not result.requires_grad
    with torch.no_grad():
        assert not hvd.allreduce(x).requires_grad
    # The input may be changed once the operation has ended, and a result outlives later operations.
    kept = [hvd.allreduce(torch.full((100,), float(index)), op=hvd.Sum) for index in range(20)]
    assert [int(one[7]) for one in kept] == [index * size for index in range(20)]


def test_tensors_in_any_layout() -> None:
    launch(strides, nproc=2)


def gradients() -> None:
    """The gradients are those of Horovod: reductions are reduced alike, allgather and broadcast are averaged."""
    rank, size = started()

    def grad_of(make: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        x = (torch.arange(float(torch.tensor(shape).prod())).view(shape) + rank).to(dtype).requires_grad_()
        out = make(x)
        weight = torch.ones_like(out) * (rank + 1)
        out.backward(weight)
        assert x.grad is not None
        assert (x.grad.dtype, x.grad.shape) == (dtype, x.shape)
        return x.grad

    weights = sum(range(1, size + 1))
    for dtype in floats():
        for shape in ((3,), (2, 3), (2, 2, 2)):
            grads = {
                "sum": grad_of(lambda x: hvd.allreduce(x, op=hvd.Sum), shape, dtype),
                "average": grad_of(lambda x: hvd.allreduce(x) * size, shape, dtype),
                "scaled": grad_of(
                    lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=2.0), shape, dtype
                ),
                "grouped": grad_of(lambda x: hvd.grouped_allreduce([x, x.detach()], op=hvd.Sum)[0], shape, dtype),
            }
            for name, grad in grads.items():
                assert set(grad.flatten().tolist()) == {float(weights)}, (name, grad)
        uneven = grad_of(hvd.allgather, (rank + 2, 2), dtype)
        torch.testing.assert_close(uneven, torch.full((rank + 2, 2), weights / size, dtype=dtype))
        both = grad_of(lambda x: torch.cat(hvd.grouped_allgather([x, x])), (rank + 1, 2), dtype)
        torch.testing.assert_close(both, torch.full((rank + 1, 2), 2 * weights / size, dtype=dtype))
        cast = grad_of(lambda x: hvd.broadcast(x, 1), (2, 2), dtype)
        torch.testing.assert_close(cast, torch.full((2, 2), weights / size if rank == 1 else 0.0, dtype=dtype))
        splits = [other + 1 for other in range(size)]
        moved = grad_of(lambda x, splits=splits: hvd.alltoall(x, splits=splits)[0], (sum(splits), 2), dtype)
        same(moved[:, 0], torch.cat([torch.full((other + 1,), other + 1.0) for other in range(size)]).to(dtype))
        short = grad_of(lambda x: hvd.alltoall(x, [1] * size)[0], (size + 2, 2), dtype)
        same(short[:, 0], torch.tensor([other + 1.0 for other in range(size)] + [0.0, 0.0]).to(dtype))
        rows = 2 * size + 1
        for op, factor in ((hvd.Sum, size), (hvd.Average, 1)):
            part = grad_of(lambda x, op=op: hvd.reducescatter(x, op=op), (rows, 2), dtype)
            owners = [other for other in range(size) for _ in range(2 + (other < 1))]
            same(part[:, 0], torch.tensor([factor * (owner + 1.0) for owner in owners]).to(dtype))
        part = grad_of(lambda x: hvd.grouped_reducescatter([x, x], op=hvd.Sum)[1], (size, 2), dtype)
        same(part[:, 0], torch.tensor([size * (owner + 1.0) for owner in range(size)]).to(dtype))
    x = torch.ones(1 + rank, requires_grad=True)  # another weight for each row
    out = hvd.allgather(x)
    (out * torch.arange(len(out))).sum().backward()
    start = sum(1 + other for other in range(rank))
    assert x.grad is not None
    assert x.grad.tolist() == [float(start + index) for index in range(1 + rank)]
    left, right = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    assert hvd.allreduce(left if rank else right, op=hvd.Adasum).tolist() == [1.0, 1.0]  # orthogonal: a sum
    assert hvd.allreduce(left, op=hvd.Adasum).tolist() == [1.0, 0.0]  # parallel: a mean
    # Through two operations, twice, and where only some results are used.
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    hvd.allreduce(hvd.allgather(x * x), op=hvd.Sum).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0 * size, 4.0 * size]
    x = torch.tensor([3.0], requires_grad=True)
    (first,) = torch.autograd.grad(hvd.allreduce(x**3, op=hvd.Sum), x, create_graph=True)
    first.backward()
    assert x.grad is not None
    assert x.grad.item() == 18.0 * size
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    hvd.grouped_allreduce([a, b], op=hvd.Sum)[0].sum().backward()
    assert a.grad is not None
    assert a.grad.tolist() == [size] * 2
    assert b.grad is None or b.grad.tolist() == [0.0] * 2
    for compression in (hvd.Compression.none, hvd.Compression.fp16):
        x = torch.full((2,), 0.5, dtype=torch.float64, requires_grad=True)
        out = hvd.allreduce(x, compression=compression, op=hvd.Sum)
        out.sum().backward()
        assert x.grad is not None
        assert (out.dtype, x.grad.dtype, x.grad.tolist()) == (torch.float64, torch.float64, [size] * 2)
        assert hvd.reducescatter(torch.ones(size), compression=compression).tolist() == [1.0]
        assert hvd.grouped_allreduce([torch.ones(1, dtype=torch.int32)], compression=compression)[0].item() == 1


def test_gradients() -> None:
    launch(gradients, nproc=2)
