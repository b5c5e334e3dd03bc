"""Parts of scripts that the pages show: they run with what stands around them in a script.

They run in the order of the pages: one of checkpoints-format.md reads what one of checkpoints.md has saved.
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
rank, world_size, step, own = 0, 1, 123, {}
shared = {"model": fresh()[0].state_dict()}
"""
BEGINS = """
print({where!r}, flush=True)
model, optimizer, scheduler = fresh()
run = paceline.init(checkpoint_dir={folder!r}, progress=False)
train = run.dataloader(dataset, global_batch_size=64, shuffle=True)
"""
OF = (
    "data.md", "communication.md", "library.md", "training-loop.md",
    "sharding.md", "sharding-details.md", "checkpoints.md", "checkpoints-format.md",
)  # fmt: skip
OWN = [block for name in OF for block in blocks(DOCS / name) if block.language == "python" and block.mark != "shown"]


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
