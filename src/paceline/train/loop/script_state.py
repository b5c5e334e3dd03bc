"""The script's own values in checkpoints: `Run.state`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from paceline.train.data.to_device import to_device
from paceline.train.group import sharded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from paceline.train.torch_types import StateDict

log = logging.getLogger("paceline")


class State:
    """Values of a script, as attributes. Every checkpoint holds them, and a resume sets them.

    Each rank has values of its own. They are numbers, strings, tensors, None, or lists, tuples and dicts of these.
    """

    def __init__(self, **values: Any) -> None:
        for name, value in values.items():
            if name.startswith("_"):
                raise ValueError(f"run.state({name}=…): a name must not begin with an underscore")
            self.__dict__[name] = value

    if TYPE_CHECKING:  # the names are the script's

        def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dict__:
            raise AttributeError(f"{name} is not a value of this run.state; name it there: run.state({name}=…)")
        self.__dict__[name] = value

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{name} cannot be deleted: checkpoints hold it; set it to None")

    def __repr__(self) -> str:
        return f"State({', '.join(f'{name}={value!r}' for name, value in self.__dict__.items())})"


class SavedState:
    """The part of a checkpoint with the values of a `State`, on each rank."""

    def __init__(self, state: State, device: torch.device) -> None:
        self._state, self._device = state, device

    def state_dict(self) -> StateDict:
        """The values, and the names of those with tensors on a device."""
        values = dict(vars(self._state))
        return {"values": values, "on_device": [name for name, value in values.items() if _is_on_device(value)]}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Set the values. A value that was not saved keeps its first value."""
        values, own = saved["values"], vars(self._state)
        for names, what in ((own.keys() - values, "is not in the checkpoint, and keeps its first value"),
                            (values.keys() - own, "is only in the checkpoint, and is not set")):  # fmt: skip
            for name in sorted(names):
                log.warning("run.state: %s %s", name, what)
        for name in own.keys() & values:
            value = values[name]
            own[name] = to_device(value, self._device) if name in saved["on_device"] else value


def make_reshard(how: Callable[[Sequence[Any], int, int], Any] | str | None) -> Callable[..., StateDict]:
    """Return the function that makes a rank's values from those of another number of ranks."""
    if how is not None and how != "sum" and not callable(how):
        raise ValueError(f"reshard={how!r} is neither a function nor 'sum'")

    def reshard(states: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> StateDict:
        values = [dict(state["values"]) for state in states]
        if callable(how):
            own = how(values, rank, world_size)
        elif how == "sum":
            own = {name: _sum(name, [each[name] for each in values], rank) for name in values[0]}
        else:
            own = {name: _alike(name, [each[name] for each in values], world_size) for name in values[0]}
        return {"values": own, "on_device": states[0]["on_device"]}

    return reshard


def _sum(name: str, values: list[Any], rank: int) -> Any:
    """The sum on rank 0, and 0 on the others."""
    _check_whole(name, values)
    if not all(map(_is_number, values)):
        raise RuntimeError(f"run.state: {name} is not a number, so its values on {len(values)} ranks have no sum")
    total = sum(values[1:], start=values[0])
    return total if rank == 0 else total * 0


def _alike(name: str, values: list[Any], world_size: int) -> Any:
    _check_whole(name, values)
    if all(_same(values[0], value) for value in values[1:]):
        return values[0]
    raise RuntimeError(
        f"run.state: {name} differs between the {len(values)} ranks that saved it, so it is not known which values "
        f'{world_size} ranks continue with; pass reshard="sum" to run.state if its values are sums over the batches '
        f"of a rank, or a function, or continue with {len(values)} ranks"
    )


def _check_whole(name: str, values: list[Any]) -> None:
    found = sharded.in_state(values[0], name)
    if found is not None:
        raise RuntimeError(
            f"run.state: {found}, of which each of the {len(values)} ranks has saved its part; continue with "
            f"{len(values)} ranks, or keep whole tensors there: {name}.full_tensor()"
        )


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and value.dtype is not torch.bool
    return isinstance(value, (int, float, complex)) and not isinstance(value, bool)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _is_on_device(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.device.type != "cpu"
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return any(_is_on_device(each) for each in inner)
