"""Train a small convnet on 1,797 real handwritten digits."""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils import data


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def load_data() -> tuple[data.TensorDataset, data.TensorDataset]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # (1797, 1, 8, 8), in [0, 1]
    labels = torch.tensor(digits.target)
    train, test = train_test_split(range(len(labels)), test_size=0.2, random_state=0, stratify=digits.target)
    return data.TensorDataset(images[train], labels[train]), data.TensorDataset(images[test], labels[test])


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


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    train_set, test_set = load_data()
    train = data.DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    test = data.DataLoader(test_set, batch_size=256)
    model = build_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    sums = argparse.Namespace(loss=0.0, samples=0)  # of an epoch

    for epoch in range(args.epochs):
        model.train()
        for images, labels in train:
            images, labels = images.to(device), labels.to(device)
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sums.loss += loss.item() * len(labels)
            sums.samples += len(labels)

        model.eval()
        correct, total = 0, 0
        with torch.no_grad():
            for images, labels in test:
                images, labels = images.to(device), labels.to(device)
                correct += (model(images).argmax(dim=1) == labels).sum().item()
                total += len(labels)
        loss, accuracy = sums.loss / sums.samples, correct / total
        sums.loss, sums.samples = 0.0, 0
        print(f"epoch {epoch + 1}/{args.epochs} loss {loss:.4f} test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
