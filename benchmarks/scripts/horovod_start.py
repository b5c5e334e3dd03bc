"""One allreduce of horovod.tensorflow."""

import horovod.tensorflow as hvd
import tensorflow as tf

hvd.init()
print(float(hvd.allreduce(tf.constant(1.0))))
