"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from paceline.horovod.common.process import size

from .mpi_ops import Sum, allreduce


@keras.saving.register_keras_serializable("horovod")
class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]
    """Normalises with mean and variance over the batches of all ranks, which may differ in size.

    The arguments are those of `keras.layers.BatchNormalization`.
    """

    def _moments(self, inputs: Any, mask: Any) -> Any:
        if size() == 1:
            return super()._moments(inputs, mask)
        mean, variance = super()._moments(inputs, mask)
        values = tf.size(inputs) // tf.size(mean) if mask is None else tf.math.count_nonzero(mask, dtype=tf.int32)
        count = tf.cast(values, mean.dtype)  # per feature
        total = allreduce(tf.concat([mean * count, [count]], 0), op=Sum)
        common, everyones = total[:-1] / total[-1], total[-1]
        squares = (variance + tf.square(mean - common)) * count
        return common, allreduce(squares, op=Sum) / everyones
