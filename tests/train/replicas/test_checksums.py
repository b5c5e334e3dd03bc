"""Checksums of tensors: a changed bit changes them, whatever the type, shape and strides; equal bits do not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.train.replicas.checksums import Sums, is_comparable, unpack
from paceline.train.replicas.judging import COLUMNS

_TYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool,
    torch.int64, torch.int32, torch.int16, torch.uint8,
]  # fmt: skip
_SHAPES = st.lists(st.integers(1, 7), max_size=3) | st.sampled_from(
    [[0], [8167], [8169], [8171], [3, 2 * COLUMNS * 8 + 5]]
)


def _tensor(dtype: torch.dtype, shape: list[int], seed: int) -> torch.Tensor:
    size = torch.Size(shape).numel() * torch.empty(0, dtype=dtype).element_size()
    octets = torch.randint(0, 2 if dtype is torch.bool else 256, (size,), generator=torch.Generator().manual_seed(seed))
    return octets.to(torch.uint8).view(dtype).view(shape)


def _sums(*tensors: torch.Tensor) -> list[tuple[int, int]]:
    packed = Sums(tensors).packed
    return [unpack(packed, number) for number in range(len(tensors))]


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(_TYPES), _SHAPES.filter(lambda shape: 0 not in shape), st.data())
def test_every_flipped_bit_changes_the_sum_of_its_tensor_alone(
    dtype: torch.dtype, shape: list[int], data: st.DataObject
) -> None:
    tensors = [_tensor(dtype, shape, seed) for seed in range(3)] + [_tensor(torch.float32, [5], 9)]
    before = _sums(*tensors)
    octets = tensors[1].view(-1).view(torch.uint8)
    place = data.draw(st.integers(0, len(octets) - 1))
    octets[place] ^= 1 << (0 if dtype is torch.bool else data.draw(st.integers(0, 7)))
    after = _sums(*tensors)
    assert after[1][0] != before[1][0]
    assert [each for number, each in enumerate(after) if number != 1] == [before[0], *before[2:]]


@pytest.mark.parametrize("size", [40_001, 40_007, 2 * COLUMNS * 8 + 5])
def test_the_last_bytes_of_a_large_tensor_count(size: int) -> None:
    tensor = _tensor(torch.uint8, [size], 1)
    before = _sums(tensor)
    tensor[-1] ^= 1
    assert _sums(tensor) != before


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(_TYPES), st.lists(st.integers(0, 9), min_size=2, max_size=3) | st.just([130, 131]), st.data())
def test_equal_bits_have_equal_sums_whatever_their_strides_and_neighbours(
    dtype: torch.dtype, shape: list[int], data: st.DataObject
) -> None:
    tensor = _tensor(dtype, shape, 1)
    (alone,) = _sums(tensor)
    turned = tensor.transpose(0, 1).contiguous().transpose(0, 1)
    apart = torch.cat([tensor.reshape(-1)[:1], tensor.reshape(-1)])[min(1, tensor.numel()) :].view(shape)  # not aligned
    wide = torch.stack([tensor, tensor], -1)[..., 0]
    others = [_tensor(dtype, [data.draw(st.integers(0, 5))], 2) for _ in range(2)]
    assert _sums(others[0], turned, apart, others[1], wide)[1:3] == [alone, alone]
    assert _sums(wide, torch.nn.Parameter(tensor, requires_grad=False)) == [alone, alone]


def test_the_bits_count_and_not_the_values() -> None:
    nan, other = torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0])
    assert _sums(nan) == _sums(other)
    assert _sums(torch.tensor(0.0)) != _sums(torch.tensor(-0.0))
    turned = torch.tensor([1 + 2j, 3 - 1j])
    assert _sums(turned.conj()) == _sums(turned.conj().resolve_conj())


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([100, 5 * COLUMNS, 20 * COLUMNS]), st.data())
def test_words_that_change_places_are_seen(size: int, data: st.DataObject) -> None:
    tensor = _tensor(torch.int64, [size], 5)
    before = _sums(tensor)
    one, other = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, size - 1))
    tensor[[one, other]] = tensor[[other, one]]
    (plain, weighted), ((old_plain, old_weighted),) = _sums(tensor)[0], before
    assert plain == old_plain
    assert (weighted != old_weighted) == ((one - other) % COLUMNS != 0)


def test_tensors_without_bits_of_their_own_are_left_out() -> None:
    assert is_comparable(torch.nn.Parameter(torch.ones(2)))
    assert is_comparable(torch.ones(()))
    assert not is_comparable(torch.eye(2).to_sparse())
    assert not is_comparable(torch.ones(2, device="meta"))
    assert _sums() == []


@pytest.mark.parametrize("count", [3000])
def test_many_small_tensors_are_summed_in_parts(count: int) -> None:
    tensors = [_tensor(torch.float32, [200], seed) for seed in range(count)]
    found = _sums(*tensors)
    for number in (0, 1300, 1311, 2620, count - 1):
        assert found[number] == _sums(tensors[number])[0]
