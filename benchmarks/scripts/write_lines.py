"""Each rank writes lines of 100 bytes, all ranks at once: they wait for a lock that the benchmark holds."""

import fcntl
import os
import sys

lock, count, rank = sys.argv[1], int(sys.argv[2]), int(os.environ["RANK"])
lines = [(b"<%d %d " % (rank, number)).ljust(98, b".") + b">\n" for number in range(count)]
with open(lock) as gate:
    os.write(1, b"ready\n")
    fcntl.flock(gate, fcntl.LOCK_SH)
    if os.environ.get("BLOCKS"):
        for b in range(0, count, 80):
            os.write(1, b"".join(lines[b : b + 80]))
    else:
        for line in lines:
            os.write(1, line)
