"""`horovod_tensorflow.py hvd|strategy small|large FILE`: seconds of a step of a Keras model, which rank 0 writes.

hvd is DistributedGradientTape, strategy is all_reduce of MultiWorkerMirroredStrategy, whose collectives use gRPC on the
CPU; Keras 3's fit does not take it. small: two dense layers, 0.4 MB of gradients. large: convolutions with shortcuts,
7.8 MB of gradients.
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path

import keras
import tensorflow as tf

SIDE, SIZE, FILE = sys.argv[1:]
BATCH, STEPS = 16, 40


def small():
    layers = keras.layers
    return keras.Sequential([keras.Input((784,)), layers.Dense(128, "relu"), layers.Dense(10)]), (784,)


def large():
    layers = keras.layers
    given = made = layers.Input((16, 16, 3))
    for filters in (32, 64, 128, 256):
        made = layers.BatchNormalization()(layers.Conv2D(filters, 3, 2 if filters > 32 else 1, "same")(made))
        inner = layers.Conv2D(filters, 3, padding="same", activation="relu")(made)
        made = layers.ReLU()(layers.add([made, layers.Conv2D(filters, 3, padding="same")(inner)]))
    return keras.Model(given, layers.Dense(10)(layers.GlobalAveragePooling2D()(made))), (16, 16, 3)


if SIDE == "hvd":
    import horovod.tensorflow as hvd

    hvd.init()
else:
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
rank = int(os.environ["RANK" if SIDE == "strategy" else "HOROVOD_RANK"])
model, shape = small() if SIZE == "small" else large()
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
variables = [variable.value for variable in model.trainable_variables]
batch, labels = tf.ones((BATCH, *shape)), tf.zeros(BATCH, tf.int32)


def one():
    with tf.GradientTape() as tape:
        loss = loss_of(labels, model(batch, training=True))
    if SIDE == "hvd":
        grads = hvd.DistributedGradientTape(tape).gradient(loss, variables)
    else:
        grads = tape.gradient(loss, variables)
        grads = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, grads)
    for variable, grad in zip(variables, grads, strict=True):
        variable.assign_sub(0.01 * grad)


@tf.function
def step():
    if SIDE == "hvd":
        one()
    else:
        strategy.run(one)


taken = []
for _ in range(STEPS):
    began = time.perf_counter()
    step()
    taken.append(time.perf_counter() - began)
if rank == 0:
    Path(FILE).write_text(json.dumps(statistics.median(taken[STEPS // 4 :])))
