"""Trains on numbered samples, and records which of them each step used, before the step can be committed."""

import os
import sys
import time

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import paceline

SAMPLES = 199


def sample(index):
    return index, torch.tensor([index % 7, index % 11, 1.0]) / 10


class Numbered(Dataset):
    """Sample i is (i, features of i)."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return sample(index)


class Stateful(IterableDataset):
    """The same samples as a stream that says where it stands; its state is that of the beginning at the end."""

    def __init__(self):
        self.next = 0

    def bounds(self):
        return 0, 1

    def __iter__(self):
        first, step = self.bounds()
        while first + self.next * step < SAMPLES:
            index = first + self.next * step
            self.next += 1
            yield sample(index)
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class StatefulSplit(Stateful):
    """The same, split over workers."""

    def bounds(self):
        worker = get_worker_info()
        return (worker.id, worker.num_workers) if worker else (0, 1)


class Split(IterableDataset):
    """The samples as a stream without a state, split over workers."""

    def __iter__(self):
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        yield from map(sample, range(first, SAMPLES, step))


DATA = {"map": Numbered, "stateful": Stateful, "stateful-split": StatefulSplit, "split": Split}

folder, epochs, workers, *own = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]
run = paceline.init(seed=3, checkpoint_dir=own[0] if own else f"{folder}/checkpoints", checkpoint_every=3)
torch.manual_seed(0)
shard = {"": False, "all": True}.get(os.environ.get("SHARD", ""), "optimizer")
drop = 0.2 if "SHARD" not in os.environ else 0.0  # what is dropped depends on the number of ranks
model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(drop), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
model, optimizer = run.setup(model, optimizer, strategy=paceline.Strategy(shard=shard))
kind = os.environ.get("DATA", "map")
train = run.dataloader(DATA[kind](), global_batch_size=16, shuffle=kind == "map", num_workers=workers)
start = run.broadcast_object(time.time_ns())
records = open(f"{folder}/records/{start}-{run.rank}", "a")  # noqa: SIM115 - it is to stay open till the end
resumed = False
for epoch in run.epochs(epochs):
    if not resumed:
        print("start", run.step, file=records, flush=True)
        resumed = True
    for indices, features in train:
        while epoch == epochs - 1 and os.path.exists(f"{folder}/hold") and not run._steps._watch.stop_signal:
            print("held", file=records, flush=True)  # those who count lines go on
            time.sleep(0.01)
        if os.path.exists(f"{folder}/slow"):
            time.sleep(0.5)
        real = indices[: train.samples].tolist()
        print("step", run.step + 1, epoch, *real, file=records, flush=True)
        run.backward((model(features) - 1).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
weights = [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for p in model.parameters()]
if run.is_main:
    torch.save(weights, f"{folder}/weights.pt")
    print("end", run.step, file=records, flush=True)
run.close()
os.close(1)
