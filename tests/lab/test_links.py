"""Hosts are grouped by the measured speed of their links."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .lab import Client

pytestmark = pytest.mark.torch
GROUPING = """
    import torch
    import paceline

    with paceline.init(seed=0, progress=False) as run:
        sync = paceline.AllReduce(hierarchical="measured")
        model = run.setup(torch.nn.Linear(64, 64), strategy=paceline.Strategy(sync=sync))
        run.backward(model(torch.full((1, 64), float(run.rank))).sum())
        mean = model.weight.grad[0, 0].item()
        print(run.rank, mean, flush=True)
"""


def test_hosts_with_fast_links_are_a_group(client: Client) -> None:
    client.settings(python=sys.executable)
    client.lab.hosts[1].limit(10)
    done = client.succeeds("run", "--on", "lab", "-n", "1", "--nnodes", "3", "--tee", "3", client.script(GROUPING))
    assert sorted(line[-5:] for line in done.stdout.splitlines()) == ["0 1.0", "1 1.0", "2 1.0"]
    (said,) = [line for line in (done.stderr + done.stdout).splitlines() if "hierarchical=measured" in line]
    assert "groups [0, 2] [1]: " in said
    assert "bit/s or more within groups, " in said
