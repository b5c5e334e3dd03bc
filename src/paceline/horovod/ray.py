"""Not provided: importing it says what to use instead."""

raise ImportError(
    "horovod.ray is not part of paceline: start the script with paceline run on the hosts of the Ray cluster"
)
