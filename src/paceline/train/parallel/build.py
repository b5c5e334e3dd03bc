"""Models that are made without memory for their parameters, which get their numbers where they are needed.

Within `Deferred`, a large tensor is made on the meta device, and what is done to it is noted, with the state of the
random numbers. `Deferred.fill` does it again for some tensors, with memory. So these have the numbers that they would
have without it, whatever else is filled, when and in which order.
"""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.train.group.sharded import is_dtensor

from .errors import NotBuilt
from .nested import mapped, tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from paceline.train.torch_types import Arguments

    from .weights import Weights

_LARGE = 1 << 10  # numbers of a tensor from which on it gets no memory

_Drawn = tuple[torch.Generator, torch.Tensor]


class _Empty(NamedTuple):
    """A tensor without memory. It is not kept itself: views keep the tensors that they are of.

    Attributes:
        storage: keeps its identity as long as this is there.
    """

    storage: torch.UntypedStorage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: torch.Tensor) -> _Empty:
        """What a tensor is."""
        return _Empty(
            tensor.untyped_storage(), tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset())
        )

    def within(self, memory: Mapping[int, torch.UntypedStorage]) -> torch.Tensor:
        """The tensor with memory."""
        made = torch.empty(0, dtype=self.dtype)
        return made.set_(memory[self.storage._cdata], self.offset, self.size, self.stride)


@dataclass(frozen=True)
class _Call:
    """A call that was noted.

    Attributes:
        reads: the storages of its tensors on the meta device.
        writes: those that it changes or makes.
        drawn: the generator of its random numbers, and the state of that before the call; None if it draws none.
    """

    function: Any
    given: Arguments
    result: Any
    reads: frozenset[int]
    writes: frozenset[int]
    drawn: _Drawn | None


