"""Not provided: importing it says what to use instead."""

raise ImportError(
    "horovod.keras is not part of paceline: "
    "use Keras 3 on PyTorch with paceline.init, or tf.distribute under paceline run --framework tensorflow"
)
