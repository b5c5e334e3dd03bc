"""Not provided: importing it says what to use instead."""

raise ImportError(
    "horovod.tensorflow.data.compute_service is not in paceline's Horovod: start tf.data.experimental.service with "
    "TensorFlow itself, and pass its address to the script"
)