class Unfilled(torch.Tensor):
    """A tensor without memory that says that it is on the CPU: torch leaves those of the meta device as they are."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch documents it
    is_meta = False
    device = torch.device("cpu")


class Deferred(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Makes large tensors without memory, and notes what is done to them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[_Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """See `TorchDispatchMode`."""
        kwargs = dict(kwargs or {})
        given = list(tensors_in((args, kwargs)))
        if not given:
            makes = any(argument.name == "device" for argument in func._schema.arguments)
            if not makes or torch.device(kwargs.get("device") or "cpu").type != "cpu":
                return func(*args, **kwargs)
            made, drawn = _drawing(func, (args, {**kwargs, "device": "meta"}))
            if not isinstance(made, torch.Tensor) or made.numel() < _LARGE:
                return func(*args, **kwargs)
            kept = args, {**kwargs, "device": torch.device("cpu")}
            return self._noted(func, kept, kept, made, drawn)
        if not any(isinstance(each, Unfilled) for each in given):
            return func(*args, **kwargs)
        if torch.device(kwargs.get("device") or "cpu").type == "cpu" and self._goes_without(func, (args, kwargs)):
            options = {**kwargs, **({"device": torch.device("meta")} if kwargs.get("device") is not None else {})}
            kept = mapped(args, _kept), mapped(kwargs, _kept)  # before the call, which may change shapes
            try:
                plain = (lambda each: each) if torch.Tag.inplace_view in func.tags else _on_meta
                result, drawn = _drawing(func, mapped((args, options), plain))
            except (RuntimeError, NotImplementedError):  # it depends on numbers
                pass
            else:
                return self._noted(func, (args, kwargs), kept, result, drawn)
        return func(*mapped(args, self._filled), **mapped(kwargs, self._filled))

    def _goes_without(self, func: Any, given: Arguments) -> bool:
        """Whether a call returns tensors, and changes only such as have no numbers yet."""
        changed = _changed(func, given)
        kinds = [str(each.type) for each in func._schema.returns]
        return all("Tensor" in kind for kind in kinds) and all(isinstance(each, Unfilled) for each in changed)

    def _filled(self, value: Any) -> Any:
        return self.fill([value])[0] if isinstance(value, Unfilled) else value

    def _noted(self, func: Any, given: Arguments, kept: Arguments, result: Any, drawn: _Drawn | None) -> Any:
        """Note a call, and draw the random numbers that it would have drawn."""
        if drawn is not None:
            args, kwargs = mapped(given, _with_memory)
            func(*args, **kwargs)
        changed = _changed(func, given)
        reads = frozenset(_storage(each) for each in tensors_in(given) if isinstance(each, Unfilled))
        writes = frozenset(map(_storage, (*changed, *tensors_in(result))))
        made = mapped(result, _Empty.of)
        self._calls.append(_Call(func, kept, made, reads, writes, drawn))
        if len(changed) == 1 and isinstance(result, torch.Tensor) and _storage(result) == _storage(changed[0]):
            return changed[0]
        return mapped(result, lambda each: each.as_subclass(Unfilled))

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor was made within this."""
        return any(_storage(tensor) in call.writes for call in self._calls)

    def fill(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors with numbers, in place of some without."""
        tensors = list(tensors)
        needed = {_storage(each) for each in tensors}
        calls = []
        for call in reversed(self._calls):
            if needed & call.writes:
                needed |= call.reads
                calls.append(call)
        memory: dict[int, torch.UntypedStorage] = {}

        def real(value: Any) -> Any:
            return mapped(value, lambda each: each.within(memory), _Empty)

        with torch.no_grad():
            for call in reversed(calls):
                before = None
                if call.drawn is not None:
                    before = call.drawn[0].get_state()
                    call.drawn[0].set_state(call.drawn[1])
                args, kwargs = real(call.given)
                result = call.function(*args, **kwargs)
                if call.drawn is not None and before is not None:
                    call.drawn[0].set_state(before)
                for noted, made in zip(tensors_in(call.result, _Empty), tensors_in(result), strict=True):
                    memory.setdefault(noted.storage._cdata, made.untyped_storage())
            return [_Empty.of(each).within(memory) for each in tensors]


# -- models ------------------------------------------------------------------------------------------------------------


class Built:
    """What was made within one `run.build`."""

    def __init__(self, weights: Weights | None) -> None:
        self.deferred, self._weights = Deferred(), weights
        self._of_model: weakref.WeakKeyDictionary[torch.nn.Module, Weights] = weakref.WeakKeyDictionary()

    def begin(self, model: torch.nn.Module, weights: Weights) -> None:
        """Let a model get these weights when it is filled."""
        self._of_model[model] = weights

    def fill(self, part: torch.nn.Module, model: torch.nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Give the parameters and buffers of a part of a model their numbers; returns the former and the new ones."""
        owners: dict[int, list[tuple[str, torch.nn.Module, str]]] = {}
        for prefix, owner in model.named_modules():
            for name, each in (*owner._parameters.items(), *owner._buffers.items()):
                if each is not None:
                    owners.setdefault(id(each), []).append((f"{prefix}.{name}" if prefix else name, owner, name))
        here = (*part.parameters(), *part.buffers())
        found = {id(each): each for each in here if not is_dtensor(each)}  # which a unit within it has become
        new: dict[int, torch.Tensor] = {}
        weights = self._of_model.get(model, self._weights)
        for key, each in found.items() if weights is not None else ():
            given = [weights.get(name, each) for name, _, _ in owners[key]]  # type: ignore[union-attr]
            if any(it is not None for it in given):
                new[key] = next(it for it in given if it is not None)
        rest = [each for key, each in found.items() if isinstance(each, Unfilled) and key not in new]
        new |= {id(each): made for each, made in zip(rest, self.deferred.fill(rest), strict=True)}
        replaced: list[tuple[torch.Tensor, torch.Tensor]] = []
        for key, made in new.items():
            former = found[key]
            if not isinstance(former, Unfilled):
                with torch.no_grad():
                    former.copy_(made)
                continue
            is_parameter = isinstance(former, torch.nn.Parameter)
            now = torch.nn.Parameter(made, former.requires_grad) if is_parameter else made
            for _, owner, name in owners[key]:
                setattr(owner, name, now)
            replaced.append((former, now))
        return replaced


class Builds:
    """All of a run."""

    def __init__(self) -> None:
        self._all: list[Built] = []

    @contextlib.contextmanager
    def build(self, weights: Weights | None) -> Iterator[None]:
        """Make models without memory within this block."""
        built = Built(weights)
        self._all.append(built)
        with built.deferred:
            yield

    def of(self, module: torch.nn.Module) -> Built | None:
        """What a model was made within; None if it has all its numbers.

        Raises:
            NotBuilt: it has tensors without numbers, and was made elsewhere.
        """
        every = dict((*module.named_parameters(), *module.named_buffers()))
        empty = {name: each for name, each in every.items() if isinstance(each, Unfilled) or each.is_meta}
        for built in self._all:
            if empty and all(map(built.deferred.knows, empty.values())):
                return built
        divided = next((name for name, each in every.items() if empty and is_dtensor(each)), None)
        if divided is not None:
            raise NotBuilt(
                f"{divided} of {type(module).__name__} was divided among ranks before the model has its numbers; use "
                "Strategy(shard=…, tensor=…), or make the model without run.build"
            )
        if empty:
            raise NotBuilt(
                f"{next(iter(empty))} of {type(module).__name__} is on the meta device, and so has no numbers; make "
                "the whole model within `with run.build():`"
            )
        return None


def _kept(value: Any) -> Any:
    return _Empty.of(value) if isinstance(value, Unfilled) else value


def _drawing(func: Any, given: Arguments) -> tuple[Any, _Drawn | None]:
    """The result of a call without memory, and where its random numbers begin, which are not drawn yet."""
    args, kwargs = given
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return func(*args, **kwargs), None
    generator = kwargs.get("generator") or torch.default_generator
    state = generator.get_state()
    result = func(*args, **kwargs)
    generator.set_state(state)  # on the meta device, some calls draw, and others do not
    return result, (generator, state)


def _changed(func: Any, given: Arguments) -> list[torch.Tensor]:
    """The tensors that a call changes."""
    (args, kwargs), kinds = given, func._schema.arguments
    named = {**dict(zip((each.name for each in kinds), args, strict=False)), **kwargs}
    return list(tensors_in([named.get(it.name) for it in kinds if it.alias_info and it.alias_info.is_write]))


def _on_meta(value: Any) -> Any:
    """A tensor of the meta device that shares its storage with one without memory."""
    if isinstance(value, Unfilled):
        return value.as_subclass(torch.Tensor)
    return torch.empty_like(value, device="meta") if isinstance(value, torch.Tensor) else value


def _with_memory(value: Any) -> Any:
    return torch.empty_like(_on_meta(value), device="cpu") if isinstance(value, Unfilled) else value


def _storage(tensor: torch.Tensor) -> int:
    found: int = tensor.untyped_storage()._cdata
    return found
