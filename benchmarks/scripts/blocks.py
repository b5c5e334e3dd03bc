"""A model like a transformer, each block two layers with a shortcut, and ways to shard it by hand."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WORDS = 1000


class Block(nn.Module):
    """A mixing layer and a perceptron, 9 width² parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.first(x))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class Blocks(nn.Module):
    """An embedding, blocks, and a head."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build(width: int, depth: int) -> Blocks:
    """The model, with the same numbers in each rank."""
    torch.manual_seed(0)
    return Blocks(width, depth)


def make_batch(rank: int, words: int) -> tuple[Tensor, Tensor]:
    """Words, and those to predict."""
    numbers = torch.Generator().manual_seed(rank)
    return torch.randint(WORDS, (words,), generator=numbers), torch.randint(WORDS, (words,), generator=numbers)


def shard_by_hand(model: Blocks) -> Blocks:
    """FSDP2 as its tutorial says: each block, then the rest."""
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
