"""Not provided: importing it says what to use instead."""

raise ImportError(
    "horovod.spark is not part of paceline: start the script with paceline run on the hosts of the Spark cluster; "
    "a script of Lightning runs as it is, with strategy='ddp'"
)
