"""How many threads one rank should use for arithmetic on the CPU."""

from __future__ import annotations


def thread_count(cores: int, local_world_size: int) -> int:
    """OMP_NUM_THREADS of each rank: the node's cores shared out among its ranks, at least 1."""
    return max(1, cores // local_world_size)
