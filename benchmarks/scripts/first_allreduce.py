"""Join, sum one number, and send the monotonic time to the socket in argv[1]. mpirun may start it too."""

import os
import socket
import sys
import time

import torch
import torch.distributed as dist

if "RANK" not in os.environ:
    os.environ.update(RANK=os.environ["OMPI_COMM_WORLD_RANK"], WORLD_SIZE=os.environ["OMPI_COMM_WORLD_SIZE"])
dist.init_process_group("gloo")
number = torch.ones(1)
dist.all_reduce(number)
if number.item() != dist.get_world_size():
    raise SystemExit(f"the sum over {dist.get_world_size()} ranks is {number.item()}")
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as reports:
    reports.connect(sys.argv[1])
    reports.send(str(time.monotonic()).encode())
dist.destroy_process_group()
