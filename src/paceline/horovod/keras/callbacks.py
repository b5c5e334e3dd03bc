"""Callbacks for `fit`."""

from paceline.horovod.tensorflow.keras.callbacks import *  # noqa: F403
