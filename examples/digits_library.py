"""The digits of `digits.py` with the library: one script for one process and for many, which resumes where it stopped.

python examples/digits_library.py
paceline run -n 2 --max-restarts 3 examples/digits_library.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import TensorDataset

import paceline


def load_data() -> tuple[TensorDataset, TensorDataset]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train, test = train_test_split(range(len(labels)), test_size=0.2, random_state=0, stratify=digits.target)
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


run = paceline.init(seed=0, checkpoint_every=100)
model = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10),
)  # fmt: skip
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
model, optimizer = run.setup(model, optimizer)
train_set, test_set = load_data()
train = run.dataloader(train_set, global_batch_size=64, shuffle=True)
test = run.dataloader(test_set, global_batch_size=256, evaluation=True)

for epoch in run.epochs(10):
    model.train()
    for images, labels in train:
        loss = F.cross_entropy(model(images), labels)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss)
    model.eval()
    with torch.no_grad():
        right = sum((model(images).argmax(1) == labels).sum().item() for images, labels in test)
    accuracy = run.all_reduce(right) / len(test_set)
    if run.is_main:
        print(f"epoch {epoch + 1} test accuracy {accuracy:.4f}, {run.world_size} ranks")
run.close()
