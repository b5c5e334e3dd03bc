"""Train for ever; after each step, rank 0 appends the attempt and the time to the file in argv[1]."""

import sys
import time

import torch

import paceline

run = paceline.init(seed=1, checkpoint_every=5, progress=False)
model, optimizer = run.setup(model := torch.nn.Linear(1, 1), torch.optim.SGD(model.parameters(), 0.01))
train = run.dataloader(torch.utils.data.TensorDataset(torch.ones(1000, 1)), batch_size=4)
for _ in run.epochs(1_000_000):
    for (numbers,) in train:
        run.backward(model(numbers).mean())
        optimizer.step()
        optimizer.zero_grad()
        if run.is_main:
            with open(sys.argv[1], "a") as file:
                print(run.attempt, time.monotonic(), file=file)
        time.sleep(0.01)
