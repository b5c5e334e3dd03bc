"""`paceline tune` on hosts: what a slow network makes of the methods of exchange decides."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .lab import Client

pytestmark = pytest.mark.torch
TRAIN = """
    import torch
    import paceline

    with paceline.init(seed=0) as run:
        torch.set_num_threads(1)
        model = torch.nn.Linear(512, 512)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        model, optimizer = run.setup(model, optimizer)
        for x in run.steps([torch.ones(4, 512)] * 10_000):
            optimizer.zero_grad()
            run.backward(model(x).square().mean())
            optimizer.step()
"""


def test_on_slow_hosts_a_method_that_sends_little_is_chosen(client: Client) -> None:
    for host in client.lab.hosts[:2]:
        host.limit(10)
    hosts = ("-H", "h1,h2", "--ssh-root", f"~/{client.root}", "--ssh-python", sys.executable)
    flags = ("--steps", "10", "--methods", "allreduce,powersgd(2)", "-o", "json")
    done = client.succeeds("tune", *hosts, *flags, client.script(TRAIN))
    exact, small = json.loads(done.stdout)
    assert (exact["error"], small["error"]) == (None, None)
    assert exact["sent_bytes"] > 50 * small["sent_bytes"] > 0
    assert exact["last_loss"] < exact["first_loss"]
    assert small["last_loss"] < small["first_loss"]
    assert "paceline: powersgd(2), which saves" in done.stderr
    assert "PACELINE_SYNC: powersgd(2)" in (client.folder / "script.yaml").read_text()
    assert client.json("list", *hosts) == []
