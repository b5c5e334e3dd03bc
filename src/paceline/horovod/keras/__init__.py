"""The Keras API: `import horovod.keras as hvd`. It is that of `horovod.tensorflow.keras`."""

from paceline.horovod.tensorflow.keras import *  # noqa: F403
from paceline.horovod.tensorflow.keras import __all__ as __all__
