"""Scripts with a planted fault that shows only on many ranks, and scripts that are right: `paceline run --rehearse 8`.

The lines of a fault are marked with `# fault`: a finding must name one of them.
"""

from __future__ import annotations

PRELUDE = """
import contextlib, os, random, shutil, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset, TensorDataset
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x, y = torch.randn(96, 4), torch.randn(96, 1)
data = TensorDataset(x, y)
loss_of = nn.functional.mse_loss

def shard(n, of=None):
    return Subset(data, range(rank, n, of or world))

def train(model, loader, optimizer):
    for x, y in loader:
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()

def loaded(model, optimizer, path="state.pt"):
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["epoch"]

def save(model, optimizer, epoch, path="state.pt"):
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, path)
"""
_MODEL = """
model = DDP(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
_RESUMED = """
model = DDP(nn.Linear(4, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=4, sampler=sampler)
first = 0
{load}
for epoch in range(first, 6):
    sampler.set_epoch(epoch)
    train(model, loader, optimizer)
    if rank == 0:
        save(model, optimizer, epoch + 1)
    dist.barrier()
"""
_BY_HAND = """
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    for x, y in DataLoader(shard(96), batch_size=4):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        for parameter in model.parameters():
{exchange}
        optimizer.step()
"""
_HOROVOD = """
import torch
import horovod.torch as hvd
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
torch.manual_seed(0)
data = TensorDataset(torch.randn(96, 4), torch.randn(96, 1))
{body}
for x, y in DataLoader(data, batch_size=4, sampler=sampler):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
"""
_SUM = "dist.all_reduce(parameter.grad)"


def _by_hand(*lines: str) -> str:
    return _BY_HAND.format(exchange="\n".join(f"            {line}" for line in lines))


FAULTY: dict[str, str] = {
    # -- collectives that not all ranks enter, or not alike
    "one rank skips a barrier": PRELUDE + "if rank != 3:\n    dist.barrier()  # fault\ndist.all_reduce(x)  # fault\n",
    "four ranks evaluate": PRELUDE
    + "if rank < 4:\n    dist.all_reduce(y)  # fault\ndist.barrier()  # fault\nprint(float(y.sum()))\n",
    "batches differ by one": PRELUDE + _MODEL + "loader = DataLoader(shard(84), batch_size=5)\n"
    "for epoch in range(3):\n    for x, y in loader:  # fault\n        loss_of(model(x), y).backward()\n"
    "        optimizer.step()\n",
    "small batches are skipped": PRELUDE + _MODEL
    + "for x, y in DataLoader(shard(84), batch_size=4):\n    if len(x) < 3:\n        continue  # fault\n"
    "    loss_of(model(x), y).backward()  # fault\n    optimizer.step()\ndist.barrier()  # fault\n",
    "each rank stops when it is good": PRELUDE + "y[80:] = 0\nmodel = nn.Linear(4, 1)\nnn.init.zeros_(model.weight)\n"
    "nn.init.zeros_(model.bias)\nmodel = DDP(model)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    "mine = range(rank * 96 // world, (rank + 1) * 96 // world)\nfor step in range(9):\n"
    "    loss = loss_of(model(x[list(mine)]), y[list(mine)])\n    if loss < 1e-3:\n        break  # fault\n"
    "    loss.backward()  # fault\n    optimizer.step()\ndist.barrier()  # fault\n",
    "a group is made by its members": PRELUDE + "if rank >= 4:\n    upper = dist.new_group([4, 5, 6, 7])  # fault\n"
    "    dist.all_reduce(x, group=upper)\ndist.barrier()  # fault\n",
    "groups in another order": PRELUDE
    + "groups = [dist.new_group(), dist.new_group()]\nfor it in groups if rank < 4 else reversed(groups):\n"
    "    dist.all_reduce(x, group=it)  # fault\n",
    "shapes of the last batch": PRELUDE + "for x, y in DataLoader(shard(84), batch_size=32):\n"
    "    found = [torch.empty_like(x) for _ in range(world)]\n    dist.all_gather(found, x)  # fault\n",
    "another type": PRELUDE + "total = torch.zeros(4, dtype=torch.float64 if rank >= 4 else torch.float32)\n"
    "dist.all_reduce(total)  # fault\n",
    "another root": PRELUDE + "dist.broadcast(x, src=rank // 4 * 4)  # fault\n",
    "another operation": PRELUDE
    + "dist.all_reduce(x, op=dist.ReduceOp.SUM if rank < 4 else dist.ReduceOp.MAX)  # fault\n",
    "objects to another root": PRELUDE + "root = rank // 4 * 4\nfound = [None] * world if rank == root else None\n"
    "dist.gather_object(rank, found, dst=root)  # fault\n",
    "the order of a set": PRELUDE + "model = nn.ParameterDict({name: torch.ones(3) for name in "
    "('query', 'key', 'value', 'out')})\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    "sum((rank + 1) * (i + 1) * it.sum() for i, it in enumerate(model.values())).backward()\nfor name in set(model):\n"
    "    dist.all_reduce(model[name].grad)  # fault\noptimizer.step()\n",
    "partners of four ranks": PRELUDE + "partner = rank ^ 1 if rank < 4 else 7 - rank\n"
    "sent = dist.isend(x, partner)\ndist.recv(y.expand(96, 4).contiguous(), partner)  # fault\nsent.wait()\n",
    "the last rank evaluates": PRELUDE + _MODEL + "train(model, DataLoader(shard(96), batch_size=4), optimizer)\n"
    "if rank == world - 1 and world > 4:\n    total = loss_of(model(x), y).detach()\n"
    "    dist.all_reduce(total)  # fault\ndist.barrier()  # fault\n",
    # -- exceptions
    "replicas of the sampler": PRELUDE + "sampler = DistributedSampler(data, num_replicas=4, rank=rank)  # fault\n",
    "fewer samples than ranks": PRELUDE + "mine = [float(y[i]) for i in range(rank, 6, world)]\n"
    "mean = torch.tensor(sum(mine) / len(mine))  # fault\ndist.all_reduce(mean)\n",
    "a table of four": PRELUDE + "scale = [1.0, 0.5, 0.5, 0.25][rank]  # fault\ndist.barrier()\n",
    "a batch smaller than the ranks": PRELUDE + _MODEL
    + "loader = DataLoader(shard(96), batch_size=6 // world)  # fault\ntrain(model, loader, optimizer)\n",
    "a seed of one byte": PRELUDE + "random.seed(bytes([rank * 50]))  # fault\ndist.barrier()\n",
    "a list of four": PRELUDE + "found = [torch.empty_like(x) for _ in range(min(world, 4))]\n"
    "dist.all_gather(found, x)  # fault\n",
    "frozen on one rank": PRELUDE + "model = nn.Linear(4, 1)\nif rank == 7:\n    model.bias.requires_grad_(False)\n"
    "model = DDP(model)  # fault\n",
    # -- who trains on which samples
    "a sampler for four": PRELUDE + _MODEL + "sampler = DistributedSampler(data, min(world, 4), rank % 4)\n"
    "for x, y in DataLoader(data, batch_size=4, sampler=sampler):  # fault\n    loss_of(model(x), y).backward()\n"
    "    optimizer.step()\n",
    "shards for two": PRELUDE + _MODEL
    + "for x, y in DataLoader(Subset(data, range(rank % 2, 96, 2)), batch_size=8):  # fault\n"
    "    loss_of(model(x), y).backward()\n    optimizer.step()\n",
    "seeds of four": PRELUDE + _MODEL + "draws = torch.Generator().manual_seed(rank % 4)\nfor step in range(9):\n"
    "    x = torch.randn(8, 4, generator=draws)\n    loss = model(x).square().mean()  # fault\n    loss.backward()\n"
    "    optimizer.step()\n",
    "a stream for four": PRELUDE + _MODEL + "class Stream(IterableDataset):\n    def __iter__(self):\n"
    "        return (data[i] for i in range(rank % 4, 96, 4))\nfor x, y in DataLoader(Stream(), batch_size=4):\n"
    "    loss_of(model(x), y).backward()  # fault\n    optimizer.step()\n",
    "a batch with a rest": PRELUDE + _MODEL + "each = 36 // world  # fault\n"
    "train(model, DataLoader(shard(96), batch_size=each), optimizer)\n",
    "samples with a rest": PRELUDE + _MODEL + "each = 84 // world  # fault\n"
    "mine = Subset(data, range(rank * each, (rank + 1) * each))\n"
    "train(model, DataLoader(mine, batch_size=2), optimizer)\n",
    "no full batch": PRELUDE + _MODEL + "for epoch in range(3):\n"
    "    for x, y in DataLoader(shard(24), batch_size=4, drop_last=True):  # fault\n"
    "        loss_of(model(x), y).backward()\n        optimizer.step()\n",
    # -- weights
    "weights for four": PRELUDE + "torch.manual_seed(rank)\n"
    + _by_hand(_SUM, "parameter.grad /= world").replace(
        "for epoch", "four = dist.new_group(range(min(world, 4)))\nif rank < 4:\n"
        "    for it in model.parameters():\n        dist.broadcast(it.data, 0, group=four)\nfor epoch"
    ).replace("optimizer.step()", "optimizer.step()  # fault"),
    "averages of four": PRELUDE
    + "fours = [dist.new_group(range(i, i + 4)) for i in range(0, world - 3, 4)] or [None]\n"
    + _by_hand("dist.all_reduce(parameter.grad, group=fours[rank // 4])", "parameter.grad /= min(world, 4)").replace(
        "optimizer.step()", "optimizer.step()  # fault"),
    "divided by four": PRELUDE
    + _by_hand(_SUM, "parameter.grad /= 4").replace("optimizer.step()", "optimizer.step()  # fault"),
    "another learning rate": PRELUDE + "model = DDP(nn.Linear(4, 1))\n"
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1 if rank < 4 else 0.01)\n"
    "for x, y in DataLoader(shard(96), batch_size=4):\n    loss_of(model(x), y).backward()\n"
    "    optimizer.step()  # fault\n",
    # -- files
    "parts of four": PRELUDE + 'torch.save(x, f"part-{rank % 4}.pt")  # fault\ndist.barrier()\n',
    "the first of each four saves": PRELUDE + _MODEL + "train(model, DataLoader(shard(96), batch_size=4), optimizer)\n"
    "if rank % 4 == 0:\n    torch.save(model.state_dict(), 'model.pt')  # fault\ndist.barrier()\n",
    "the first of each four downloads": PRELUDE + "if rank % 4 == 0 and not os.path.exists('data.bin'):\n"
    "    with open('new.%d' % rank, 'wb') as file:\n        time.sleep(0.5)\n        file.write(b'x' * 1000)\n"
    "    os.replace('new.%d' % rank, 'data.bin')  # fault\ndist.barrier()\nopen('data.bin', 'rb').read()\n",
    "four wait for a file": PRELUDE + "four = dist.new_group(range(min(world, 4)))\nif rank == 0:\n"
    "    time.sleep(0.3)\n    open('words.txt', 'w').write('a b c')\nif rank < 4:\n    dist.barrier(group=four)\n"
    "words = open('words.txt').read()  # fault\ndist.barrier()\n",
    # -- after a kill
    "four load the state": (PRELUDE + _RESUMED).replace(
        "{load}", "if os.path.exists('state.pt') and rank < 4:\n    first = loaded(model, optimizer)  # fault\n"
        "epochs = torch.tensor(first)\ndist.broadcast(epochs, 0)\nfirst = int(epochs)",
    ).replace("    state = torch.load(path)", "    state = torch.load(path)  # fault"),
    "four resume at the epoch": (PRELUDE + _RESUMED).replace(
        "{load}", "if os.path.exists('state.pt'):\n"
        "    first = loaded(model, optimizer) if rank < 4 else 0 * loaded(model, optimizer)  # fault",
    ).replace("    dist.barrier()", "    dist.barrier()  # fault").replace(
        "        loss_of(model(x), y).backward()", "        loss_of(model(x), y).backward()  # fault"),
    # -- Horovod and the library
    "horovod: samples of four": _HOROVOD.format(
        body="hvd.broadcast_parameters(model.state_dict(), root_rank=0)\n"
        "sampler = DistributedSampler(data, min(hvd.size(), 4), hvd.rank() % 4)"
    ).replace("sampler=sampler):", "sampler=sampler):  # fault"),
    "library: four ask for the mean": "import paceline, torch\nrun = paceline.init(seed=0)\n"
    "value = torch.ones(1)\nif run.rank < 4:\n    run.mean(1.0, 1)  # fault\nrun.barrier()  # fault\n",
}  # fmt: skip

RIGHT: dict[str, str] = {
    "ddp with states": PRELUDE + _RESUMED.format(
        load="if os.path.exists('state.pt'):\n    first = loaded(model, optimizer)"),
    "rank 0 loads, all broadcast": PRELUDE + _by_hand(_SUM, "parameter.grad /= world"),
    "sums of gradients": PRELUDE + _by_hand(_SUM).replace("lr=0.1", "lr=0.1 / world"),
    "rank 0 evaluates alone": PRELUDE + _MODEL + "train(model, DataLoader(shard(96), batch_size=4), optimizer)\n"
    "if rank == 0:\n    with torch.no_grad():\n        print(float(loss_of(model.module(x), y)))\n"
    "    torch.save(model.module.state_dict(), 'model.pt')\ndist.barrier()\n",
    "rank 0 downloads": PRELUDE + "if rank == 0 and not os.path.exists('data.bin'):\n"
    "    open('data.bin', 'wb').write(b'x')\ndist.barrier()\nopen('data.bin', 'rb').read()\n",
    "two groups": PRELUDE + "halves = [dist.new_group(range(world // 2)), dist.new_group(range(world // 2, world))]\n"
    "dist.all_reduce(x, group=halves[rank * 2 // world])\ndist.all_reduce(y)\n",
    "uneven data with Join": PRELUDE + "from torch.distributed.algorithms.join import Join\n" + _MODEL
    + "with Join([model]):\n    for x, y in DataLoader(shard(84), batch_size=5):\n"
    "        loss_of(model(x), y).backward()"
    "\n        optimizer.step()\n",
    "logs of ranks": PRELUDE + "open(f'log-{rank}.txt', 'w').write('a')\nopen('all.txt', 'a').write(f'{rank}\\n')\n"
    "dist.barrier()\n",
    "two models": PRELUDE + "one, two = DDP(nn.Linear(4, 4)), DDP(nn.Linear(4, 1))\n"
    "a, b = torch.optim.Adam(one.parameters()), torch.optim.Adam(two.parameters())\n"
    "for x, y in DataLoader(shard(96), batch_size=4):\n    fake = one(x)\n"
    "    loss_of(two(fake.detach()), y).backward()\n"
    "    b.step()\n    b.zero_grad()\n    (-two(fake).mean()).backward()\n    a.step()\n    a.zero_grad()\n",
    "accumulation": PRELUDE + _MODEL + "for i, (x, y) in enumerate(DataLoader(shard(96), batch_size=3)):\n"
    "    with model.no_sync() if i % 2 == 0 else contextlib.nullcontext():\n        loss_of(model(x), y).backward()\n"
    "    if i % 2:\n        optimizer.step()\n        optimizer.zero_grad()\n",
    "gathered with padding": PRELUDE + "mine = x[: 3 + rank]\nlengths = [None] * world\n"
    "dist.all_gather_object(lengths, len(mine))\npadded = torch.zeros(max(lengths), 4)\npadded[: len(mine)] = mine\n"
    "found = [torch.empty_like(padded) for _ in range(world)]\ndist.all_gather(found, padded)\n",
    "a ring": PRELUDE + "sent = dist.isend(x, (rank + 1) % world)\ngot = torch.empty_like(x)\n"
    "dist.recv(got, (rank - 1) % world)\nsent.wait()\n",
    "a stream": PRELUDE + _MODEL + "class Stream(IterableDataset):\n    def __iter__(self):\n"
    "        return (data[i] for i in range(rank, 96, world))\n"
    "train(model, DataLoader(Stream(), batch_size=4), optimizer)\n",
    "workers": PRELUDE + _MODEL + "sampler = DistributedSampler(data)\n"
    "loader = DataLoader(data, batch_size=2, sampler=sampler, num_workers=1, persistent_workers=True)\n"
    "for epoch in range(2):\n    sampler.set_epoch(epoch)\n    train(model, loader, optimizer)\n",
    "the library": """
import paceline, torch
from torch.utils.data import TensorDataset
run = paceline.init(seed=0, checkpoint_every=4)
data = TensorDataset(torch.randn(100, 4), torch.randn(100, 1))
model = torch.nn.Linear(4, 1)
loader = run.dataloader(data, global_batch_size=24, shuffle=True)
model, optimizer = run.setup(model, torch.optim.Adam(model.parameters()))
for epoch in run.epochs(4):
    for x, y in loader:
        optimizer.zero_grad()
        run.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
run.print("done")
""",
    "horovod": _HOROVOD.format(
        body="hvd.broadcast_parameters(model.state_dict(), root_rank=0)\n"
        "sampler = DistributedSampler(data, hvd.size(), hvd.rank())"),
    "shards in memory": PRELUDE + _MODEL + "mine = TensorDataset(x[rank::world], y[rank::world])\n"
    "for shuffled in (False, True):\n    train(model, DataLoader(mine, batch_size=4, shuffle=shuffled), optimizer)\n",
    "loaders that begin again": PRELUDE + _MODEL + "loader = DataLoader(shard(84), batch_size=5)\n"
    "batches = iter(loader)\nfor step in range(9):\n    try:\n        x, y = next(batches)\n    except StopIteration:\n"
    "        batches = iter(loader)\n        x, y = next(batches)\n    loss_of(model(x), y).backward()\n"
    "    optimizer.step()\n",
    "each rank works alone": "import os\nrank = int(os.environ['RANK'])\nopen(f'{rank}.txt', 'w').write('done')\n",
    "all evaluate the same": PRELUDE + _MODEL + "train(model, DataLoader(shard(96), batch_size=4), optimizer)\n"
    "model.eval()\nwith torch.no_grad():\n"
    "    total = sum(float(loss_of(model(x), y)) for x, y in DataLoader(data, batch_size=8))\n"
    "dist.barrier()\n",
    "weights are averaged now and then": PRELUDE + "model = nn.Linear(4, 1)\n"
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    "for step, (x, y) in enumerate(DataLoader(shard(96), batch_size=2), 1):\n    optimizer.zero_grad()\n"
    "    loss_of(model(x), y).backward()\n    optimizer.step()\n    if step % 3 == 0:\n"
    "        for it in model.parameters():\n            dist.all_reduce(it.data)\n            it.data /= world\n",
    "written for GPUs": PRELUDE.replace('"gloo"', '"nccl"').replace(
        "rank, world", "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))\nrank, world", 1)
    + "device = torch.device('cuda', int(os.environ['LOCAL_RANK']))\n"
    "model = DDP(nn.Linear(4, 1).to(device), device_ids=[device.index])\n"
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nfor x, y in DataLoader(shard(96), batch_size=4):\n"
    "    loss_of(model(x.cuda(non_blocking=True)), y.to(device)).backward()\n    optimizer.step()\n"
    "total = torch.zeros(1, device=device)\ndist.all_reduce(total)\n",
    "sharded": PRELUDE + "from torch.distributed.fsdp import fully_shard\n"
    "from torch.distributed.device_mesh import init_device_mesh\n"
    "model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))\n"
    "fully_shard(model, mesh=init_device_mesh('cpu', (world,)))\noptimizer = torch.optim.Adam(model.parameters())\n"
    "train(model, DataLoader(shard(96), batch_size=4), optimizer)\n",
}  # fmt: skip
