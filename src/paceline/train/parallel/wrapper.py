"""The module that takes the place of a user's model in the training loop."""

from __future__ import annotations

import collections
import contextlib
import copy
from typing import TYPE_CHECKING, Any

import torch

from .precision import without_hooks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paceline.train.torch_types import Arguments

_COMPILED = "_orig_mod"  # under this name, what torch.compile returns for a module has that module
# The dicts of a module that the wrapper shares with the module inside.
_SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_load_state_dict_post_hooks")


class ParallelModel(torch.nn.Module):
    """A user's model whose gradients the ranks exchange. It is used in the same way with any number of ranks.

    Everything but the forward pass is that of the user's module: attributes and methods, parameters and their names,
    and the state_dict, also if the wrapper is part of another module. `isinstance` finds the user's class. A copy or a
    pickle of it is one of the user's module.

    Attributes:
        module: the user's module.
    """

    module: torch.nn.Module

    def __init__(
        self,
        module: torch.nn.Module,
        forward: Callable[[Arguments], Any],
        no_sync: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        super().__init__()
        own = self.__dict__
        del own["training"]
        own.update({name: getattr(module, name) for name in _SHARED})
        own.update(module=module, _forward_together=forward, _no_sync=no_sync)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, and prepare to exchange gradients if there will be some."""
        return self._forward_together((args, kwargs))

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Within this block, gradients are accumulated and not exchanged, as in DistributedDataParallel."""
        return self._no_sync()  # type: ignore[no-any-return]

    # -- the user's module ---------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state_dict of the module."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the module."""
        return self.module.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.module._load_from_state_dict(*args, **kwargs)  # as part of another module

    def train(self, mode: bool = True) -> ParallelModel:
        """Set the mode of the module."""
        self.module.train(mode)
        return self

    def apply(self, fn: Callable[[torch.nn.Module], Any]) -> ParallelModel:
        """Call a function with each module within the user's module, and with that itself."""
        self.module.apply(fn)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> ParallelModel:
        self.module._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def __getattr__(self, name: str) -> Any:
        if "module" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        is_own = name in self.__dict__ or (name != "forward" and hasattr(torch.nn.Module, name))
        if is_own or "module" not in self.__dict__:
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.module, name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *dir(self.module)})

    def __getitem__(self, index: Any) -> Any:
        return self.module[index]  # type: ignore[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.module)  # type: ignore[call-overload,no-any-return]

    def __len__(self) -> int:
        return len(self.module)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return True

    def __contains__(self, key: object) -> bool:
        return key in self.module  # type: ignore[operator]

    def __repr__(self) -> str:
        return repr(self.module)

    @property  # type: ignore[misc]  # not the class of this object, for a reader such as pickle and `isinstance`
    def __class__(self) -> type:
        """The class of the module."""
        return type(self.module)

    # -- copies --------------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Module:
        return copy.deepcopy(self.module, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        made = self.module.__reduce_ex__(protocol)
        if not isinstance(made, tuple):
            return made
        function, args, state, *more = made if len(made) > 2 else (*made, None)
        return (function, args, without_hooks(state) if isinstance(state, dict) else state, *more)


class OwnNames:
    """The state of a module under its own names: without those that `torch.compile` adds to it or to its parts."""

    def __init__(self, module: torch.nn.Module, stateful: Any) -> None:
        self._module, self._stateful = module, stateful

    @staticmethod
    def are_needed(module: torch.nn.Module) -> bool:
        """Whether the module or a part of it is compiled as a module of its own."""
        return any(_COMPILED in part._modules for part in module.modules())

    def state_dict(self) -> Any:
        """The state."""
        return _renamed(self._stateful.state_dict(), own_name)

    def load_state_dict(self, state: Any) -> Any:
        """Load a state, of the module compiled or not."""
        here = self._module.state_dict()
        names = {own_name(name): name for name in (*getattr(here, "_metadata", ()), *here)}
        return self._stateful.load_state_dict(_renamed(state, lambda name: names.get(own_name(name), name)))


def _renamed(state: Any, rename: Callable[[str], str]) -> Any:
    """A state_dict under other names."""
    new = collections.OrderedDict((rename(name), value) for name, value in state.items())
    if (metadata := getattr(state, "_metadata", None)) is not None:
        new._metadata = {rename(name): value for name, value in metadata.items()}  # type: ignore[attr-defined]
    return new


def own_name(name: str) -> str:
    """The name of a parameter without what `torch.compile` adds to it."""
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The user's module of a model that was set up, and maybe compiled later. Another module is returned itself."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"unwrap takes a model, not {type(model).__name__}")
    inner = getattr(model, _COMPILED, None)
    if isinstance(inner, ParallelModel):
        model = inner
    return model.module if isinstance(model, ParallelModel) else model
