"""Step with an all-reduce, and send `attempt rank step pid monotonic-time` to the socket in argv[1] after each.

The first attempt runs until it is killed, a later one ends by itself.
"""

import os
import socket
import sys
import time

import torch
import torch.distributed as dist

STEP_SECONDS = 0.01  # of a step; it sleeps, so that the ranks do not compete for cores
LAST_STEP = 3

dist.init_process_group("gloo")
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), dist.get_rank()
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as reports:
    reports.connect(sys.argv[1])
    step = 0
    while attempt == 0 or step < LAST_STEP:
        time.sleep(STEP_SECONDS)
        dist.all_reduce(torch.ones(1))
        step += 1
        reports.send(f"{attempt} {rank} {step} {os.getpid()} {time.monotonic()}".encode())
dist.destroy_process_group()
