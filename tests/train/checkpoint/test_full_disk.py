"""A full disk ends no training: it goes on with the checkpoint that is there, and tries again."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import pytest
from tests.conftest import GENEROUS

torch = pytest.importorskip("torch")

from tests.train.launching import launch  # noqa: E402
from tests.train.scripts import run as run_script  # noqa: E402

import paceline  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import Paceline

pytestmark = pytest.mark.torch

SCRIPT = """
import contextlib, os, signal, sys
import torch, paceline
from torch.utils.data import TensorDataset

disk, full, free, *more = sys.argv[1:]
options = {"checkpoint_required": True} if "required" in more else {}
run = paceline.init(seed=0, checkpoint_dir=disk + "/checkpoints", checkpoint_every=2, progress=False, **options)
model = torch.nn.Linear(100, 400)  # 160 kB
model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
train = run.dataloader(TensorDataset(torch.ones(10, 100)), global_batch_size=1)
for epoch in run.epochs(1):
    for (x,) in train:
        if run.step == int(full):
            run._steps._checkpoints._store.wait()
            with open(disk + "/others", "wb") as others, contextlib.suppress(OSError):
                others.write(bytes(1_000_000))
        if run.step == int(free):
            os.unlink(disk + "/others")
        if run.step == int(full) + 2 and "stop" in more:
            os.kill(os.getpid(), signal.SIGTERM)
            while not run._steps._watch.stop_signal:
                pass
        run.backward(model(x).mean())
        optimizer.step()
run.close()
print("the end", run.step)
"""


def train(disk: str) -> list[str]:
    """A training in which others fill the disk after step 4, and clear it after step 7."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("paceline").addHandler(handler)
    with paceline.init(seed=0, checkpoint_dir=f"{disk}/checkpoints", checkpoint_every=2, progress=False) as run:
        model = torch.nn.Linear(100, 400)
        model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for number in run.steps(range(10)):
            store = run._steps._checkpoints._store
            assert store is not None
            if number in (4, 7):
                store.wait()
                run.barrier()
            if number == 4 and run.is_main:
                with open(f"{disk}/others", "wb", buffering=0) as others, pytest.raises(OSError, match="No space"):
                    while True:
                        others.write(bytes(10_000))
            if number == 7 and run.is_main:
                os.unlink(f"{disk}/others")
            if number in (4, 7):
                run.barrier()
            run.backward(model(torch.ones(1, 100)).mean())
            optimizer.step()
    return told


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_full_disk_ends_no_training(tmp_path: Path, small_disk: Callable[[Path, int], Path], ranks: int) -> None:
    disk = small_disk(tmp_path / "disk", 1000)
    told, *others = launch(train, (str(disk),), ranks)
    assert others == [[]] * (ranks - 1)
    lost, again = told
    assert lost.startswith("rank 0 on " if ranks > 1 else "cannot save step 6 in ")
    assert f"cannot save step 6 in {disk}/checkpoints: no space left: the checkpoint needs 0.2 MB and 0.0 MB" in lost
    assert "; the checkpoint of step 4 is kept; the training goes on" in lost
    assert again == f"checkpoints can be saved again: step 8 is in {disk}/checkpoints"
    assert sorted(path.name for path in (disk / "checkpoints").iterdir()) == [
        "step-000004",
        "step-000008",
        "step-000010",
    ]


@pytest.mark.parametrize(
    ("more", "code", "out"),
    [("", 1, "the end 10\n"), ("required", 1, ""), ("stop", 75, "")],
    ids=["", "required", "stop"],
)
def test_how_a_run_ends_whose_last_state_is_lost(
    paceline: Paceline, tmp_path: Path, small_disk: Callable[[Path, int], Path], more: str, code: int, out: str
) -> None:
    (paceline.folder / "script.py").write_text(SCRIPT)
    disk = small_disk(tmp_path / "disk", 1000)
    done = run_script(paceline, "script.py", str(disk), "4", "99", *more.split(), timeout=GENEROUS)
    assert (done.returncode, done.stdout) == (code, out), done.stderr
    last = done.stderr.splitlines()[-1]
    if more == "stop":
        assert last == "paceline: SIGTERM: stopped after step 7, which is not saved"
    else:
        step = 6 if more else 10
        assert last.startswith(
            f"paceline.CheckpointError: cannot save step {step} in {disk}/checkpoints: no space left"
        )
    again = run_script(paceline, "script.py", str(disk), "99", "4", timeout=GENEROUS)  # the disk is full until step 4
    assert (again.returncode, again.stdout) == (0, "the end 10\n"), again.stderr
    assert "resuming after step 4 in epoch 1" in again.stderr


def test_a_lost_checkpoint_is_due_again_before_a_long_interval_ends(
    tmp_path: Path, small_disk: Callable[[Path, int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.train.loop.checkpointing._TRY_AGAIN", 0.0)
    disk = small_disk(tmp_path / "disk", 1000)
    with paceline.init(checkpoint_dir=disk / "checkpoints", checkpoint_every="1h", progress=False) as run:
        run.register(buffer=torch.nn.Linear(100, 400))
        for number in run.steps(range(25)):
            if number == 4:
                (disk / "others").write_bytes(bytes(900_000))
                run.step_done()
                run.save(block=True)  # is lost
                (disk / "others").unlink()
            run.step_done()
            store = run._steps._checkpoints._store
            assert store is not None
            store.wait()
            if number == 24:
                assert [path.name for path in (disk / "checkpoints").glob("step-*")] == ["step-000010"]
