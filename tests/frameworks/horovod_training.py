"""Train with horovod.tensorflow and horovod.keras; all ranks have equal weights afterwards."""

import os
import tempfile

import horovod.keras as khvd
import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from horovod.tensorflow.keras.callbacks import LearningRateScheduleCallback

tf.config.threading.set_inter_op_parallelism_threads(1)
hvd.init()
rank, size = hvd.rank(), hvd.size()
v1 = tf.compat.v1
generator = np.random.default_rng(rank)
x = generator.normal(size=(32, 6)).astype("f4")
y = x.sum(1, keepdims=True)


def check_equal(values, what):
    for other in hvd.allgather_object([np.array(value) for value in values]):
        for theirs, mine in zip(other, values, strict=True):
            np.testing.assert_array_equal(theirs, mine, what)


def raises(error, text, do):
    try:
        do()
    except error as raised:
        assert text in str(raised), raised
        return
    raise AssertionError(f"no {error.__name__}")


# 500 variables and one thread: their gradients are one node
many = [tf.Variable([float(rank + index)]) for index in range(500)]


@tf.function
def step(factor):
    hvd.broadcast_variables(many, root_rank=size - 1)
    with tf.GradientTape() as tape:
        loss = sum(tf.reduce_sum(one * one) for one in many) * factor
    tape = hvd.DistributedGradientTape(tape)
    tape.register_local_source(many[0])
    for one, grad in zip(many, tape.gradient(loss, many), strict=True):
        one.assign_sub(0.1 * grad)


step(tf.constant(rank + 1.0))
start = size - 1 + np.arange(500)
wanted = start * (1 - 0.2 * np.mean(np.arange(size) + 1))
wanted[0] = start[0] * (1 - 0.2 * (rank + 1) / size)
np.testing.assert_allclose(np.concatenate([one.numpy() for one in many]), wanted, rtol=1e-5)

# a tape in eager mode: None, IndexedSlices, groups, a predivide factor
table, other, unused = tf.Variable(tf.ones([4, 2])), tf.Variable(2.0), tf.Variable(1.0)
for options in (
    {},
    {"sparse_as_dense": True, "num_groups": 1},
    {"gradient_predivide_factor": 2.0},
    {"groups": [[other]]},
):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(table, [rank, rank])) * other
    grads = hvd.DistributedGradientTape(tape, **options).gradient(loss, {"t": table, "o": other, "u": unused})
    expected = np.zeros((4, 2))
    expected[:size] = 4.0 / size
    np.testing.assert_allclose(tf.convert_to_tensor(grads["t"]), expected)
    assert (float(grads["o"]), grads["u"]) == (4.0, None)
with tf.GradientTape() as tape:
    loss = other * (rank + 1.0)
(grad,) = hvd.DistributedGradientTape(tape).gradient(loss, [other])
assert grad.shape == ()
assert hvd.grouped_allreduce([]) == []
with tf.GradientTape() as tape:
    loss = other * (rank + 1.0) + unused * (rank + 1.0)
tape = hvd.DistributedGradientTape(tape)
tape.register_local_source(unused)
own, common = tape.get_local_and_global_gradients(loss, [other, unused])
assert [(pair[0] is unused, float(pair[1])) for pair in own] == [(True, (rank + 1.0) / size)]
assert [(pair[0] is other, float(pair[1])) for pair in common] == [(True, (size + 1) / 2)]

with tf.GradientTape() as tape:
    loss = tf.reduce_sum(tf.gather(table, [rank]))
tape = hvd.DistributedGradientTape(tape)
tape.register_local_source(table)
np.testing.assert_allclose(tape.gradient(loss, table).values, np.full((1, 2), 1 / size))

# sessions of tf.compat.v1 with hooks
for options in ({}, {"backward_passes_per_step": 3}, {"op": hvd.Adasum}):
    with tf.Graph().as_default():
        weights = v1.get_variable("w", [6, 1], initializer=v1.random_normal_initializer(seed=rank))
        batch = v1.data.make_one_shot_iterator(tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(8)).get_next()
        loss = v1.losses.mean_squared_error(batch[1], tf.matmul(batch[0], weights))
        optimizer = hvd.DistributedOptimizer(v1.train.AdagradOptimizer(0.5), **options)
        train = optimizer.minimize(loss, global_step=v1.train.get_or_create_global_step())
        hooks = [hvd.BroadcastGlobalVariablesHook(0), v1.train.StopAtStepHook(last_step=8)]
        folder = tempfile.mkdtemp() if rank == 0 else None
        runs = 0
        with v1.train.MonitoredTrainingSession(checkpoint_dir=folder, hooks=hooks) as session:
            while not session.should_stop():
                runs, _, trained = runs + 1, *session.run([train, weights])
    check_equal([trained], f"v1 {options}")
    assert runs == 8  # of several passes, each is a step
    assert folder is None or v1.train.latest_checkpoint(folder)

