"""The order of an epoch, computed index by index, without a list of all indices.

An order maps positions 0, 1, 2, … of an epoch to indices of the data set. All are pure functions of (seed, epoch,
position), in integer arithmetic that never overflows, so every rank, platform and version of Python finds the same.
The exception is `WeightedPermutation`, which sorts one number per sample.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

# Exact calculation over all round functions: after 16 rounds the permutations of 2, 3 and 4 elements are within a
# total variation of 3e-5 of uniform. NIST's FF1, for larger domains, has 10 rounds.
ROUNDS = 16
LARGEST_SIZE = 2**62  # the halves of the network then fit into 31 bits, and every product into 63
MASK = 0xFFFFFFFF
LARGEST_TABLE = 1024  # the base up to which a table of the round functions is made at once: sizes up to a million


def _keys(purpose: str, count: int, *parts: int) -> list[int]:
    """`count` independent keys of 32 bits, a function of the integers `parts`."""
    digest = hashlib.shake_256(f"paceline {purpose} {parts}".encode()).digest(4 * count)
    return [int.from_bytes(digest[i : i + 4], "little") for i in range(0, len(digest), 4)]


def _hash(x: Tensor, key: int | Tensor) -> Tensor:
    """A well-mixed 32-bit function of each 32-bit element of `x`.

    `lowbias32` of https://github.com/skeeto/hash-prospector. The second multiplier is taken modulo 2**32 to the range
    below 2**31 in size, so that no product leaves int64.
    """
    x = x ^ key
    x ^= x >> 16
    x *= 0x7FEB352D
    x &= MASK
    x ^= x >> 15
    x *= 0x846CA68B - 2**32
    x &= MASK
    x ^= x >> 16
    return x


class Permutation:
    """A pseudo-random permutation of range(size), a function of (size, seed, epoch), in O(1) time and memory per index.

    A generalized Feistel network with modular addition, cut to the size by cycle walking: methods 3 and 2 of J. Black
    and P. Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002. The network permutes the a² pairs of digits
    in base a, the smallest even one with a² ≥ size, so that almost no index of a large data set needs cycle walking.
    The base is even because with an odd one, only even permutations of the pairs could occur, which matters for small
    sizes.
    """

    def __init__(self, size: int, seed: int, epoch: int = 0) -> None:
        if not 1 <= size <= LARGEST_SIZE:
            raise ValueError(f"cannot permute {size} elements: the size must be 1 to 2**62")
        self._size = size
        root = math.isqrt(size - 1) + 1
        self._base = root + root % 2
        self._keys = _keys("permutation", ROUNDS, size, seed, epoch)
        self._tables: tuple[Tensor, ...] = ()  # for small sizes, all values of each round function
        if self._base <= LARGEST_TABLE:
            self._tables = self._round(torch.arange(self._base), torch.tensor(self._keys)[:, None]).unbind()

    def at(self, positions: Tensor) -> Tensor:
        """The indices at `positions`, both int64 of shape (n,)."""
        indices = self._encrypt(positions)
        while (outside := indices >= self._size).any():
            indices[outside] = self._encrypt(indices[outside])
        return indices

    def _round(self, half: Tensor, key: int | Tensor) -> Tensor:
        hashed = _hash(half, key)
        hashed *= self._base
        hashed >>= 32
        return hashed

    def _encrypt(self, x: Tensor) -> Tensor:
        left, right = x // self._base, x % self._base
        for number, key in enumerate(self._keys):
            mixed = self._tables[number].take(right) if self._tables else self._round(right, key)
            mixed += left
            mixed %= self._base
            left, right = right, mixed
        return left * self._base + right


class Sequential:
    """The data set's own order."""

    def at(self, positions: Tensor) -> Tensor:
        return positions


class WeightedDraws:
    """Independent draws, index i with probability weights[i] / sum(weights), in O(log size) per draw.

    The random number of a draw is a hash of its position: J. Salmon et al., "Parallel random numbers: as easy as
    1, 2, 3", SC 2011.
    """

    def __init__(self, cumulative: Tensor, seed: int, epoch: int) -> None:
        self._cumulative = cumulative  # float64 of shape (size,)
        self._keys = _keys("weighted draws", 4, seed, epoch)

    def at(self, positions: Tensor) -> Tensor:
        """The indices drawn at `positions`, both int64 of shape (n,)."""
        uniform = _uniform(positions, self._keys)
        total = self._cumulative[-1]
        # Rounding may make the product equal to the total, which is beyond the last index.
        drawn = (uniform * total).minimum(torch.nextafter(total, torch.zeros_like(total)))
        return torch.searchsorted(self._cumulative, drawn, right=True)


class WeightedPermutation:
    """Draws without replacement: each next index with probability proportional to its weight among those left.

    P. Efraimidis and P. Spirakis, "Weighted random sampling with a reservoir", IPL 97 (2006): the order of
    exponential variables with the weights as rates. Sorts when built: O(size log size) time, O(size) memory.
    """

    def __init__(self, weights: Tensor, seed: int, epoch: int) -> None:
        uniform = _uniform(torch.arange(len(weights)), _keys("weighted permutation", 4, seed, epoch))
        self._indices = (-torch.log(uniform.clamp(min=2.0**-54)) / weights).argsort(stable=True)

    def at(self, positions: Tensor) -> Tensor:
        """The indices drawn at `positions`, both int64 of shape (n,)."""
        return self._indices[positions]


Order = Permutation | Sequential | WeightedDraws | WeightedPermutation  # the indices that an epoch visits, by position


def _uniform(positions: Tensor, keys: list[int]) -> Tensor:
    """A number of [0, 1) for each position, with 53 random bits: float64 of shape (n,)."""
    low, high = positions & MASK, positions >> 32
    words = [_hash(_hash(low, keys[i]) ^ high, keys[i + 1]) for i in (0, 2)]
    return ((words[0] << 21) + (words[1] >> 11)).double() * 2.0**-53
