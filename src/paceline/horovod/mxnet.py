"""Not provided: importing it says what to use instead."""

raise ImportError(
    "horovod.mxnet is not part of paceline: MXNet is retired; move the model to PyTorch and use paceline.init"
)
