"""What the jobs in written/ have run: `train.py EPOCHS`, or `train.py EPOCHS fail`."""

import sys

import torch

import paceline

run = paceline.init(seed=0, checkpoint_every=3, keep=1)
dataset = torch.utils.data.TensorDataset(torch.rand(32, 4), torch.rand(32, 1))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = run.setup(model, optimizer)
loader = run.dataloader(dataset, global_batch_size=8, shuffle=True)
sums = run.state(loss=0.0, reshard="sum")
for epoch in run.epochs(int(sys.argv[1])):
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        run.backward(loss)
        optimizer.step()
        run.log(loss=loss)
        sums.loss += loss.item()
    run.print(f"epoch {epoch} step {run.step}")
    if sys.argv[2:] == ["fail"]:
        raise RuntimeError(f"attempt {run.attempt}")
