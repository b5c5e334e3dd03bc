"""The smallest job on GPUs: join the process group over nccl, sum one number, leave."""

import os

import torch
import torch.distributed as dist

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
number = torch.ones(1, device="cuda")
dist.all_reduce(number)
if number.item() != dist.get_world_size():
    raise SystemExit(f"the sum over {dist.get_world_size()} ranks is {number.item()}")
dist.destroy_process_group()
