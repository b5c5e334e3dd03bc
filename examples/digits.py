"""Train a small convnet on 1,797 real handwritten digits, on one process or on many.

The script is plain PyTorch; the launcher is your choice:

    python examples/digits.py
    torchrun --nproc-per-node 2 examples/digits.py
    paceline run -n 2 examples/digits.py
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=64, help="samples per step, over all ranks together")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def setup() -> tuple[int, int, torch.device]:
    """Join the process group if a launcher has started us; return rank, world size and device."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:  # started as `python digits.py`: one process, no group
        return 0, 1, device
    # The launcher has set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT: nothing to pass here.
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return dist.get_rank(), dist.get_world_size(), device


def teardown() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
        # PyTorch 2.13 with gloo: its threads drop the last tensors a moment later; exiting before that can abort.
        time.sleep(0.1)


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test digits. The split is always the same, so all ranks (and all runs) agree."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # (1797, 1, 8, 8), in [0, 1]
    labels = torch.tensor(digits.target)
    train, test = train_test_split(range(len(labels)), test_size=0.2, random_state=0, stratify=digits.target)
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def sum_over_ranks(values: torch.Tensor) -> list[float]:
    """Sum the values of all ranks; every rank gets the totals."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values.tolist()


def train_and_test(args: argparse.Namespace, rank: int, world_size: int, device: torch.device) -> None:
    torch.manual_seed(args.seed)
    train_set, test_set = load_data()

    model = build_model().to(device)
    if dist.is_initialized():  # averages the gradients of all ranks during backward
        model = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    # Each rank draws its share of every batch, so the optimizer sees the same batch size on any number of ranks.
    sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank, seed=args.seed)
    train_loader = DataLoader(train_set, batch_size=max(1, args.batch_size // world_size), sampler=sampler)
    # Every test digit goes to exactly one rank. (A DistributedSampler would repeat some to make the shares equal.)
    test_loader = DataLoader(Subset(test_set, range(rank, len(test_set), world_size)), batch_size=256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    torch.manual_seed(args.seed + rank)  # from here on, each rank has its own dropout

    start = time.perf_counter()
    for epoch in range(args.epochs):
        model.train()
        sampler.set_epoch(epoch)  # another order each epoch, the same on all ranks
        seen = torch.zeros(2, dtype=torch.float64)  # sum of losses, number of samples
        for images, labels in train_loader:
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += torch.tensor([loss.item() * len(labels), len(labels)])
        loss_sum, samples = sum_over_ranks(seen.to(device))
        if rank == 0:
            print(f"epoch {epoch + 1}/{args.epochs} loss {loss_sum / samples:.4f}", flush=True)
    seconds = time.perf_counter() - start

    model.eval()
    counts = torch.zeros(2, dtype=torch.float64, device=device)  # correct, all
    with torch.no_grad():
        for images, labels in test_loader:
            correct = (model(images.to(device)).argmax(dim=1) == labels.to(device)).sum().item()
            counts += torch.tensor([correct, len(labels)], device=device)
    correct, total = sum_over_ranks(counts)
    if rank == 0:
        print(f"test accuracy {correct / total:.4f} ({correct:.0f}/{total:.0f}), {world_size} ranks, {seconds:.1f} s")


if __name__ == "__main__":
    args = parse_args()
    train_and_test(args, *setup())
    teardown()
