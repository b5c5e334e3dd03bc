"""Train a small character-level GPT on the source of Python's own standard library."""

import argparse
import sysconfig
from pathlib import Path

import paceline
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import data


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--characters", type=int, default=2_000_000, help="how much of the text to train on")
    parser.add_argument("--batch-size", type=int, default=32, help="windows per step")
    parser.add_argument("--context", type=int, default=64, help="characters per window")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


class Windows(data.Dataset):
    """Pieces of a text, each with the same piece shifted by one character, which a model has to predict."""

    def __init__(self, text: torch.Tensor, context: int) -> None:
        self.text = text
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self.text[index * self.context : (index + 1) * self.context + 1].long()
        return window[:-1], window[1:]


def load_text(characters: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the training text and a tenth as much for validation (every tenth file) as bytes; characters are ASCII."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [torch.tensor(list(file.read_bytes()), dtype=torch.uint8).clamp(max=127) for file in files]
    train = torch.cat([text for i, text in enumerate(texts) if i % 10])
    return train[:characters], torch.cat(texts[::10])[: characters // 10]


class Block(nn.Module):
    """Causal self-attention and a two-layer network, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))  # (batch, time, 3, heads, head width)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class CharGPT(nn.Module):
    """A decoder-only transformer over the 128 ASCII characters."""

    def __init__(self, context: int, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(128, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 128))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        where = torch.arange(text.shape[1], device=text.device)
        return self.head(self.blocks(self.characters(text) + self.positions(where)))


def main() -> None:
    args = parse_args()
    run = paceline.init(seed=args.seed, checkpoint_every=100)
    print = run.print  # on rank 0
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    train_text, validation_text = load_text(args.characters)
    train = run.dataloader(Windows(train_text, args.context), global_batch_size=args.batch_size, shuffle=True)
    validation = run.dataloader(Windows(validation_text, args.context), batch_size=256, evaluation=True)
    model = CharGPT(args.context, args.layers, args.heads, args.width).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    steps = args.epochs * len(train)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=steps, pct_start=0.1)
    model, optimizer = run.setup(model, optimizer)
    run.register(scheduler=scheduler)

    for epoch in run.epochs(args.epochs):
        model.train()
        for text, following in train:
            text, following = text.to(device), following.to(device)
            loss = F.cross_entropy(model(text).flatten(0, 1), following.flatten())
            optimizer.zero_grad()
            run.backward(loss)
            optimizer.step()
            scheduler.step()
            step = scheduler.last_epoch  # which counts the steps of all epochs
            if step % 50 == 0 or step == steps:
                print(f"step {step}/{steps} loss {loss.item():.3f} learning rate {scheduler.get_last_lr()[0]:.1e}")

        model.eval()
        loss_sum, windows = 0.0, 0
        with torch.no_grad():
            for text, following in validation:
                text, following = text.to(device), following.to(device)
                loss = F.cross_entropy(model(text).flatten(0, 1), following.flatten())
                loss_sum += loss.item() * len(text)
                windows += len(text)
        loss = run.mean(loss_sum, windows)
        print(f"epoch {epoch + 1}/{args.epochs} validation loss {loss:.3f}")


if __name__ == "__main__":
    main()
