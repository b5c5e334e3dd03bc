"""Training scripts in a step of Slurm, without paceline's launcher."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .client import Client

pytestmark = pytest.mark.torch

LIBRARY = """
    import os, torch, paceline
    run = paceline.init()
    total = run.all_reduce(torch.tensor(float(run.rank + 1)))
    print("sum", int(total), "rank", run.rank, run.local_rank, "of", run.world_size, os.uname().nodename, flush=True)
"""
RANKS = ["0 0 of 4 n0", "1 1 of 4 n0", "2 0 of 4 n1", "3 1 of 4 n1"]


@pytest.mark.parametrize("has_batch_script", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_srun_alone_starts_the_ranks(client: Client, has_batch_script: bool) -> None:
    script = client.script(LIBRARY)
    step = f"srun --nodes=2 --ntasks-per-node=2 {sys.executable} {script}"
    if has_batch_script:
        (client.folder / "own.sh").write_text(f"#!/bin/sh\n{step}\n")
        step = "sbatch --wait --parsable --nodes=2 --ntasks-per-node=2 --output=own.out own.sh && cat own.out"
    done = client.sh(step)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"^sum 10 rank (.*)$", done.stdout, re.M)) == RANKS, done.stdout + done.stderr
