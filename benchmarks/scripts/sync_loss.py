"""`sync_loss.py METHODS SECONDS LOSS FILE`: the validation loss of the transformer of examples/chargpt.py over time.

METHODS are those of `sync_step.py`, or `ddp`, with commas between them. They take turns, in the same ranks: each trains
its own model for 64 steps, with each rank on half of a batch of 32, and then its validation loss is computed; that time
does not count. A method goes on until it has trained for SECONDS or more, or until LOSS is reached. Rank 0 writes pairs
of seconds and loss to FILE, by method.
"""

import json
import sys
import time
from pathlib import Path

import torch
from sync_step import method
from torch.nn import functional
from training import chargpt

import paceline

STEPS, BATCH, CONTEXT, VALIDATION = 64, 32, 64, 512


def batches(run: paceline.Run, pieces: torch.Tensor, number: int, seed: int) -> list[torch.Tensor]:
    """What this rank trains on between two validations; all ranks together the same with every method."""
    generator = torch.Generator().manual_seed(1000 * seed + number)
    chosen = torch.randint(len(pieces), (STEPS, run.world_size, BATCH // run.world_size), generator=generator)
    return [pieces[each] for each in chosen[:, run.rank]]


def validate(run: paceline.Run, model: torch.nn.Module, pieces: torch.Tensor) -> float:
    mine = pieces[run.rank :: run.world_size]
    model.eval()
    with torch.no_grad():
        loss = functional.cross_entropy(model(mine[:, :-1]).flatten(0, 1), mine[:, 1:].flatten(), reduction="sum")
    model.train()
    return run.mean(float(loss), mine.numel() - len(mine))


class Training:
    """A model that is trained with one method.

    Args:
        run: the ranks.
        what: the method.
        seed: of the weights and of the order of samples.

    Attributes:
        curve: pairs of seconds of training and validation loss.
    """

    def __init__(self, run: paceline.Run, what: str, seed: int = 0) -> None:
        self._run, self._seed, self._work = run, seed, chargpt()
        torch.manual_seed(seed)
        model = self._work.build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        sync = "allreduce" if what == "ddp" else method(what)  # on two hosts it is DDP's own exchange
        self._model, self._optimizer = run.setup(model, optimizer, strategy=paceline.Strategy(sync=sync))
        self.curve: list[tuple[float, float]] = []

    def validate(self, seconds: float, pieces: torch.Tensor) -> None:
        self.curve.append((seconds, validate(self._run, self._model, pieces)))

    def is_done(self, limit: float, target: float) -> bool:
        seconds, loss = self.curve[-1]
        return seconds >= limit or loss <= target

    def train(self) -> float:
        """Seconds of some steps, as the ranks have measured them together."""
        (pieces,) = self._work.dataset.tensors  # type: ignore[attr-defined]
        part = batches(self._run, pieces, len(self.curve), self._seed)
        self._run.barrier()
        began = time.perf_counter()
        for batch in self._run.steps(part):
            self._run.backward(self._work.loss(self._model, [batch]))
            self._optimizer.step()
            self._optimizer.zero_grad()
        return self._run.mean(time.perf_counter() - began, 1)


def main(names: str, limit: str, target: str, file: str) -> None:
    import chargpt as example  # found since `training` was imported

    with paceline.init(seed=0, progress=False) as run:
        _, text = example.load_text()
        unseen = text[: VALIDATION * (CONTEXT + 1)].view(-1, CONTEXT + 1).long()
        trainings = {name: Training(run, name) for name in names.split(",")}
        for each in trainings.values():
            each.validate(0.0, unseen)
        while under_way := [each for each in trainings.values() if not each.is_done(float(limit), float(target))]:
            for each in under_way:
                each.validate(each.curve[-1][0] + each.train(), unseen)
        if run.is_main:
            Path(file).write_text(json.dumps({name: each.curve for name, each in trainings.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
