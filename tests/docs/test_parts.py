"""Parts of scripts that the pages show: they run with what stands around them in a script.

The parts are of data.md, communication.md, library.md and training-loop.md.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tests.docs.pages import DOCS, Block, blocks

if TYPE_CHECKING:
    from pathlib import Path

AROUND = """
import paceline, torch; torch.set_num_threads(1)
dataset = torch.utils.data.TensorDataset(torch.randn(128, 4), torch.randn(128, 1))
loss_fn, correct, count, population = torch.nn.functional.mse_loss, 3, 4, []
def fresh():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)
evolve = population.append
"""
BEGINS = """
print({where!r}, flush=True)
model, optimizer, scheduler = fresh()
run = paceline.init(checkpoint_dir={folder!r}, progress=False)
train = run.dataloader(dataset, global_batch_size=64, shuffle=True)
"""
OWN = [
    block
    for name in ("data.md", "communication.md", "library.md", "training-loop.md")
    for block in blocks(DOCS / name)
    if block.language == "python"
]


@pytest.mark.torch
def test_parts_run_in_a_script(tmp_path: Path) -> None:
    program = AROUND + "".join(_alone(block, tmp_path / str(number)) for number, block in enumerate(OWN))
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def _alone(block: Block, folder: Path) -> str:
    """The part, with a run of its own, unless it makes that itself."""
    begins = BEGINS.format(where=str(block), folder=str(folder))
    if "paceline.init" in block.text:
        begins = begins.replace("run = ", "# ").replace("train = ", "# ")
    few_steps = block.text.replace("1000", "110")  # a save waits for the disk
    return f"{begins}{few_steps}\nrun.close()\n"
