"""Training that goes on after ranks fail, or come and go."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import tensorflow as tf

from paceline.horovod.common import elastic
from paceline.horovod.common.elastic import State
from paceline.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from paceline.horovod.common.process import rank
from paceline.horovod.torch.elastic import ObjectState
from paceline.horovod.torch.elastic.commits import run as _run

from .functions import broadcast_object, broadcast_variables

__all__ = ["ObjectState", "State", "TensorFlowKerasState", "TensorFlowState", "run"]

T = TypeVar("T")


def run(func: Callable[..., T]) -> Callable[..., T]:
    """Call `func(state, …)` until it returns, on whichever ranks there are; see `horovod.torch.elastic.run`."""

    @functools.wraps(func)
    def translated(*args: Any, **kwargs: Any) -> T:
        try:
            return func(*args, **kwargs)
        except tf.errors.OpError as error:  # a collective has failed in a graph
            if isinstance(error, HorovodInternalError):
                raise
            for kind in (HorovodInternalError, HostsUpdatedInterrupt):
                if f"{kind.__name__}:" in error.message:
                    raise kind(error.message) from error
            raise

    return _run(translated)


class TensorFlowState(elastic.ObjectState):
    """The state of a training.

    Args:
        variables: of TensorFlow or Keras; the global ones of the graph by default.
        session: of `tf.compat.v1`, in whose graph they are.
        kwargs: plain objects, which become attributes.
    """

    def __init__(self, variables: Iterable[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        self._given: Any = None if variables is None else list(variables)
        self._session = session
        super().__init__(broadcast_object, rank, **kwargs)
        self._saved: list[Any] = []
        self.save()

    def _variables(self) -> list[Any]:
        return list(tf.compat.v1.global_variables() if self._given is None else self._given)

    def _values(self) -> list[Any]:
        if self._session is not None:
            return list(self._session.run(self._variables()))
        return [tf.convert_to_tensor(variable).numpy() for variable in self._variables()]

    def save(self) -> None:
        """Save everything in memory."""
        self._saved = self._values()
        super().save()

    def restore(self) -> None:
        """Return to what was saved last."""
        for variable, value in zip(self._variables(), self._saved, strict=True):
            if self._session is not None:
                variable.load(value, self._session)
            else:
                variable.assign(value)
        super().restore()

    def sync(self) -> None:
        """Give all ranks what rank 0 has, and save it."""
        if self._session is not None:
            with self._session.graph.as_default():
                self._session.run(broadcast_variables(self._variables(), 0))
        else:
            broadcast_variables(self._variables(), 0)
        self._saved = self._values()
        super().sync()

    def _committed(self) -> Any:
        return self._saved, self._saved_state

    def _take_committed(self, saved: Any) -> None:
        self._saved, self._saved_state = saved
        self.restore()


class TensorFlowKerasState(TensorFlowState):
    """The state of a training with Keras.

    Args:
        model: of Keras, built; its optimizer is built if it has one.
        optimizer: that of the model by default.
        backend: accepted.
        kwargs: plain objects, which become attributes.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        self.model = model
        self.optimizer = optimizer or getattr(model, "optimizer", None)
        if self.optimizer is not None and not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)
        super().__init__(None, None, **kwargs)

    def _variables(self) -> list[Any]:
        return [*self.model.weights, *(self.optimizer.variables if self.optimizer is not None else ())]
