"""Scripts that are slow for one reason each, which is gone with FIXED in the environment; each begins with PRELUDE.

They train for SECONDS, and the last line of rank 0 is how long a step has taken.
"""

from __future__ import annotations

PRELUDE = """
import logging, os, sys, time
import torch, torch.distributed as dist
FIXED = "FIXED" in os.environ
SECONDS = float(os.environ.get("SECONDS", "7"))
RANK = int(os.environ["RANK"])
torch.set_num_threads(1)

def work(seconds):  # of computing
    end = time.thread_time() + seconds
    a = torch.randn(64, 64)
    while time.thread_time() < end:
        a = a @ a / 64

class Steps:
    begun, count = None, 0
    def __call__(self):
        self.begun = self.begun or time.monotonic()
        self.count += 1
        is_over = time.monotonic() > self.begun + SECONDS
        if is_over and RANK == 0:
            print("step", (time.monotonic() - self.begun) / max(self.count - 1, 1))
        return is_over
step = Steps()
"""

_LOADER = """
class Own(torch.utils.data.Dataset):
    def __len__(self): return 1_000_000
    def __getitem__(self, index):
        {reads}
        return torch.ones(1)
loader = torch.utils.data.DataLoader(Own(), batch_size=8, num_workers={workers})
for batch in loader:
    work(0.04)
    if step(): break
"""
_LIBRARY = """
import paceline
class Own(torch.utils.data.Dataset):
    def __len__(self): return 1_000_000
    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.ones(8)
run = paceline.init()
model = run.setup(torch.nn.Linear(8, 8))
for batch in run.dataloader(Own(), batch_size=8, num_workers=8 if FIXED else 0):
    run.backward(model(batch).sum())
    work(0.01)
    if step(): break
run.close()
"""
_MANY_FILES = """
if not os.path.exists("files"):
    os.mkdir("files")
    for number in range(2000):
        with open(f"files/{number}", "wb") as file: file.write(bytes(300))
    open("one", "wb").write(bytes(300 * 2000))
one = open("one", "rb").read()
class Own(torch.utils.data.Dataset):
    def __len__(self): return 1_000_000
    def __getitem__(self, index):
        if FIXED:
            return [len(one[i * 300:(i + 1) * 300]) for i in range(1000)]
        found = []
        for i in range(1000):
            with open(f"files/{i}", "rb") as file: found.append(len(file.read()))
        return found
for batch in torch.utils.data.DataLoader(Own(), batch_size=2):
    work(0.02)
    if step(): break
"""
_ALONE = """
dist.init_process_group("gloo")
t = torch.ones(8)
def evaluate():
    if FIXED: work(0.1 / dist.get_world_size())
    elif RANK == 0: work(0.1)
while True:
    work(0.05)
    evaluate()
    t[0] = step()
    dist.broadcast(t, 0)
    if t[0]: break
"""
_SLOW_RANK = """
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
t = torch.ones(8)
while True:
    work(0.005)
    if RANK == 1 and not FIXED: time.sleep(0.06)
    model(torch.ones(4, 8)).sum().backward()
    t[0] = step()
    dist.broadcast(t, 0)
    if t[0]: break
"""
_LATE = """
class Own(torch.utils.data.Dataset):
    def __len__(self): return 1_000_000
    def __getitem__(self, index):
        if index % 11 == 0: time.sleep(0.4)
        return torch.ones(1)
for batch in torch.utils.data.DataLoader(Own(), num_workers=2, prefetch_factor=8 if FIXED else 2):
    work(0.02)
    if step(): break
"""
_EPOCHS = """
loader = torch.utils.data.DataLoader(torch.ones(10, 8), num_workers=2, persistent_workers=FIXED)
while SECONDS:
    for batch in loader:
        work(0.01)
        if step():
            SECONDS = 0
            break
"""
_FAR = """
there, end = os.pipe()
if os.fork() == 0:
    os.close(there)
    while True:
        os.write(end, bytes(100_000))
        time.sleep(0.01)
class Own(torch.utils.data.Dataset):
    def __len__(self): return 1_000_000
    def __getitem__(self, index):
        left = 0 if FIXED else 500_000
        while left: left -= len(os.read(there, left))
        return torch.ones(1)
for batch in torch.utils.data.DataLoader(Own()):
    work(0.02)
    if step(): break
"""
_GRADIENTS = """
dist.init_process_group("gloo")
model = torch.nn.Sequential(*[torch.nn.Linear(100, 100) for _ in range(40)])
ddp = torch.nn.parallel.DistributedDataParallel(model, {options})
t = torch.ones(8)
while True:
    ddp(torch.ones(4, 100)).sum().backward()
    t[0] = step()
    dist.broadcast(t, 0)
    if t[0]: break
"""
_BY_HAND = """
dist.init_process_group("gloo")
model = torch.nn.Sequential(*[torch.nn.Linear(100, 100) for _ in range(40)])
ddp = torch.nn.parallel.DistributedDataParallel(model) if FIXED else model
loader, t = torch.utils.data.DataLoader(torch.ones(100_000, 100), batch_size=4), torch.ones(8)
for batch in loader:
    ddp(batch).sum().backward()
    if not FIXED:
        for parameter in model.parameters(): dist.all_reduce(parameter.grad)
    t[0] = step()
    dist.broadcast(t, 0)
    if t[0]: break
"""
_OPTIMIZER = """
model = torch.nn.Linear(2000, 2000)
optimizer = torch.optim.Adam(model.parameters())
while True:
    model(torch.ones(2 if FIXED else 1, 2000)).sum().backward()
    optimizer.step()
    if step() or (FIXED and step()): break  # a step of one sample
"""
_EACH = "while not step():\n    work(0.05)\n    {what}\n"

