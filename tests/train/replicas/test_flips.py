"""Single flipped bits, at random places of models and optimizers: each is named, or is gone with the next step.

PACELINE_FLIPS says how many there are in all.
"""

from __future__ import annotations

import collections
import contextlib
import os
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.conftest import eventually
from tests.train.launching import launch

import paceline

if TYPE_CHECKING:
    from pathlib import Path

_FLIPS = int(os.environ.get("PACELINE_FLIPS", "24"))
_STEPS = 3  # before a flip, and until it must be named
_METHODS = [
    "allreduce", "fp16", "bf16", "int8", paceline.PowerSGD(rank=2, warmup=1), "topk",
    paceline.LocalSGD(every=2, warmup=1), paceline.DiLoCo(every=2, fragments=1, overlap=False), "auto",
]  # fmt: skip


class _Lstm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = torch.nn.LSTM(6, 8, batch_first=True), torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class _Transformer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(11, 8)
        self.layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = torch.nn.Linear(8, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.words(x)))[:, -1]


def _models() -> dict[str, tuple[torch.nn.Module, torch.Tensor]]:
    words = torch.randint(0, 11, (4, 5))
    return {
        "mlp": (
            torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)),
            torch.randn(4, 6),
        ),
        "convnet": (
            torch.nn.Sequential(
                torch.nn.Conv2d(2, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(36, 3)
            ),
            torch.randn(4, 2, 5, 5),
        ),
        "transformer": (_Transformer(), words),
        "lstm": (_Lstm(), torch.randn(4, 5, 6)),
        "bag": (torch.nn.Sequential(torch.nn.EmbeddingBag(11, 6), torch.nn.Linear(6, 3)), words),
    }


class _Trial:
    """A model that trains, in which a rank flips a bit."""

    def __init__(self, run: paceline.Run, name: str, method: Any) -> None:
        self._run = run
        torch.manual_seed(run.rank)
        self.net, self._x = _models()[name]
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        strategy = paceline.Strategy(sync=method)
        self._model, self.optimizer = run.setup(self.net, self.optimizer, strategy=strategy)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self._run.backward(self._model(self._x).square().mean())
        self.optimizer.step()

    def is_equal(self) -> bool:
        """Whether all ranks have the same bits; a collective."""
        mine = [each.detach().view(-1).view(torch.uint8).tolist() for each in self.net.parameters()]
        everyone = self._run.gather_objects(mine)
        return all(theirs == everyone[0] for theirs in everyone)


def _flip(tensor: torch.Tensor, choose: random.Random) -> None:
    octets = tensor.detach().view(-1).view(torch.uint8)
    octets[choose.randrange(len(octets))] ^= 1 << choose.randrange(8)


def _trials(seed: int, count: int, folder: Path) -> dict[str, int]:
    """Flip bits, each in a run of its own; returns how many were found in which way."""
    choose = random.Random(seed)
    found: collections.Counter[str] = collections.Counter()
    for number in range(count):
        run = paceline.init(checkpoint_dir=folder / f"{number}", progress=False, timeout=300)
        found[_trial(run, choose)] += 1
        run.close()
    return dict(found)


def _trial(run: paceline.Run, choose: random.Random) -> str:
    """Train a model, and flip a bit of it."""
    said: list[str] = []
    # What ends a rank is noted instead, so that one job has many flips.
    run._steps._replicas._watch.replicas_differ = lambda why, warns: said.append(why) or None  # type: ignore
    name, method = choose.choice(sorted(_models())), choose.choice(_METHODS)
    in_state, rank, pick = choose.random() < 0.4, choose.randrange(run.world_size), choose.randrange(2**31)
    trial = _Trial(run, name, method)
    for _ in range(_STEPS):
        trial.step()
    run.barrier()
    if said:
        return f"FALSE: {name}, {method}: {said[0]}"
    parameter_name, parameter = choose.choice([*trial.net.named_parameters()])
    kept = [k for k, v in trial.optimizer.state[parameter].items() if isinstance(v, torch.Tensor)]
    key = choose.choice(sorted(kept)) if in_state else ""
    if run.rank == rank:
        _flip(trial.optimizer.state[parameter][key] if in_state else parameter, random.Random(pick))
    if in_state:
        with contextlib.suppress(paceline.ReplicaMismatch):
            run.save(block=True)
    else:
        for _ in range(_STEPS):
            trial.step()
    apart = isinstance(method, (paceline.LocalSGD, paceline.DiLoCo))
    is_equal = not in_state and trial.is_equal()
    if not (in_state or apart or is_equal):  # the verdict takes some messages, for which no step waits
        with contextlib.suppress(AssertionError):
            eventually(lambda: said, "it is named")
    run.barrier()
    kind = f"{'state' if in_state else 'parameter'}{', ranks apart' if apart else ''}"
    lines = run.gather_objects([*said])[0]
    if lines:
        alone = f"rank {rank} differs" in lines[0] or run.world_size == 2
        if parameter_name in lines[0] and alone:
            return f"{kind}: named"
        return f"{kind}: OTHER: {name}, {method}, rank {rank}, {key} {parameter_name}: {lines[0]}"
    gone = apart or is_equal
    return f"{kind}: gone" if gone else f"{kind}: MISSED: {name}, {method}, rank {rank}, {key} {parameter_name}"


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_flipped_bit_is_named_or_gone(ranks: int, tmp_path: Path) -> None:
    found: collections.Counter[str] = collections.Counter()
    left = -(-_FLIPS // 3)
    while left > 0:
        count = min(left, 20)
        (first, *_) = launch(_trials, (1000 * ranks + left, count, tmp_path / f"{left}"), ranks)
        found.update(first)
        left -= count
        print(ranks, dict(first), flush=True)
    print(ranks, dict(sorted(found.items())))
    assert not [each for each in found if not each.endswith(("named", "gone"))]
