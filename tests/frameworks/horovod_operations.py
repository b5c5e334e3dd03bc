"""Compare each operation of horovod.tensorflow with numpy, in eager mode, in tf.function and in a graph; any ranks."""

import importlib
from concurrent.futures import ThreadPoolExecutor

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

tf.config.threading.set_inter_op_parallelism_threads(1)
hvd.init()
rank, size = hvd.rank(), hvd.size()
v1 = tf.compat.v1


def eager(build, *arrays):
    return build(*map(tf.constant, arrays))


def function(build, *arrays):
    return tf.function(build)(*map(tf.constant, arrays))


def graph(build, *arrays):
    with tf.Graph().as_default(), v1.Session() as session:
        placeholders = [v1.placeholder(array.dtype, [None, *array.shape[1:]]) for array in arrays]
        return session.run(build(*placeholders), dict(zip(placeholders, arrays, strict=True)))


def check(build, expected, *arrays, rtol=1e-6):
    for mode in (eager, function, graph):
        made = mode(build, *arrays)
        for result, wanted in zip(tf.nest.flatten(made), tf.nest.flatten(expected), strict=True):
            np.testing.assert_allclose(
                np.asarray(result).astype("f8"), np.asarray(wanted, "f8"), rtol, err_msg=mode.__name__
            )


def of(which, rows=3, dtype="f4"):
    return (np.random.default_rng(which).normal(size=(rows, 4)) * 9).astype(dtype)


def gradient(op):
    """The gradient of the sum of squares of a result."""

    def build(x):
        total = sum(tf.reduce_sum(one * one) for one in tf.nest.flatten(op(x)))
        return tf.gradients(total, x)[0]

    def taped(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = sum(tf.reduce_sum(one * one) for one in tf.nest.flatten(op(x)))
        return tape.gradient(total, x)

    return lambda x: taped(x) if tf.executing_eagerly() else build(x)


ranks = range(size)
mine, everyones = of(rank), np.stack([of(each) for each in ranks])
even = [0] if size == 1 else list(range(0, size, 2))
some = hvd.add_process_set(even) if size > 1 else hvd.global_process_set

# allreduce
for op, reduce in (
    (hvd.Sum, np.sum),
    (hvd.Average, np.mean),
    (hvd.Min, np.min),
    (hvd.Max, np.max),
    (hvd.Product, np.prod),
):
    check(lambda x, op=op: hvd.allreduce(x, op=op), reduce(everyones.astype("f8"), 0), mine, rtol=1e-5)
for dtype in (np.int32, np.int64, np.uint8, np.int8, np.float16, np.float64, np.bool_, tf.bfloat16.as_numpy_dtype):
    ones = np.ones((3, 4), dtype)
    check(lambda x: hvd.allreduce(x, op=hvd.Max), ones, ones)
check(
    lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0),
    everyones.sum(0) * 1.5,
    mine,
    rtol=1e-5,
)
check(lambda x: hvd.allreduce(x, compression=hvd.Compression.fp16), everyones.mean(0), mine, rtol=0.02)
check(
    lambda x: hvd.grouped_allreduce([x, x + 1], op=hvd.Sum), [everyones.sum(0), (everyones + 1).sum(0)], mine, rtol=1e-5
)
check(gradient(lambda x: hvd.allreduce(x, op=hvd.Sum)), 2 * size * everyones.sum(0), mine, rtol=1e-5)
check(gradient(lambda x: hvd.grouped_allreduce([x])), 2 * everyones.mean(0), mine, rtol=1e-5)
if size & (size - 1) == 0:
    same = np.ones((3, 4), "f4")
    check(lambda x: hvd.allreduce(x, op=hvd.Adasum), same, same)
if rank in even:
    check(lambda x: hvd.allreduce(x, op=hvd.Sum, process_set=some), everyones[even].sum(0), mine, rtol=1e-5)
assert some.included() == (rank in even)
# IndexedSlices
slices = hvd.allreduce(tf.IndexedSlices(tf.constant(mine), tf.constant([0, 1, 2]), tf.constant([5, 4])))
np.testing.assert_allclose(tf.convert_to_tensor(slices)[:3], everyones.mean(0), rtol=1e-5)
# allgather, broadcast
uneven = [of(each, each + 1) for each in ranks]
check(hvd.allgather, np.concatenate(uneven), uneven[rank])
check(lambda x: hvd.grouped_allgather([x, -x]), [np.concatenate(uneven), -np.concatenate(uneven)], uneven[rank])
check(gradient(hvd.allgather), 2 * uneven[rank], uneven[rank], rtol=1e-5)
check(lambda x: hvd.broadcast(x, size - 1), everyones[-1], mine)
check(gradient(lambda x: hvd.broadcast(x, 0)), 2 * everyones[0] * (rank == 0), mine, rtol=1e-5)
with tf.Graph().as_default(), v1.Session() as session:
    fixed, variable = tf.constant(mine), v1.get_variable("v", initializer=mine)
    back = tf.gradients(hvd.broadcast(fixed, 0), fixed)[0]
    np.testing.assert_array_equal(session.run(back), np.full(mine.shape, float(rank == 0)))
    session.run(variable.initializer)
    np.testing.assert_array_equal(session.run(hvd.broadcast_([variable], size - 1)[0]), everyones[-1])
    np.testing.assert_array_equal(session.run(variable), everyones[-1])
