"""Callbacks for `fit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from paceline.horovod.common.process import rank, size
from paceline.horovod.common.process_sets import ProcessSet, global_process_set
from paceline.horovod.tensorflow.functions import broadcast_variables
from paceline.horovod.tensorflow.mpi_ops import grouped_allreduce

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Gives all ranks the root's weights and optimizer after the first batch: then all of them have been made.

    Args:
        root_rank: the global rank whose they are.
        device: accepted.
        local_variables: those that stay as they are.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self._local = {id(one) for one in local_variables or ()}
        self._is_done = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast them once."""
        if not self._is_done:
            every = [*self.model.weights, *self.model.optimizer.variables]
            broadcast_variables([one for one in every if id(one) not in self._local], self.root_rank)
            self._is_done = True


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Averages the metrics of an epoch over all ranks, for the callbacks that follow in the list.

    Args:
        device: accepted.
        process_set: who takes part.
    """

    def __init__(self, device: str = "", process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        self._process_set = process_set

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replace the metrics by their averages."""
        if logs and self._process_set.included():
            names = sorted(logs)
            values = [tf.constant(float(logs[name]), tf.float64) for name in names]
            means = grouped_allreduce(values, process_set=self._process_set, name="metrics")
            logs.update({name: float(mean) for name, mean in zip(names, means, strict=True)})


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Multiplies the initial learning rate in some epochs.

    Args:
        initial_lr: the learning rate.
        multiplier: its factor; or a function of the epoch, which is a fraction if `staircase` is false.
        start_epoch: the first epoch in which this applies.
        end_epoch: the epoch before which it ends; None for never.
        staircase: whether it changes at the beginning of an epoch only.
        momentum_correction: accepted; the momentum of Keras 3's optimizers is a constant.
        steps_per_epoch: number of batches; as `fit` knows it by default.

    Raises:
        ValueError: without `staircase`, `fit` does not know the number of batches, and none is given.
    """

    def __init__(
        self, initial_lr: float, multiplier: float | Callable[[float], float], start_epoch: int = 0,
        end_epoch: int | None = None, staircase: bool = True, momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.initial_lr = initial_lr
        self.multiplier: Callable[[float], float] = multiplier if callable(multiplier) else lambda _: multiplier
        self.staircase = staircase or not callable(multiplier)
        self.steps_per_epoch = steps_per_epoch
        self._epochs = start_epoch, float("inf") if end_epoch is None else end_epoch
        self._epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Find out the number of batches."""
        self.steps_per_epoch = self.steps_per_epoch or self.params.get("steps")
        if not self.staircase and not self.steps_per_epoch:
            raise ValueError(f"{type(self).__name__} needs steps_per_epoch, which fit does not know for this data")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """An epoch begins."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the learning rate."""
        if self._epochs[0] <= self._epoch < self._epochs[1] and (batch == 0 or not self.staircase):
            fraction = 0.0 if self.staircase else batch / float(self.steps_per_epoch or 1)
            self.model.optimizer.learning_rate = self.initial_lr * self.multiplier(self._epoch + fraction)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Log the learning rate."""
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from that of one rank, `initial_lr` / size, to `initial_lr`.

    Source: Goyal et al., Accurate, Large Minibatch SGD, https://arxiv.org/abs/1706.02677.

    Args:
        initial_lr: the learning rate after the warm-up.
        warmup_epochs: its length.
        momentum_correction, steps_per_epoch: see `LearningRateScheduleCallback`.
        verbose: 1 prints a line at its end, on rank 0.
    """

    def __init__(
        self, initial_lr: float, warmup_epochs: int = 5, momentum_correction: bool = True,
        steps_per_epoch: int | None = None, verbose: int = 0,
    ) -> None:  # fmt: skip
        def multiplier(epoch: float) -> float:
            epoch += 1.0 / (self.steps_per_epoch or 1)  # the last batch has the whole learning rate
            return 1.0 / size() * (epoch * (size() - 1) / warmup_epochs + 1)

        super().__init__(initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Log the learning rate."""
        super().on_epoch_end(epoch, logs)
        if self.verbose and epoch == self._epochs[1] - 1 and rank() == 0:
            rate = float(self.model.optimizer.learning_rate)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """A `ModelCheckpoint` that keeps the best model; with a file on rank 0 alone, as scripts use it."""

    def __init__(self, filepath: Any = "best.keras", **options: Any) -> None:
        super().__init__(filepath, save_best_only=True, **options)
