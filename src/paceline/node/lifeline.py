"""What the process that has started a job's agent says to it, a byte each, over a socket that ends with that process.

If it ends before it has said anything, or after `ALL_STARTED`, the job ends with it. If it ends after `IN_DOUBT`, the
client may have been killed before all nodes were told that they are a job: then the agent goes on only if its ranks
start within `DOUBT_SECONDS`, which they do only if all nodes are there.

The agent of a node that joins a running job prepares its ranks, and meets the other nodes only after `ALL_STARTED` or
`KEPT`. Until then the job does not know of it, so it ends alone if the process that has started it ends.

A client elsewhere may lose its connection, and not come back in time. Then the process says `CLIENT_LOST` and ends:
this node leaves a job that goes on without it; a job that does not is stopped.

The first process of a container says `TOGETHER`. It ends with the container, and the kernel ends the agent a moment
later. In that moment the agent must not ask the other nodes to stop: for them this node is lost, not stopped.
"""

from __future__ import annotations

ALL_STARTED = b"a"  # the agents of all nodes have been started
IN_DOUBT = b"d"  # the job may go on by itself; `KEPT` follows once all nodes have been told
KEPT = b"k"  # the job goes on by itself
CLIENT_LOST = b"l"  # nobody follows the job from this node any more
TOGETHER = b"t"  # the agent ends with the process that says it, without a word to other nodes
DOUBT_SECONDS = 30.0
