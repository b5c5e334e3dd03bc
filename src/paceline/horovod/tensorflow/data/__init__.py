"""Loaders of TensorFlow: `horovod.tensorflow.data`."""
