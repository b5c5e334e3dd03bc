"""Not provided: importing it says what to use instead."""

raise ImportError(
    "horovod.tensorflow is not part of paceline: "
    "TensorFlow scripts run with TF_CONFIG and tf.distribute under paceline run --framework tensorflow"
)
