"""Each rank writes lines of 100 bytes. All ranks begin and end together: they wait for locks of the benchmark."""

import fcntl
import os
import sys

BLOCK = 80  # lines per write: Python's buffer holds 8 KiB

lock, count = sys.argv[1], int(sys.argv[2])
rank = int(os.environ.get("RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
lines = [(b"<%d %d " % (rank, number)).ljust(98, b".") + b">\n" for number in range(count)]
with open(lock) as gate:
    os.write(1, b"ready\n")
    fcntl.flock(gate, fcntl.LOCK_SH)
    for begin in range(0, count, BLOCK):
        os.write(1, b"".join(lines[begin : begin + BLOCK]))
with open(f"{lock}.end") as gate:
    fcntl.flock(gate, fcntl.LOCK_SH)
