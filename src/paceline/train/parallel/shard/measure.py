"""What the training of a model takes, measured without memory and without computing, on stand-ins of its tensors."""

from __future__ import annotations

import contextlib
import copy
import logging
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode  # torch's docs name it: torch.compiler_fake_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.train.data.random_state import random_states, set_random_states
from paceline.train.parallel.nested import mapped, tensors_in
from paceline.train.parallel.units import compute_again, scales

from .choice import Passes, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from paceline.train.torch_types import Arguments


class Memory(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Counts the bytes of tensors that are made within it.

    Attributes:
        now: bytes that are there.
        most: the most that there were at a time.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._known: dict[int, int] = {}  # bytes of storages

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """See `TorchDispatchMode`."""
        for tensor in tensors_in((args, kwargs)):
            self._see(tensor, counts=False)
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            self._see(tensor, counts=True)
        return result

    def _see(self, tensor: torch.Tensor, *, counts: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = storage.nbytes() if counts else 0
        self.now += self._known[key]
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self._known.pop(key, 0)


def tensors_of(module: torch.nn.Module, units: Collection[str]) -> list[Tensor]:
    """The parameters of a model."""
    found = []
    for name, parameter in module.named_parameters():
        unit = next((number for number, each in enumerate(units) if name.startswith(f"{each}.")), -1)
        rows = parameter.shape[0] if parameter.dim() else 1
        found.append(Tensor(rows, parameter.nbytes // max(rows, 1), parameter.requires_grad, unit))
    return found


class Twin:
    """Stand-ins of a model and its optimizers, whose tensors have no numbers."""

    def __init__(self, module: torch.nn.Module, device: torch.device) -> None:
        self._mode, self._device, self._module = FakeTensorMode(allow_non_fake_inputs=True), device, module
        self._parameters: dict[int, torch.Tensor] = {}
        with self._mode:
            for each in module.parameters():
                made = torch.empty(each.shape, dtype=each.dtype, device=device)
                self._parameters[id(each)] = torch.nn.Parameter(made, each.requires_grad)
            self._buffers = {
                id(each): torch.empty(each.shape, dtype=each.dtype, device=device) for each in module.buffers()
            }
        if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
            self._parameters.clear()  # a copy of it has the parameters of the original

    def passes(self, given: Arguments, units: Collection[str], precision: torch.dtype | None) -> Passes:
        """What a pass takes, with these arguments.

        Raises:
            Exception: the model does not run without numbers.
        """
        if not self._parameters:
            raise TypeError("it is a model of TorchScript, or has no parameters")
        log, states = logging.getLogger(FakeTensorMode.__module__), random_states()
        was_quiet, log.disabled = log.disabled, True
        try:
            return self._passes(given, units, precision, trains=True)
        except Exception:  # as with batch norm and a last batch of one sample in an evaluation
            return self._passes(given, units, precision, trains=self._module.training)
        finally:
            log.disabled = was_quiet
            set_random_states(states)

    def _passes(self, given: Arguments, units: Collection[str], precision: Any, *, trains: bool) -> Passes:
        found: list[int] = []
        for is_sharded in (False, True):
            if is_sharded and (precision is None or not units):
                found += found
                continue
            for again in (False, True):
                if again and not units:
                    found += found
                    continue
                module = self._copy(units, again=again, precision=precision if is_sharded else None).train(trains)
                found.append(self._pass(module, given, precision))
            found[-1] = min(found[-2:])
        return Passes(*found)

    def _copy(self, units: Collection[str], *, again: bool, precision: torch.dtype | None) -> torch.nn.Module:
        """The model of stand-ins: with units that are computed again, or with parameters as they are gathered."""
        # The original would not be the same after a pass: some modules count them.
        module = copy.deepcopy(self._module, {**self._parameters, **self._buffers})
        for part in module.modules():
            for hooks in (part._forward_pre_hooks, part._forward_hooks):
                for key in [key for key, hook in hooks.items() if not _is_of_torch(hook)]:
                    del hooks[key]  # the script's own may keep what they see
        for unit in map(module.get_submodule, units):
            if again:
                compute_again(unit)
            kept = set(scales(unit))
            for owner in unit.modules() if precision is not None else ():
                for name, parameter in owner._parameters.items():
                    if parameter is not None and parameter not in kept:
                        owner._parameters[name] = torch.nn.Parameter(parameter.to(precision), parameter.requires_grad)
        return module

    def _pass(self, module: torch.nn.Module, given: Arguments, precision: torch.dtype | None) -> int:
        """The most bytes of a pass, without gradients of parameters."""
        autocast: Any = contextlib.nullcontext()
        if precision is not None:
            autocast = torch.autocast(self._device.type, precision)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        # The mode is not active: what code makes of no stand-in has numbers, as it may keep that for later passes.
        with torch.enable_grad(), Memory() as memory:
            hooks = [
                parameter.register_post_accumulate_grad_hook(_forget)  # type: ignore[no-untyped-call]
                for parameter in trained
            ]
            try:
                args, kwargs = mapped(given, self._stand_in)
                with autocast:
                    returned = module(*args, **kwargs)
                loss = _loss(returned)
                del returned
                if loss.requires_grad:  # and not those of others, such as parameters outside of the model
                    loss.backward(inputs=trained)  # type: ignore[no-untyped-call]
                most: int = memory.most
                return most
            finally:
                for hook in hooks:
                    hook.remove()

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._mode:
            made = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        return made.requires_grad_(tensor.requires_grad)

    def optimizer(self, optimizer: torch.optim.Optimizer) -> tuple[int, int] | None:
        """Bytes of the state of an optimizer, and the most that a step takes beside; None if it cannot be measured."""
        groups = [
            {**group, "params": [self._parameters[id(p)] for p in group["params"] if id(p) in self._parameters]}
            for group in optimizer.param_groups
        ]
        kind = type(optimizer)
        step: Callable[..., Any] = getattr(kind.step, "__wrapped__", kind.step)  # without hooks
        try:
            with self._mode:
                twin = kind.__new__(kind)
                twin.__dict__.update(copy.copy(optimizer.__dict__))
                twin.__dict__.pop("step", None)
                twin.param_groups, twin.state = groups, type(optimizer.state)(dict)
                for parameter in self._parameters.values():
                    parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
                with Memory() as memory:
                    step(twin)
                    kept = {
                        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
                        for t in tensors_in([*twin.state.values()])
                    }
                state = sum(kept.values())
                return state, max(memory.most - state, 0)
        except Exception:  # it is the user's class, and may need numbers
            return None
        finally:
            for parameter in self._parameters.values():
                parameter.grad = None


def _is_of_torch(hook: Any) -> bool:
    return str(getattr(hook, "__module__", None) or type(hook).__module__).split(".")[0] == "torch"


def _forget(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _loss(returned: Any) -> torch.Tensor:
    """Something like the loss of what a model has returned: a cross entropy takes as much as the softmax."""
    total: Any = 0.0
    for each in tensors_in(returned):
        if each.requires_grad:
            total = total + (torch.log_softmax(each.float(), -1) if each.dim() else each).sum()
    if not isinstance(total, torch.Tensor):
        return torch.zeros(())
    return total
