"""Train a small character-level GPT on the source of Python's own standard library, on one process or on many.

The script is plain PyTorch; the launcher is your choice:

    python examples/chargpt.py
    torchrun --nproc-per-node 2 examples/chargpt.py
    paceline run -n 2 examples/chargpt.py
"""

import argparse
import os
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=32, help="sequences per step, over all ranks together")
    parser.add_argument("--context", type=int, default=64, help="characters per sequence")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample", type=int, default=300, help="characters to write at the end")
    return parser.parse_args()


def setup() -> tuple[int, int, torch.device]:
    """Join the process group if a launcher has started us; return rank, world size and device."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:  # started as `python chargpt.py`: one process, no group
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


def load_text() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the training and the validation text (every tenth file) as bytes; characters are ASCII."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [torch.tensor(list(file.read_bytes()), dtype=torch.uint8).clamp(max=127) for file in files]
    train = torch.cat([text for i, text in enumerate(texts) if i % 10])
    return train, torch.cat(texts[::10])


def unigram_entropy(text: torch.Tensor) -> float:
    """Return the loss, in nats per character, of a model that knows only how frequent each character is."""
    share = torch.bincount(text.int()) / len(text)
    return -(share * share.clamp(min=1e-12).log()).sum().item()


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
        self.context = context
        self.characters, self.positions = nn.Embedding(128, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 128))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        where = torch.arange(text.shape[1], device=text.device)
        return self.head(self.blocks(self.characters(text) + self.positions(where)))


def cross_entropy(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the mean loss, in nats per character, of predicting each character from those before it."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def validate(model: nn.Module, text: torch.Tensor, context: int, batches: int = 20) -> float:
    """Return the mean loss over evenly spaced pieces of the validation text."""
    starts = torch.linspace(0, len(text) - context - 1, 32 * batches).long()
    pieces = text[starts[:, None] + torch.arange(context + 1)].long()
    return sum(cross_entropy(model, batch).item() for batch in pieces.chunk(batches)) / batches


@torch.no_grad()
def write(model: CharGPT, prompt: str, length: int, device: torch.device) -> str:
    """Continue the prompt, one character at a time."""
    text = torch.tensor([list(prompt.encode())], device=device)
    for _ in range(length):
        logits = model(text[:, -model.context :])[:, -1] / 0.8
        text = torch.cat([text, torch.multinomial(logits.softmax(dim=-1), 1)], dim=1)
    return bytes(text[0].tolist()).decode()


def train_and_write(args: argparse.Namespace, rank: int, world_size: int, device: torch.device) -> None:
    torch.manual_seed(args.seed)
    train_text, validation_text = load_text()

    model = CharGPT(args.context, args.layers, args.heads, args.width).to(device)
    ddp = model  # the model to train: wrapped, it averages the gradients of all ranks during backward
    if dist.is_initialized():
        ddp = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=max(args.steps, 2), pct_start=0.1)
    share = max(1, args.batch_size // world_size)  # sequences per rank and step
    torch.manual_seed(args.seed + rank)  # from here on, each rank draws its own sequences
    if rank == 0:
        print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(train_text):,} characters of text")

    start = time.perf_counter()
    for step in range(1, args.steps + 1):
        starts = torch.randint(len(train_text) - args.context, (share, 1))
        loss = cross_entropy(ddp, train_text[starts + torch.arange(args.context + 1)].long().to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == args.steps:
            loss = loss.detach() / world_size
            if dist.is_initialized():  # the mean of all ranks' losses; every rank must take part
                dist.all_reduce(loss)
            if rank == 0:
                speed = step * share * world_size * args.context / (time.perf_counter() - start)
                print(f"step {step}/{args.steps} loss {loss.item():.3f} {speed:,.0f} tokens/s", flush=True)

    if (
        rank == 0
    ):  # all ranks have the same weights, so one is enough; `model` does not wait for the others as `ddp` would
        loss = validate(model.eval(), validation_text.to(device), args.context)
        print(f"validation loss {loss:.3f}, unigram entropy {unigram_entropy(validation_text):.3f}, {world_size} ranks")
        print(write(model, "def ", args.sample, device))


if __name__ == "__main__":
    args = parse_args()
    train_and_write(args, *setup())
    teardown()