# reference variables, which disable_v2_behavior gives, train as the others do
v1.disable_control_flow_v2()
for options in ({}, {"op": hvd.Adasum}, {"op": hvd.Adasum, "backward_passes_per_step": 2}):
    passes = options.get("backward_passes_per_step", 1)
    wanted = 1 - 0.2 * np.array([1, 2, 3], "f4") * passes  # Adasum of parallel gradients is their average
    for is_resource in (True, False):
        with tf.Graph().as_default():
            weights = v1.get_variable("w", initializer=[1.0, 1.0, 1.0], use_resource=is_resource)
            loss = tf.reduce_sum(weights * [1.0, 2.0, 3.0]) * (rank * 2 + 1.0)
            train = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.1), **options).minimize(loss)
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                for _ in range(passes):
                    session.run(train)
                trained = session.run(weights)
        np.testing.assert_allclose(trained, wanted, 1e-5, 1e-6, err_msg=f"{options} {is_resource}")
v1.enable_control_flow_v2()

# Keras
keras.utils.set_random_seed(rank)


def model_of(*layers):
    return keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(1)])


model = keras.Sequential([hvd.SyncBatchNormalization(), keras.layers.Dense(1)])  # built in fit
callbacks = [
    khvd.callbacks.BroadcastGlobalVariablesCallback(0), khvd.callbacks.MetricAverageCallback(),
    khvd.callbacks.LearningRateWarmupCallback(0.04, warmup_epochs=1, verbose=1),
    LearningRateScheduleCallback(0.04, lambda epoch: 0.5**epoch, start_epoch=1),
]  # fmt: skip
model.compile(
    khvd.DistributedOptimizer(keras.optimizers.Adam(0.04)), "mse", metrics=["mae"], experimental_run_tf_function=False
)
history = model.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=callbacks).history
check_equal([*model.trainable_weights, *model.optimizer.variables], "fit")
assert len({str(each) for each in hvd.allgather_object(history)}) == 1
np.testing.assert_allclose(history["lr"], [0.04, 0.02, 0.01], rtol=1e-5)
path = hvd.broadcast_object(os.path.join(tempfile.mkdtemp(), "model.keras"))
if rank == 0:
    model.save(path)
