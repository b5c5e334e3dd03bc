"""Random numbers: separate streams for a piece of work, and the states of the process's global generators."""

from __future__ import annotations

import array
import hashlib
import importlib
import random
import sys
from typing import TYPE_CHECKING, Any, TypedDict

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


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
    """

    def __init__(self, seed: int | None) -> None:
        self._seed, self.have_ended = seed, False
        if seed is not None:
            seed_generators(seed)

    def end(self, rank: int) -> None:
        """From now on, ranks draw different numbers, by their `rank`. A second call does nothing."""
        if self._seed is not None and rank > 0 and not self.have_ended:
            seed_generators(self._seed + rank)
        self.have_ended = True


class RandomStream:
    """A separate stream of random numbers for the global generators of Python, torch (CPU) and numpy.

    Code within `active()` draws from this stream; outside, the global generators continue as if nothing had been drawn.
    The generators of GPUs are not changed, nor numpy's if numpy is not imported or is older than 1.24.
    """

    def __init__(self) -> None:
        self.seed = 0
        self.python: tuple[Any, ...] = ()
        self.torch: Any = None
        self.numpy: Any = None

    def active(self, seed: int | None = None, *, continued: bool = False) -> _Active:
        """Draw from this stream within the block: from `seed`, or from where the last one has ended.

        `continued` is whether a later block will continue from the end of this one; it costs 15 µs.
        """
        return _Active(self, seed, continued)


class _Active:
    """A block in which a stream is active. It is entered for each batch, so it is short."""

    __slots__ = ("_continued", "_numpy", "_python", "_seed", "_stream", "_torch")

    def __init__(self, stream: RandomStream, seed: int | None, continued: bool) -> None:
        self._stream, self._seed, self._continued = stream, seed, continued

    def __enter__(self) -> None:
        stream, seed, generator = self._stream, self._seed, torch.default_generator
        self._python, self._torch = random.getstate(), generator.get_state()
        if seed is None:
            random.setstate(stream.python)
            generator.set_state(stream.torch)
        else:
            stream.seed = seed
            random.seed(seed)
            generator.manual_seed(seed)
        self._numpy = None
        if (module := _numpy_random()) is not None:
            # The generator itself is replaced: to read and write its state takes 40 times as long.
            self._numpy = module.get_bit_generator()
            is_new = stream.numpy is None
            stream.numpy = stream.numpy or module.MT19937()
            module.set_bit_generator(stream.numpy)
            if is_new or seed is not None:
                module.seed(stream.seed % 2**32)

    def __exit__(self, *_: object) -> None:
        generator = torch.default_generator
        if self._continued:
            self._stream.python, self._stream.torch = random.getstate(), generator.get_state()
        random.setstate(self._python)
        generator.set_state(self._torch)
        if self._numpy is not None:
            sys.modules["numpy.random"].set_bit_generator(self._numpy)


def _numpy_random() -> Any:
    """The module, if numpy is imported, which imports it when it is first used; None if its generator is fixed."""
    module: Any = sys.modules.get("numpy.random")
    if module is None and "numpy" in sys.modules:
        module = importlib.import_module("numpy.random")
    return module if hasattr(module, "set_bit_generator") else None


class RandomStates(TypedDict, total=False):
    """The states of a process's generators; those of GPUs and of numpy only where it uses them."""

    python: tuple[int, torch.Tensor, float | None]
    torch: torch.Tensor
    cuda: torch.Tensor
    numpy: tuple[Any, ...]


def random_states() -> RandomStates:
    """The states of this process's generators, as tensors, numbers and strings."""
    version, numbers, gauss = random.getstate()
    # A tensor is copied and saved in a tenth of the time of a tuple.
    states: RandomStates = {"python": (version, _tensor(numbers), gauss), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        name, keys, *rest = numpy_random.get_state()
        states["numpy"] = (name, _tensor(keys.tolist()), *rest)
    return states


def _tensor(numbers: Sequence[int]) -> torch.Tensor:
    """A tensor of integers, in a tenth of the time of `torch.tensor`."""
    return torch.frombuffer(array.array("q", numbers), dtype=torch.int64)


def set_random_states(states: RandomStates) -> None:
    """Set this process's generators to the states that `random_states` returned."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None and "numpy" in states:
        name, keys, *rest = states["numpy"]
        numpy_random.set_state((name, keys.tolist(), *rest))
