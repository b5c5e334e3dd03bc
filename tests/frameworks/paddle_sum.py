"""Sum rank + 1 over all ranks with paddle.distributed."""

import paddle
import paddle.distributed as dist

dist.init_parallel_env()
rank, size = dist.get_rank(), dist.get_world_size()
value = paddle.to_tensor([rank + 1.0])
dist.all_reduce(value)
print(f"rank {rank} of {size}: sum={value.item()}", flush=True)