# alltoall
rows = [of(each, 2 * size) for each in ranks]
check(hvd.alltoall, np.concatenate([each[2 * rank : 2 * rank + 2] for each in rows]), rows[rank])
splits = np.arange(size, dtype="i4")
starts = [sum(splits[:rank]), sum(splits[: rank + 1])]
wide = [of(each, int(sum(splits)) + 1) for each in ranks]
sent = [np.concatenate([each[starts[0] : starts[1]] for each in wide]), np.full(size, rank)]
check(hvd.alltoall, sent, wide[rank], splits)
check(gradient(hvd.alltoall), 2 * rows[rank], rows[rank])
# reducescatter
each, odd = divmod(5, size)
first = rank * each + min(rank, odd)
tall = np.stack([of(one, 5) for one in ranks])
share = tall.sum(0)[first : first + each + (rank < odd)]
check(lambda x: hvd.reducescatter(x, op=hvd.Sum), share, tall[rank], rtol=1e-4)
check(lambda x: hvd.grouped_reducescatter([x, x], op=hvd.Average), [share / size] * 2, tall[rank], rtol=1e-4)
check(gradient(lambda x: hvd.reducescatter(x, op=hvd.Average)), 2 * tall.mean(0), tall[rank], rtol=1e-4)
# what cannot be done
for options in ({"op": hvd.Min}, {"op": hvd.Adasum}, {"prescale_factor": 0.5}, {"postscale_factor": 0.5}):
    try:
        hvd.allreduce(tf.IndexedSlices(tf.ones([1, 4]), tf.constant([0])), **options)
        raise SystemExit(f"IndexedSlices are reduced with {options}")
    except NotImplementedError:
        pass
for error in (ValueError, tf.errors.InvalidArgumentError):
    try:
        hvd.alltoall(tf.ones([2]), tf.constant([3] * size))
        raise SystemExit("rows are sent that do not exist")
    except error:
        pass
# objects and queries
assert hvd.broadcast_object({"rank": rank}, 0) == {"rank": 0}
assert hvd.broadcast_object_fn(size - 1)(rank) == size - 1
assert hvd.allgather_object([rank]) == [[each] for each in ranks]
assert [int(op()) for op in (hvd.rank_op, hvd.size_op, hvd.local_rank_op)] == [rank, size, rank]
# names may come in any order, and the ranks go on after an error
if size > 1:
    names = ["a", "b"] if rank else ["b", "a"]
    with ThreadPoolExecutor(2) as threads:
        done = {name: threads.submit(hvd.allreduce, tf.constant([float(ord(name))]), name=name) for name in names}
        assert {name: float(it.result()[0]) for name, it in done.items()} == {"a": 97.0, "b": 98.0}
    names = [f"many.{number}" for number in (reversed if rank else iter)(range(20))]  # and there is one thread
    for mode in (function, graph):
        done = mode(
            lambda x: {name: hvd.allreduce(x + float(name[5:]), name=name) for name in names}, np.zeros(1, "f4")
        )
        assert {name: float(it[0]) for name, it in done.items()} == {name: float(name[5:]) for name in names}
    for error in (hvd.HorovodInternalError, tf.errors.FailedPreconditionError):
        try:
            hvd.allreduce(tf.zeros([rank + 1]), name="shapes")
            raise SystemExit("the ranks disagree, and nobody says so")
        except error:
            pass

    @tf.function
    def disagreeing():
        return hvd.allreduce(tf.zeros([rank + 1]))

    try:
        disagreeing()
        raise SystemExit("the ranks disagree, and nobody says so")
    except tf.errors.OpError as error:
        assert "HorovodInternalError" in error.message, error.message

    @tf.function(jit_compile=True)
    def compiled(x):
        return hvd.allreduce(x)

    try:
        compiled(tf.zeros([2]))
        raise SystemExit("XLA has compiled a collective")
    except NotImplementedError as error:
        assert "jit_compile=False" in str(error)
    for join in (hvd.join, tf.function(hvd.join)):
        if rank:
            assert float(hvd.allreduce(tf.constant([4.0]), op=hvd.Sum)[0]) == 4.0 * (size - 1)
        last = int(join())
        assert hvd.allgather_object(last) == [last] * size
        assert last > 0
        tf.function(lambda: [hvd.barrier(), hvd.rank_op()][1])()
# Names that scripts take from modules beside.
from horovod.tensorflow import util  # noqa: E402
from horovod.tensorflow.gradient_aggregation_eager import LocalGradientAggregationHelperEager  # noqa: E402

assert hvd._executing_eagerly() and util._executing_eagerly()
variables = [tf.Variable(1.0), tf.Variable([2.0])]
assert [one.numpy().tolist() for one in util.refs_to_vars(util.vars_to_refs(variables))] == [1.0, [2.0]]
assert float(util._make_subgraph(hvd.mpi_ops._allreduce)(tf.constant(1.0))) == size
helper = LocalGradientAggregationHelperEager(
    2, lambda grads, _: [hvd.allreduce(it, op=hvd.Sum) for it in grads], average_aggregated_gradients=True
)
steps = []
for _ in range(4):
    made = helper.compute_gradients([tf.constant(1.0), tf.constant([2.0])], variables)
    optimizer = tf.keras.optimizers.SGD()
    helper.apply_gradients(lambda made=made: steps.append([float(tf.reduce_sum(it)) for it in made]), optimizer)
assert steps == [[1.0 * size, 2.0 * size]] * 2, steps
try:
    importlib.import_module("horovod.tensorflow.data.compute_service")
except ImportError as error:
    assert "is not in paceline's Horovod: start tf.data.experimental.service" in str(error)
print(f"rank {rank} of {size}: all operations are right", flush=True)
