"""A model's own forward pass with the blocks of one stage: others are passed over, and it ends behind the last one."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from paceline.train.torch_types import Arguments

_PRIME = 1_000_003  # far more than there are microbatches
_LOOKS = {"__get__", "size", "dim", "ndimension", "numel", "__len__", "is_floating_point", "get_device"}  # no numbers
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Between(NamedTuple):
    """What one stage passes to the next: a tensor, or a tuple of so many that begins with it and has None elsewhere."""

    tensor: torch.Tensor
    length: int | None = None

    @classmethod
    def of(cls, value: Any, block: str) -> Between:
        """That of what a block has returned."""
        if isinstance(value, torch.Tensor):
            return cls(value)
        rest = value[1:] if isinstance(value, tuple) else [value]
        if isinstance(value, tuple) and value and isinstance(value[0], torch.Tensor) and rest == (None,) * len(rest):
            return cls(value[0], len(value))
        raise TypeError(
            f"{block} returns {_described(value)}, and pipeline= passes on one tensor from block to block: return that "
            "alone, or use shard=True"
        )

    def as_returned(self) -> Any:
        """What a block returns."""
        return self.tensor if self.length is None else (self.tensor, *[None] * (self.length - 1))


class PassedOver(torch.Tensor):
    """The result of a block that another rank has: it goes to the next block, and cannot be used otherwise."""

    @classmethod
    def __torch_function__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See torch."""
        name = getattr(func, "__name__", "")
        if name in _LOOKS:
            with torch._C.DisableTorchFunctionSubclass():
                found = func(*args, **(kwargs or {}))
            if not isinstance(found, torch.Tensor):
                return found
        raise RuntimeError(
            "the result of a block is used by something other than the next block, or is changed in place: with "
            "pipeline=, blocks follow each other with nothing between them, and what is behind the last one has its "
            "result only; name others in units=, or use shard=True"
        )


class _Ended(Exception):  # not an error, but hooks that are always called are called for exceptions only
    """The pass has come to the end of this stage."""


class Blocks:
    """The blocks of a model, in the order in which its forward pass calls them, and those of this rank's stage.

    The forward pass itself is the script's. What is beside the blocks is computed by each stage that comes to it: what
    is before them by all, as blocks may have masks and positions of it.
    """

    def __init__(self, units: Sequence[tuple[str, torch.nn.Module]], own: range) -> None:
        self._names, self._own = [name for name, _ in units], own
        self._received: Between | None = None
        self._next = 0  # the block that is called next
        self._last: Between | None = None  # what the one before has returned
        self._is_within = self._is_again = False
        self._seed = 0
        self._units = [unit for _, unit in units]
        for number, (_, unit) in enumerate(units):
            run = functools.partial(self._compute, number, unit.forward) if number in own else self._pass_over
            unit.forward = functools.partial(run, number) if number not in own else run

    @property
    def is_last(self) -> bool:
        """Whether this stage has the last block."""
        return self._own.stop == len(self._names)

    def run(self, call: Callable[[], Any], received: Between | None, seed: int) -> Any:
        """Compute this stage's part of a forward pass.

        Args:
            call: calls the model.
            received: what the stage before has passed on; None in the first one.
            seed: of the random numbers before the blocks, which are the same on all stages.

        Returns:
            In the last stage what the model returns, in others what goes to the next one.
        """
        for name, unit in zip(self._names, self._units, strict=True):
            if any(getattr(unit, hooks) for hooks in _HOOKS):
                raise RuntimeError(
                    f"{name} has hooks, and with pipeline= it is not called on all ranks as it is alone: register them "
                    "on a module within it, or use shard=True"
                )
        self._received, self._next, self._last, self._seed = received, 0, None, seed
        self._is_within = True
        torch.manual_seed(seed)
        try:
            result = call()
        except _Ended:
            assert self._last is not None
            return self._last
        finally:
            self._is_within = False
            self._received = self._last = None  # they keep what a backward pass needs
        if self._next < len(self._names):
            raise RuntimeError(
                f"the forward pass has ended before {self._names[self._next]} was called: with pipeline=, it calls "
                "each of its blocks once, and lets exceptions of theirs through"
            )
        return result

    @contextlib.contextmanager
    def again(self, received: Between | None, seed: int) -> Iterator[None]:
        """Within this block, calls are those of a backward pass that computes again, as `torch.utils.checkpoint`."""
        self._received, self._seed, self._is_again = received, seed, True
        try:
            yield
        finally:
            self._received, self._is_again = None, False

    def kept_by_blocks(self) -> Iterator[str]:
        """Tensors with gradients that blocks of this stage keep as attributes."""
        for number in self._own:
            for name, part in self._units[number].named_modules():
                for key, value in vars(part).items():
                    if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                        yield f"{key} of {self._names[number]}{f'.{name}' if name else ''}"

    def _pass_over(self, number: int, *args: Any, **kwargs: Any) -> Any:
        """In place of a block that another rank has."""
        if not self._is_within:
            raise RuntimeError(
                f"{self._names[number]} is on another rank; with pipeline=, call the model, and not its blocks"
            )
        given = self._begin(number, (args, kwargs))
        length = self._received.length if self._received is not None else None
        with torch._C.DisableTorchFunctionSubclass():  # it may be one already
            self._last = Between(given.detach().as_subclass(PassedOver), length)
        return self._last.as_returned()

    def _compute(self, number: int, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._is_within:
            self._begin(number, (args, kwargs))
        elif not self._is_again:
            return compute(*args, **kwargs)
        if number == self._own.start:
            torch.manual_seed(self._seed + _PRIME * (number + 1))  # other numbers than those of other stages
            if self._received is not None:
                args, kwargs = _with_first((args, kwargs), self._received.tensor)
        if self._is_again and not self._is_within:
            return compute(*args, **kwargs)
        result = compute(*args, **kwargs)
        self._last = Between.of(result, self._names[number])
        if number == self._own.stop - 1 and not self.is_last:
            raise _Ended
        return result

    def _begin(self, number: int, given: Arguments) -> torch.Tensor:
        """Check that a block is called next, and with what the one before has returned, which is returned."""
        args, kwargs = given
        name, first = self._names[number], next(iter((*args, *kwargs.values())), None)
        if number != self._next:
            expected = self._names[self._next] if self._next < len(self._names) else "the end"
            raise RuntimeError(
                f"{name} was called where {expected} comes next: with pipeline=, the forward pass calls each of its "
                "blocks once, in their order; name others in units=, or use shard=True"
            )
        if not isinstance(first, torch.Tensor) or (self._last is not None and first is not self._last.tensor):
            raise RuntimeError(
                f"{name} is not called with what {self._names[number - 1] if number else 'is before it'} has returned "
                f"as its first argument, but with {_described(first)}: with pipeline=, blocks follow each other with "
                "nothing between them; name others in units=, or use shard=True"
            )
        self._next += 1
        return first


def _with_first(given: Arguments, new: Any) -> Arguments:
    args, kwargs = given
    if args:
        return (new, *args[1:]), kwargs
    return args, {**kwargs, next(iter(kwargs)): new}


def _described(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(type(each).__name__ for each in value) or 'nothing'}"
    return "another tensor" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
