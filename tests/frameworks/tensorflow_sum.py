"""Sum rank + 1 over all workers with tf.distribute."""

import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
rank, size = strategy.cluster_resolver.task_id, strategy.num_replicas_in_sync


@tf.function
def total() -> tf.Tensor:
    value = strategy.run(lambda: tf.constant(rank + 1.0))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, value, axis=None)


print(f"rank {rank} of {size}: sum={total().numpy()}", flush=True)
