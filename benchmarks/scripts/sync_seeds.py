"""`sync_seeds.py METHODS SEEDS ROUNDS FILE`: the validation loss after ROUNDS times 64 steps, for several seeds.

METHODS are those of `sync_loss.py`, with commas between them, SEEDS the number of seeds. A seed chooses the weights at
the start and the order of the samples, the same for all methods. Rank 0 writes the losses to FILE, by method.
"""

import json
import sys
from pathlib import Path

from sync_loss import CONTEXT, VALIDATION, Training

import paceline


def main(names: str, seeds: str, rounds: str, file: str) -> None:
    with paceline.init(seed=0, progress=False) as run:
        import chargpt as example  # found since `training` was imported

        _, text = example.load_text()
        unseen = text[: VALIDATION * (CONTEXT + 1)].view(-1, CONTEXT + 1).long()
        found: dict[str, list[float]] = {name: [] for name in names.split(",")}
        for seed in range(int(seeds)):
            for name, losses in found.items():
                training = Training(run, name, seed)
                for _ in range(int(rounds)):
                    training.validate(training.train(), unseen)
                losses.append(training.curve[-1][1])
        if run.is_main:
            Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
