"""States with models, optimizers, schedulers and samplers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypedDict

import torch

from paceline.horovod.common import elastic
from paceline.horovod.common.process import rank
from paceline.horovod.torch.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    check_whole,
)

from .sampler import ElasticSampler


class ObjectState(elastic.ObjectState):
    """A state of plain objects, given as named arguments, which become attributes."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(broadcast_object, rank, **kwargs)


class _Committed(TypedDict):
    """What was saved last: by handlers, and of other values."""

    handlers: dict[str, Any]
    objects: Any


class TorchState(elastic.ObjectState):
    """The state of a training.

    Args:
        model: a module.
        optimizer: an optimizer.
        kwargs: further modules, optimizers, schedulers, samplers and plain objects. All become attributes.

    Raises:
        TypeError: something is sharded.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        kwargs.update(model=model, optimizer=optimizer)
        for name, value in kwargs.items():
            check_whole(name, value)
        made = {name: _handler(value) for name, value in kwargs.items()}
        object.__setattr__(self, "_handlers", {name: handler for name, handler in made.items() if handler})
        for name, handler in self._handlers.items():
            object.__setattr__(self, name, handler.value)
        plain = {name: value for name, value in kwargs.items() if name not in self._handlers}
        super().__init__(broadcast_object, rank, **plain)

    _handlers: dict[str, StateHandler]

    def save(self) -> None:
        """Save everything in memory."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Return to what was saved last."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Give all ranks what rank 0 has, and save it.

        Raises:
            TypeError: something is sharded.
        """
        for name, handler in self._handlers.items():
            check_whole(name, handler.value)
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def reset(self) -> None:
        """Share out the samples anew."""
        for handler in self._handlers.values():
            handler.reset()

    def _committed(self) -> _Committed:
        """What was saved last, to be pickled."""
        return {"handlers": {name: it.saved for name, it in self._handlers.items()}, "objects": self._saved_state}

    def _take_committed(self, saved: _Committed) -> None:
        """Return to what `_committed` has returned, in this process or an earlier one."""
        for name, handler in self._handlers.items():
            handler.saved = saved["handlers"][name]
        self._saved_state = saved["objects"]
        self.restore()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._handlers:
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)


class StateHandler:
    """How one kind of object is saved, brought back and given to all ranks."""

    def __init__(self, value: Any) -> None:
        self.value = value  # the object
        self.saved: Any = None  # a copy of its state dict
        self.save()

    def save(self) -> None:
        """Save its state."""
        self.saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Return to the state that was saved last."""
        self.value.load_state_dict(copy.deepcopy(self.saved))

    def sync(self) -> None:
        """Give all ranks the state of rank 0."""
        state = self.value.state_dict()
        check_whole(f"the state of this {type(self.value).__name__}", state)
        self.value.load_state_dict(broadcast_object(state))
        self.save()

    def set_value(self, value: Any) -> None:
        """Put another object in its place."""
        self.value = value
        self.save()

    def reset(self) -> None:
        """Adapt to the new ranks."""


class ModelStateHandler(StateHandler):
    """For modules."""

    def sync(self) -> None:
        """Give all ranks the parameters and buffers of rank 0."""
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class OptimizerStateHandler(StateHandler):
    """For optimizers."""

    def sync(self) -> None:
        """Give all ranks the state of rank 0."""
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class SamplerStateHandler(StateHandler):
    """For samplers."""

    def reset(self) -> None:
        """Share out the samples anew."""
        self.value.reset()


_registry: list[tuple[type, Callable[[Any], StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, StateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, Callable[[Any], StateHandler]]]:
    """The kinds of objects that are handled, and how."""
    return _registry


def set_handler_registry(registry: list[tuple[type, Callable[[Any], StateHandler]]]) -> None:
    """Replace the kinds of objects that are handled."""
    global _registry  # noqa: PLW0603 - as in Horovod
    _registry = registry


def _handler(value: Any) -> StateHandler | None:
    return next((handler(value) for kind, handler in _registry if isinstance(value, kind)), None)
