"""Sum rank + 1 over all ranks with torch.distributed."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
value = torch.tensor([rank + 1.0])
dist.all_reduce(value)
print(f"rank {rank} of {size}: sum={value.item()}", flush=True)
dist.destroy_process_group()