# name → ranks, script, what is said of it.
CAUSES: dict[str, tuple[int, str, str]] = {
    "no workers": (1, _LOADER.format(reads="work(0.005)", workers="1 if FIXED else 0"), "0 workers read"),
    # What helps depends on whether other processes leave a core free.
    "data, with the library": (1, _LIBRARY,
                               "[5-9]. % of each step waits for data at script.py.*(num_workers=|no core is free)"),
    "slow storage": (1, _LOADER.format(reads="time.sleep(0.01)", workers="2 if FIXED else 0"),
                     "0 workers read it from slow storage; num_workers="),
    "too few workers": (1, _LOADER.format(reads="time.sleep(0.02)", workers="4 if FIXED else 1"),
                        "1 workers are too few|waits for the workers"),
    "late batches": (1, _LATE, "workers have nothing to load; prefetch_factor=8"),
    "epochs": (1, _EPOCHS, "persistent_workers=True"),
    "far storage": (1, _FAR, "from slow storage, .* while the local temporary folder gives"),
    "unused parameters": (2, _GRADIENTS.format(options="find_unused_parameters=not FIXED"), "find_unused_parameters"),
    "small buckets": (2, _GRADIENTS.format(options="bucket_cap_mb=25 if FIXED else 0.05"), "bucket_cap_mb=25"),
    "exchange by hand": (2, _BY_HAND, "collectives of the script per second"),
    "small batches": (1, _OPTIMIZER, "a batch twice as large"),
    "many small files": (1, _MANY_FILES, "many small files"),
    "evaluation on one rank": (2, _ALONE, "wait for rank 0, which evaluates alone"),
    "a slow rank": (2, _SLOW_RANK, "wait for rank 1, which is at script.py"),
    "checkpoints": (1, "big = torch.ones(10_000_000)\nwhile not step():\n    work(0.05)\n"
                       "    if not FIXED or step.count % 10 == 0: torch.save(big, 'saved')\n",
                    "writes or reads checkpoints"),
    "logging": (1, "logging.basicConfig(level=10)\n" + _EACH.format(
        what="for i in range(2000 if not FIXED or step.count % 100 == 0 else 0): logging.info('loss %f', 0.1)"),
        "logs and prints"),
    "printing": (1, _EACH.format(
        what="\n    for i in range(20_000 if not FIXED or step.count % 100 == 0 else 0):\n        print('loss', i)"),
        "logs and prints"),
    "single values": (1, "t = torch.randn(100_000)\nwhile not step():\n    work(0.02)\n"
                         "    if FIXED: (t > 0).sum().item(); continue\n    right = 0\n"
                         "    for value in t:\n        right += value.item() > 0\n",
                      "takes single values from tensors"),
}  # fmt: skip
