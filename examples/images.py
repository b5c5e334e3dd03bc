"""Classify images with a small residual network: mixed precision (AMP), and an average of the weights (EMA) to test.

python examples/images.py
paceline run -n 2 examples/images.py
"""

import argparse

import paceline
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset, TensorDataset


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=64, help="images per step, over all ranks together")
    parser.add_argument("--width", type=int, default=8, help="channels of the first block")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--ema", type=float, default=0.95, help="weight of the old average in each step")
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    return parser.parse_args()


class Shifted(Dataset):
    """Images, each moved by up to a pixel in a random direction, and their labels."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.images, self.labels = F.pad(images, (1, 1, 1, 1)), labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        top, left = torch.randint(0, 3, (2,)).tolist()
        return self.images[index, :, top : top + 8, left : left + 8], self.labels[index]


def load_data() -> tuple[Dataset, Dataset]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # (1797, 1, 8, 8), in [0, 1]
    labels = torch.tensor(digits.target)
    train, test = train_test_split(range(len(labels)), test_size=0.2, random_state=0, stratify=digits.target)
    return Shifted(images[train], labels[train]), TensorDataset(images[test], labels[test])


class Block(nn.Module):
    """Two convolutions, added to their input."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(),
            nn.Conv2d(outside, outside, 3, padding=1, bias=False),
            nn.BatchNorm2d(outside),
        )
        self.shortcut = nn.Conv2d(inside, outside, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def build_model(width: int) -> nn.Module:
    return nn.Sequential(
        Block(1, width, 1), Block(width, 2 * width, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10)
    )


def main() -> None:
    args = parse_args()
    run = paceline.init(seed=0, checkpoint_every=100)
    train_set, test_set = load_data()
    train = run.dataloader(train_set, global_batch_size=args.batch_size, shuffle=True, drop_last=True)
    test = run.dataloader(test_set, batch_size=256, evaluation=True)
    model = build_model(args.width)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    # bf16 runs forward passes under torch.autocast; weights and gradients stay fp32, so nothing has to be scaled.
    model, optimizer = run.setup(model, optimizer, strategy=paceline.Strategy(precision=args.precision))
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(args.ema))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 10 * args.lr, total_steps=args.epochs * len(train))
    run.register(ema=ema, scheduler=scheduler)

    for epoch in run.epochs(args.epochs):
        model.train()
        for images, labels in train:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            run.backward(loss)
            optimizer.step()
            scheduler.step()
            ema.update_parameters(model)
            run.log(loss=loss)
        run.print(f"epoch {epoch + 1}/{args.epochs} accuracy {accuracy(run, model, test):.4f}")
    run.update_bn(train, ema)  # batch norm of averaged weights has other statistics
    run.print(f"accuracy of the average {accuracy(run, ema, test):.4f}")


@torch.no_grad()
def accuracy(run: paceline.Run, model: nn.Module, test: torch.utils.data.DataLoader) -> float:
    """The share of test images that are read right, over all ranks."""
    model.eval()
    right = total = 0
    for images, labels in test:
        right += (model(images).argmax(dim=1) == labels).sum().item()
        total += len(labels)
    return run.mean(right, total)


if __name__ == "__main__":
    main()
