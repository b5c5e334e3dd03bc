"""Step with an all-reduce until killed; after each send `world rank step monotonic-time` to the socket in argv[1]."""

import itertools
import socket
import sys
import time

import torch
import torch.distributed as dist

STEP_SECONDS = 0.01  # of a step; it sleeps, so that the ranks do not compete for cores

dist.init_process_group("gloo")
world, rank = dist.get_world_size(), dist.get_rank()
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as reports:
    reports.connect(sys.argv[1])
    for step in itertools.count(1):
        time.sleep(STEP_SECONDS)
        dist.all_reduce(torch.ones(1))
        reports.send(f"{world} {rank} {step} {time.monotonic()}".encode())
