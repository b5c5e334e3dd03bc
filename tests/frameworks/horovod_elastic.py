"""Rank 1 is killed after the second commit; the ranks that start again go on from there."""

import os
import signal

import horovod.tensorflow as hvd
import tensorflow as tf

hvd.init()
variable = tf.Variable(0.0)
state = hvd.elastic.TensorFlowState([variable], step=0)
is_first = os.environ["PACELINE_ATTEMPT"] == "0"


@hvd.elastic.run
def train(state):
    assert is_first or state.step == variable.numpy() >= 2
    while state.step < 4:
        state.step += 1
        variable.assign_add(hvd.allreduce(tf.constant(1.0)))
        state.commit()
        if is_first and state.step == 2 and hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    return float(variable)


assert train(state) == 4.0
print(f"rank {hvd.rank()} of {hvd.size()}: all steps are done", flush=True)
