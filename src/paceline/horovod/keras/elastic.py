"""Training with Keras that goes on after ranks fail, or come and go."""

from paceline.horovod.tensorflow.keras.elastic import *  # noqa: F403
