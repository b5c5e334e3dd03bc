"""`checkpoint_load.py save|load MODEL COUNT FILE`: how long ranks load a sharded model that other ranks have saved.

`save` saves model and optimizer with the library, and with torch.distributed.checkpoint. `load` loads them in turns,
into a model and an optimizer that have their memory, and writes pairs to FILE: the seconds of the slowest rank.
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from training import WORK

import paceline

WARM_UP = 1  # loads of each kind


def main(what: str, name: str, count: int, file: str) -> None:
    folders = [Path(file).parent / "checkpoints" / who for who in ("paceline", "dcp")]
    with paceline.init(seed=0, checkpoint_dir=folders[0], device="cpu") as run:
        work = WORK[name]()
        model: torch.nn.Module = work.build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = run.setup(model, optimizer, strategy=paceline.Strategy(shard=True))
        run.backward(work.loss(model, [part[:8] for part in work.dataset[:]]))
        optimizer.step()  # so that the optimizer has its state
        optimizer.zero_grad()
        if what == "save":
            run.save(block=True)
            dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folders[1])
            Path(file).write_text("0")
            return

        def ours() -> None:
            assert run.resume()

        def other() -> None:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            dcp.load(state, checkpoint_id=folders[1])
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])

        found: dict[object, list[float]] = {ours: [], other: []}
        for number in range(WARM_UP + count):
            for load in (ours, other) if number % 2 else (other, ours):
                run.barrier()
                began = time.perf_counter()
                load()
                found[load].append(run.all_reduce(time.perf_counter() - began, "max"))
        if run.is_main:
            Path(file).write_text(json.dumps(list(zip(found[ours][WARM_UP:], found[other][WARM_UP:], strict=True))))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
