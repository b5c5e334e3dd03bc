"""Trains on numbered samples, and records which of them each step used, before the step can be committed."""

import os
import sys
import time

import torch
from torch.utils.data import Dataset

import paceline


class Numbered(Dataset):
    """Sample i is (i, features of i)."""

    def __len__(self):
        return 199

    def __getitem__(self, index):
        return index, torch.tensor([index % 7, index % 11, 1.0]) / 10


folder, epochs, workers, *own = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]
run = paceline.init(seed=3, checkpoint_dir=own[0] if own else f"{folder}/checkpoints", checkpoint_every=3)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
model, optimizer = run.setup(model, optimizer)
train = run.dataloader(Numbered(), global_batch_size=16, shuffle=True, num_workers=workers)
start = run.broadcast_object(time.time_ns())
records = open(f"{folder}/records/{start}-{run.rank}", "a")  # noqa: SIM115 - it is to stay open till the end
resumed = False
for epoch in run.epochs(epochs):
    if not resumed:
        print("start", run.step, file=records, flush=True)
        resumed = True
    for indices, features in train:
        real = indices[: train.samples].tolist()
        print("step", run.step + 1, epoch, *real, file=records, flush=True)
        run.backward((model(features) - 1).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
if run.is_main:
    torch.save([p.detach() for p in model.parameters()], f"{folder}/weights.pt")
run.close()
os.close(1)
