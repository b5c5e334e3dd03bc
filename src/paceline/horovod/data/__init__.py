"""Loaders of data: `horovod.data`."""
