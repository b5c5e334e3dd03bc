"""Train a word-level language model, a GRU, on Python's own language reference.

python examples/language_model.py
paceline run -n 2 examples/language_model.py
"""

import argparse
import math
import re
from collections import Counter
from pydoc_data.topics import topics

import paceline
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--words", type=int, default=60_000, help="how much of the text to read")
    parser.add_argument("--vocabulary", type=int, default=1000)
    parser.add_argument("--context", type=int, default=32, help="words per sequence")
    parser.add_argument("--batch-size", type=int, default=16, help="sequences per step, over all ranks together")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-2)
    return parser.parse_args()


def load_words(number: int) -> list[str]:
    text = " ".join(topics[name] for name in sorted(topics)).lower()
    return re.findall(r"[a-z_]+|[0-9]+|[^\sa-z_0-9]", text)[:number]


class Sequences(Dataset):
    """Pieces of a text, each with the same piece shifted by one word, which a model has to predict."""

    def __init__(self, text: torch.Tensor, context: int) -> None:
        self.text, self.context = text, context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        piece = self.text[index * self.context : (index + 1) * self.context + 1]
        return piece[:-1], piece[1:]


class WordModel(nn.Module):
    """Predicts the next word; the embedding of words is also the matrix that scores them."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.dropout = nn.Dropout(0.2)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.gru(self.dropout(self.embedding(text)))
        return F.linear(self.dropout(hidden), self.embedding.weight)


def main() -> None:
    args = parse_args()
    run = paceline.init(seed=0, checkpoint_every="1m")
    words = load_words(args.words)
    known = ["<rare>", *(word for word, _ in Counter(words).most_common(args.vocabulary - 1))]
    number = {word: index for index, word in enumerate(known)}
    text = torch.tensor([number.get(word, 0) for word in words])
    split = len(text) * 9 // 10
    train = run.dataloader(Sequences(text[:split], args.context), global_batch_size=args.batch_size, shuffle=True)
    validation = run.dataloader(Sequences(text[split:], args.context), batch_size=64, evaluation=True)
    model = WordModel(len(known), args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(train))
    model, optimizer = run.setup(model, optimizer)
    run.register(scheduler=scheduler)
    share = torch.bincount(text[:split], minlength=len(known)).clamp(min=1) / split
    run.print(f"perplexity of word frequencies {math.exp(-share[text[split:]].log().mean().item()):.1f}")

    for epoch in run.epochs(args.epochs):
        model.train()
        for before, after in train:
            loss = F.cross_entropy(model(before).flatten(0, 1), after.flatten())
            optimizer.zero_grad()
            run.backward(loss)
            run.clip_grad_norm(1.0)
            optimizer.step()
            scheduler.step()
            run.log(loss=loss)
        perplexity = math.exp(loss_per_word(run, model, validation))
        run.print(f"epoch {epoch + 1}/{args.epochs} validation perplexity {perplexity:.1f}")
    run.print(" ".join(known[index] for index in write(run.unwrap(model), number["the"], 25)))


@torch.no_grad()
def loss_per_word(run: paceline.Run, model: nn.Module, validation: torch.utils.data.DataLoader) -> float:
    model.eval()
    loss_sum = words = 0
    for before, after in validation:
        loss_sum += F.cross_entropy(model(before).flatten(0, 1), after.flatten(), reduction="sum").item()
        words += after.numel()
    return run.mean(loss_sum, words)


@torch.no_grad()
def write(model: nn.Module, first: int, length: int) -> list[int]:
    text = torch.tensor([[first]], device=model.embedding.weight.device)
    for _ in range(length):
        scores = model(text)[:, -1]
        scores[:, 0] = -math.inf  # no rare word
        text = torch.cat([text, torch.multinomial(scores.softmax(dim=-1), 1)], dim=1)
    return text[0].tolist()


if __name__ == "__main__":
    main()
