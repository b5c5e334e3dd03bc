"""Sum rank + 1 over all processes with jax.distributed."""

import jax
from jax.experimental import multihost_utils

jax.distributed.initialize()
rank, size = jax.process_index(), jax.process_count()
total = multihost_utils.process_allgather(jax.numpy.float32(rank + 1)).sum()
print(f"rank {rank} of {size}: sum={total}", flush=True)
jax.distributed.shutdown()
