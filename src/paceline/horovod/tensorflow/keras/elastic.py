"""Training with Keras that goes on after ranks fail, or come and go."""

from __future__ import annotations

from typing import Any

import keras

from paceline.horovod.tensorflow.elastic import TensorFlowKerasState, run

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]

KerasState = TensorFlowKerasState


class CommitStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Commits the state every `batches_per_commit` batches, and at the end of an epoch."""

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self._left = batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count a batch."""
        self._left -= 1
        if self._left == 0:
            self.on_epoch_end(0)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commit."""
        self._left = self.batches_per_commit
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps `state.batch`, the number of batches of this epoch, also over a restart within it."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._first = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Count on from the batches that were done."""
        self._first = self.state.batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count a batch."""
        self.state.batch = self._first + batch + 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """The next epoch begins with its first batch."""
        self.state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps `state.epoch`, the number of epochs of all calls of `fit`."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._first = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Go on after the epochs that were done."""
        self._first = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Count an epoch."""
        self.state.epoch = self._first + epoch + 1
