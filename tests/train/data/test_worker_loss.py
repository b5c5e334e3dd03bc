"""A worker of a loader that is killed is its rank's failure within seconds, whichever worker and moment."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from tests.conftest import GENEROUS
from tests.train.scripts import run

if TYPE_CHECKING:
    from tests.conftest import Paceline

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]

DATA = """
    import faulthandler, os, pathlib, random, signal, sys, threading, time, torch, paceline
    from torch.utils.data import Dataset, IterableDataset

    class Items(Dataset):
        def __init__(self, size):
            self.size = size

        def __len__(self):
            return 400

        def __getitem__(self, index):
            return {"x": torch.zeros(8), "text": self.size * "a"}

    class Stream(IterableDataset):
        def __init__(self, size):
            self.size = size

        def __iter__(self):
            return (Items(self.size)[index] for index in range(400))

    def batches():
        return [list(range(first, first + 4)) for first in range(0, 400, 4)]

    KINDS = {
        "batch sampler": lambda size: (Items(size), {"batch_sampler": batches()}),
        "batch size": lambda size: (Items(size), {"batch_size": 4}),
        "iterable": lambda size: (Stream(size), {"batch_size": 4}),
    }

    def workers():
        path = pathlib.Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
        return sorted(map(int, path.read_text().split()))
"""

MANY = """
    def kill(which, delay, killed):
        while not killed.is_set():
            if len(pids := workers()) <= which:
                time.sleep(0.0005)
                continue
            time.sleep(delay)
            try:
                os.kill(pids[which], signal.SIGKILL)
                killed.set()
            except ProcessLookupError:  # its epoch was over, as each one may be that is this short
                delay /= 2

    chance = random.Random(int(sys.argv[1]))
    run = paceline.init(seed=0)
    for number in range(int(sys.argv[2])):
        kind, size = chance.choice(list(KINDS)), chance.choice([10, 10, 40_000, 200_000])
        which, delay = chance.randrange(2), chance.uniform(0.0, chance.choice([0.02, 0.2]))
        pause, persistent = chance.choice([0.0, 0.002, 0.02]), chance.random() < 0.5
        print(number, kind, size, which, delay, pause, persistent, flush=True)
        data, options = KINDS[kind](size)
        loader = run.dataloader(data, evaluation=True, num_workers=2, persistent_workers=persistent, **options)
        killed = threading.Event()
        killer = threading.Thread(target=kill, args=(which, delay, killed))
        killer.start()
        faulthandler.dump_traceback_later(120, exit=True)
        try:
            while True:  # epochs that end before one is killed are followed by others
                for batch in loader:
                    time.sleep(pause)
                if killed.is_set() and not persistent:
                    break  # the others had sent all that there was
        except RuntimeError as error:
            assert "DataLoader worker (pid" in str(error), error
        killer.join()
        batch = loader = None
        while workers():
            time.sleep(0.01)
        faulthandler.cancel_dump_traceback_later()
    print("all of them", flush=True)
"""

TRAIN = """
    run = paceline.init(seed=0)
    data, options = KINDS[sys.argv[1]](10)
    model = torch.nn.Linear(8, 1)
    model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    train = run.dataloader(data, num_workers=2, persistent_workers=True, **options)
    for epoch in run.epochs(3):
        for batch in train:
            if run.step == 10 and run.rank == 1:
                os.kill(workers()[int(sys.argv[2])], signal.SIGKILL)
            run.backward(model(batch["x"]).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
"""

OF_TORCH = """
    import os, signal, torch
    from torch.utils.data import DataLoader
    from paceline.train.data.worker_start import LOSES_WORKERS

    batches = iter(DataLoader(list(range(8)), num_workers=2))
    next(batches)
    try:
        os.kill(batches._workers[0].pid, signal.SIGKILL)
        os.waitid(os.P_PID, batches._workers[0].pid, os.WEXITED | os.WNOWAIT)
        raised = "in the loader"
    except RuntimeError:
        raised = "anywhere"
    print(torch.__version__, "needs it:", raised == "anywhere", "gets it:", LOSES_WORKERS)
"""


@pytest.mark.parametrize("kills", [10, pytest.param(100, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)])])
def test_workers_that_are_killed_at_random_moments(paceline: Paceline, kills: int) -> None:
    """A seed of its own each time, which the output of a failure has."""
    paceline.script(DATA + MANY)
    seed = str(time.time_ns() % 1_000_000)
    done = run(paceline, "script.py", seed, str(kills), timeout=(2 + kills / 10) * GENEROUS)
    assert "all of them" in done.stdout, f"seed {seed}\n{done.stdout[-500:]}\n{done.stderr[-5000:]}"


@pytest.mark.parametrize(("kind", "which"), [("batch sampler", 0), ("batch size", 1), ("iterable", 1)])
def test_a_killed_worker_is_the_failure_of_its_rank(paceline: Paceline, kind: str, which: int) -> None:
    done = paceline.run("-n", "2", paceline.script(DATA + TRAIN), kind, str(which))
    assert done.returncode == 1, done.stderr
    assert "rank 1" in done.stderr
    assert "RuntimeError: DataLoader worker (pid" in done.stderr


def test_torch_without_help_raises_its_error_anywhere(paceline: Paceline) -> None:
    """Here a worker is killed while the main thread is in code that has nothing to do with the loader."""
    done = run(paceline, paceline.script(OF_TORCH), timeout=60)
    version, _, answers = done.stdout.partition(" ")
    assert answers != "needs it: False gets it: True\n", (
        f"torch {version} has mended it: lower the version of LOSES_WORKERS in train/data/worker_start.py, and delete "
        "train/data/worker_loss.py when paceline no longer supports an older torch"
    )
    assert answers != "needs it: True gets it: False\n", (
        f"torch {version} still raises its error anywhere: raise the version of LOSES_WORKERS in "
        "train/data/worker_start.py"
    )
    assert done.returncode == 0, done.stderr
