"""A training script as users write it: the model, the data, and the lines of paceline."""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from typing_extensions import assert_type

import paceline
from paceline import AllReduce, CheckpointError, DiLoCo, LocalSGD, PowerSGD, Run, Strategy, TopK

METHODS = [AllReduce("fp16"), PowerSGD(rank=2), TopK(0.05), LocalSGD(every=4), DiLoCo(every=8)]
STRATEGIES = [Strategy(sync=method) for method in METHODS] + [
    Strategy(sync="auto", shard="auto", precision="bf16", accumulate=2)
]


class Net(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the predictions."""
        predictions: Tensor = self.layer(inputs)
        return predictions


def train(run: Run, strategy: Strategy, epochs: int) -> float:
    """Train a model, and return the mean loss."""
    with run.build():
        model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = run.setup(model, optimizer, strategy=strategy)
    dataset = TensorDataset(torch.rand(64, 8), torch.rand(64, 1))
    loader = run.dataloader(dataset, global_batch_size=16, shuffle=True)
    best = run.state(loss=float("inf"))
    losses: list[float] = []
    for epoch in run.epochs(epochs):
        assert_type(epoch, int)
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            run.backward(loss)
            assert_type(run.clip_grad_norm(1.0), Tensor)
            optimizer.step()
            run.log(loss=loss, epoch=epoch)
            losses.append(loss.item())
        best.loss = min(best.loss, losses[-1])
    for letter in run.steps("text"):
        assert_type(letter, str)
    assert_type(run.resume(), bool)
    assert_type(run.step, int)
    assert_type(run.unwrap(model), nn.Module)
    return assert_type(run.mean(sum(losses), len(losses)), float)


def main() -> None:
    """Join the other ranks and train."""
    try:
        with paceline.init(seed=0, checkpoint_every="5m") as run:
            run.print(train(run, STRATEGIES[0], epochs=2))
    except CheckpointError as error:
        raise SystemExit(str(error)) from error


def work(scale: float) -> float:
    """Return a number on each rank."""
    with paceline.init() as run:
        return run.rank * scale


if __name__ == "__main__":
    assert_type(paceline.launch(work, (2.0,), nproc=2), list[float])
    main()
