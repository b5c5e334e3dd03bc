"""A rank that fails without `jax.distributed.shutdown`, which would wait for the others."""

import threading

import jax

jax.distributed.initialize()
if jax.process_index() == 1:
    raise ValueError("mine")
threading.Event().wait()
