"""Five models of the usual kinds, each with a batch, large enough to see their memory."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

WORDS = 2000


class Perceptron(nn.Module):
    """Layers one after the other."""

    def __init__(self, width: int = 1792, depth: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.layers(x))
        return found


class Convolutions(nn.Module):
    """Blocks with batch norm and a shortcut."""

    def __init__(self, width: int = 448, depth: int = 12) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
            )
            for _ in range(depth)
        )  # fmt: skip
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = torch.relu(x + block(x))
        found: Tensor = self.head(x.mean((2, 3)))
        return found


class Transformer(nn.Module):
    """Encoder layers of torch, and a head that has the embedding's weights."""

    def __init__(self, width: int = 768, depth: int = 10) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True) for _ in range(depth)
        )
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(x)
        return found[:, -1]


class Recurrent(nn.Module):
    """Layers of LSTM, each a module of its own."""

    def __init__(self, width: int = 1280, depth: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(depth))
        self.head = nn.Linear(width, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x, _ = layer(x)
        found: Tensor = self.head(x[:, -1])
        return found


class _Norm(nn.Module):
    """Root mean square norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class _Layer(nn.Module):
    """Attention with rotary positions and fewer heads of keys than of queries, and a gated perceptron."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.first, self.second = _Norm(width), _Norm(width)
        self.query, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, groups * self.size, bias=False)
        self.value = nn.Linear(width, groups * self.size, bias=False)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        count, length, _ = x.shape
        y = self.first(x)
        query = _turned(self.query(y).view(count, length, self.heads, self.size).transpose(1, 2), cos, sin)
        key = _turned(self.key(y).view(count, length, self.groups, self.size).transpose(1, 2), cos, sin)
        value = self.value(y).view(count, length, self.groups, self.size).transpose(1, 2)
        key, value = (each.repeat_interleave(self.heads // self.groups, 1) for each in (key, value))
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(count, length, -1))
        y = self.second(x)
        found: Tensor = x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))
        return found


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class Decoder(nn.Module):
    """A language model of the usual kind; its angles are a buffer that is not in the state_dict."""

    def __init__(self, width: int = 640, depth: int = 12) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(_Layer(width, 8, 2) for _ in range(depth))
        self.norm = _Norm(width)
        self.head = nn.Linear(width, WORDS, bias=False)
        size = width // 8
        self.register_buffer("speeds", 10000.0 ** (-torch.arange(0, size, 2) / size), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.speeds, Tensor)
        angles = torch.outer(torch.arange(x.shape[1], device=x.device), self.speeds).repeat(1, 2)
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin())
        found: Tensor = self.head(self.norm(x))
        return found[:, -1]


class Architecture(NamedTuple):
    """A model, what a sample is made of, the number of classes, and names of units that are not found."""

    build: Callable[..., nn.Module]
    sample: Callable[[torch.Generator], Tensor]
    classes: int
    units: tuple[str, ...] | None = None


def _words(numbers: torch.Generator) -> Tensor:
    return torch.randint(WORDS, (32,), generator=numbers)


ARCHITECTURES = {
    "mlp": Architecture(Perceptron, lambda numbers: torch.randn(1792, generator=numbers), 10),
    "convnet": Architecture(Convolutions, lambda numbers: torch.randn(3, 16, 16, generator=numbers), 10),
    "transformer": Architecture(Transformer, _words, WORDS),
    "lstm": Architecture(Recurrent, _words, WORDS),
    "decoder": Architecture(Decoder, _words, WORDS),
}
