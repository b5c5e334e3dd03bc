"""Random numbers: separate streams for a piece of work, and the states of the process's global generators."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import random
import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def derive_seed(*parts: int) -> int:
    """A seed of 63 bits, a function of the integers `parts`; unrelated for any two different lists of parts."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python, torch (CPU and GPUs) and, where it is imported, numpy."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:  # numpy imports numpy.random only when it is first used
        importlib.import_module("numpy.random").seed(seed % 2**32)


class SharedDraws:
    """Until `end`, all ranks draw the same numbers from their global generators; from then on, different ones.

    So what a script splits or shuffles at its beginning is the same on all ranks. Rank 0 draws what a single process
    would.

    Args:
        seed: the same on all ranks; if None, nothing is seeded.
        rank: this rank.
    """

    def __init__(self, seed: int | None, rank: int) -> None:
        self._own_seed = None if seed is None or rank == 0 else seed + rank
        if seed is not None:
            seed_generators(seed)

    def end(self) -> None:
        """From now on, this rank draws different numbers from the others. A second call does nothing."""
        if self._own_seed is not None:
            seed_generators(self._own_seed)
            self._own_seed = None


class RandomStream:
    """A separate stream of random numbers for the global generators of Python, torch (CPU) and numpy.

    Code within `active()` draws from this stream; outside, the global generators continue as if nothing had been drawn.
    The generators of GPUs are not changed, nor numpy's if numpy is not imported or is older than 1.24.
    """

    def __init__(self) -> None:
        self._seed = 0
        self._python: tuple[Any, ...] = ()
        self._torch: Any = None
        self._numpy: Any = None

    @contextlib.contextmanager
    def active(self, seed: int | None = None, *, continued: bool = False) -> Iterator[None]:
        """Draw from this stream within the block.

        Args:
            seed: start the stream from this seed; None continues where the last block has ended.
            continued: whether a later block will continue from the end of this one; costs 15 µs.
        """
        outside = random.getstate(), torch.default_generator.get_state()
        if seed is None:
            random.setstate(self._python)
            torch.default_generator.set_state(self._torch)
        else:
            self._seed = seed
            random.seed(seed)
            torch.default_generator.manual_seed(seed)
        try:
            with self._numpy_active(anew=seed is not None):
                yield
        finally:
            if continued:
                self._python, self._torch = random.getstate(), torch.default_generator.get_state()
            random.setstate(outside[0])
            torch.default_generator.set_state(outside[1])

    @contextlib.contextmanager
    def _numpy_active(self, *, anew: bool) -> Iterator[None]:
        """Replace the generator itself: reading and writing its state takes 40 times as long."""
        numpy_random: Any = sys.modules.get("numpy.random")
        if not hasattr(numpy_random, "set_bit_generator"):
            yield
            return
        outside = numpy_random.get_bit_generator()
        anew = anew or self._numpy is None
        self._numpy = self._numpy or numpy_random.MT19937()
        numpy_random.set_bit_generator(self._numpy)
        if anew:
            numpy_random.seed(self._seed % 2**32)
        try:
            yield
        finally:
            numpy_random.set_bit_generator(outside)


def random_states() -> dict[str, Any]:
    """The states of this process's generators, as tensors, numbers and strings."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        name, keys, *rest = numpy_random.get_state()
        states["numpy"] = (name, torch.tensor(keys.tolist()), *rest)
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    """Set this process's generators to the states that `random_states` returned."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None and "numpy" in states:
        name, keys, *rest = states["numpy"]
        numpy_random.set_state((name, keys.tolist(), *rest))
