"""The smallest distributed job: join the process group, sum one number, leave."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
number = torch.ones(1)
dist.all_reduce(number)
if number.item() != dist.get_world_size():
    raise SystemExit(f"the sum over {dist.get_world_size()} ranks is {number.item()}")
dist.destroy_process_group()