hvd.barrier()
model = khvd.load_model(path)
model.fit(x, y, batch_size=8, verbose=0)
check_equal([*model.trainable_weights, *model.optimizer.variables], "load_model")
assert int(model.optimizer.iterations) == 16
assert type(keras.models.load_model(path).optimizer) is keras.optimizers.Adam
# the same as one rank with all data, and twice the passes of half the batch
plain = model_of(keras.layers.BatchNormalization())
plain.set_weights(hvd.broadcast_object(plain.get_weights()))
parts = model_of(hvd.SyncBatchNormalization())
parts.set_weights(plain.get_weights())
plain.compile(keras.optimizers.SGD(0.1), "mse")
parts.compile(khvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
everything = np.concatenate(hvd.allgather_object(x)), np.concatenate(hvd.allgather_object(y))
plain.fit(*everything, batch_size=32 * size, epochs=2, shuffle=False, verbose=0)
parts.fit(x, y, batch_size=32, epochs=2, shuffle=False, verbose=0)
for mine, theirs in zip(parts.trainable_weights, plain.trainable_weights, strict=True):
    np.testing.assert_allclose(mine.numpy(), theirs.numpy(), rtol=1e-3, atol=1e-4)
linear = model_of()
linear.set_weights(hvd.broadcast_object(linear.get_weights()))
twice = model_of()
twice.set_weights(linear.get_weights())
passes = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}
linear.compile(khvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
twice.compile(khvd.DistributedOptimizer(keras.optimizers.SGD(0.1), **passes), "mse")
linear.fit(x, y, batch_size=32, epochs=2, shuffle=False, verbose=0)
twice.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
np.testing.assert_allclose(twice.get_weights()[0], linear.get_weights()[0], rtol=1e-4)
assert int(twice.optimizer.iterations) == 4
raises(ValueError, "distributed already", lambda: khvd.DistributedOptimizer(twice.optimizer))
raises(ValueError, "no optimizer of Keras", lambda: hvd.DistributedOptimizer("sgd"))
twice.compile(twice.optimizer, "mse", jit_compile=True)
raises(Exception, "jit_compile=False", lambda: twice.fit(x, y, verbose=0))
# with mixed_float16 all ranks skip the step in which one of them has gradients that are not finite
half = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, dtype="mixed_float16")])
half.set_weights(hvd.broadcast_object(half.get_weights()))
half.dtype_policy = keras.DTypePolicy("mixed_float16")
half.compile(khvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
half.fit(np.where(rank, x, np.inf), y, batch_size=8, epochs=1, verbose=0)
assert np.isfinite(half.get_weights()[0]).all()
half.fit(x, y, batch_size=8, epochs=1, verbose=0)
check_equal(half.get_weights(), "mixed_float16")
assert (float(half.optimizer.dynamic_scale), int(half.optimizer.iterations)) == (2.0**15 / 2**4, 4)
assert khvd.allreduce(np.float32(rank)) == np.mean(range(size))

# elastic: a failed collective brings the last commit back
variable = tf.Variable(float(rank))
state = hvd.elastic.TensorFlowState([variable], step=0)
seen = []


@hvd.elastic.run
def train(state):
    while state.step < 4:
        state.step += 1
        variable.assign_add(1.0)
        seen.append((state.step, float(variable)))
        if state.step == 3 and len(seen) == 3:
            fails = tf.function(lambda: hvd.allreduce(tf.zeros([rank + 1]), name="fails"))
            fails()
        if state.step % 2 == 0:
            state.commit()
    return float(variable)


if size > 1:
    assert train(state) == 4.0
    assert seen == [(1, 1.0), (2, 2.0), (3, 3.0), (3, 3.0), (4, 4.0)], seen
    kept = khvd.elastic.KerasState(twice, epoch=0, batch=0)
    twice.compile(twice.optimizer, "mse")
    commits = [khvd.elastic.CommitStateCallback(kept), khvd.elastic.UpdateBatchStateCallback(kept)]
    twice.fit(
        x, y, batch_size=16, epochs=2, verbose=0, callbacks=[*commits, khvd.elastic.UpdateEpochStateCallback(kept)]
    )
    assert (kept.epoch, kept.batch) == (2, 0)
    saved = [np.array(one) for one in twice.weights]
    twice.weights[0].assign(twice.weights[0] + 1)
    kept.restore()
    check_equal(saved, "KerasState")
    np.testing.assert_array_equal(saved[0], twice.weights[0].numpy())
# ranks that train with different variables say so
weight = tf.Variable([1.0 + rank])
hvd.broadcast_variables([weight], root_rank=0)


def apart(number):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weight * weight)
    rate = tf.where(number > 2, 0.1 * (rank + 1.0), 0.1)
    weight.assign_sub(rate * hvd.DistributedGradientTape(tape).gradient(loss, weight))


if size > 1:
    for do in (apart, tf.function(apart)):
        try:
            for number in range(100):
                do(tf.constant(number))
        except Exception as error:
            assert "the parameter Variable, seen after step 4, equal after step 3: variables" in str(error), error
            assert type(error).__name__ == "ReplicaMismatch" or "ReplicaMismatch: " in str(error), error
        else:
            raise AssertionError("differences were not seen")
        try:
            hvd.shutdown()  # ends the others, too
        except Exception as error:
            assert "differ in the parameter Variable" in str(error), error
        hvd.init()
        hvd.broadcast_variables([weight], root_rank=0)
# also in a session of tf.compat.v1, with resources and with reference variables
for is_resource in (True, False) if size > 1 else ():
    with tf.Graph().as_default():
        weights = v1.get_variable("w", initializer=[1.0, 1.0], use_resource=is_resource)
        done = v1.get_variable("done", initializer=0.0, trainable=False, use_resource=is_resource)
        rate = tf.where(done > 2, 0.1 * (rank + 1.0), 0.1)
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(rate))
        train = tf.group(optimizer.minimize(tf.reduce_sum(weights * [1.0, 2.0])), v1.assign_add(done, 1.0))
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            try:
                for _ in range(100):
                    session.run(train)
            except tf.errors.OpError as error:
                assert "ReplicaMismatch: " in str(error), error
                assert "the parameter w, seen after step" in str(error), error
            else:
                raise AssertionError("differences were not seen in a session")
    try:
        hvd.shutdown()
    except Exception as error:
        assert "differ in the parameter w" in str(error), error
    hvd.init()
print(f"rank {rank} of {size}: all weights are equal", flush=True)
