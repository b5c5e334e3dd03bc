"""Hosts that have IPv6 alone: they find each other, train together and save, with a library script and without."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .lab import Client

TRAIN = """
    import os, torch, torch.distributed as dist, paceline
    run = paceline.init()
    model = torch.nn.Linear(1, 1)
    model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for (x,) in run.dataloader(torch.utils.data.TensorDataset(torch.ones(4, 1)), 2):
        run.backward(model(x).sum())
        optimizer.step()
    run.save()
    total = torch.ones(1)
    dist.all_reduce(total)
    print("sum", int(total), os.environ["MASTER_ADDR"], flush=True)
"""


@pytest.fixture
def named(client: Client) -> Iterator[tuple[Client, str]]:
    """A client and two hosts without IPv4, as -H takes them."""
    hosts = client.lab.hosts[:2]
    for host in hosts:
        host.use_ipv6_alone()
    yield client, ",".join(f"[{host.address6}]:1" for host in hosts)
    client.hang_up()


def test_hosts_with_ipv6_alone_train_together(named: tuple[Client, str]) -> None:
    client, hosts = named
    root = ("--ssh-root", f"~/{client.root}", "--ssh-python", sys.executable)
    surveyed = client("check", "-H", hosts, *root)
    assert "no route" not in surveyed.stdout
    assert "cannot reach" not in surveyed.stdout, surveyed.stdout
    client.succeeds("submit", "-H", hosts, *root, "--name", "six", "--sync-mode", "snapshot", client.script(TRAIN))
    waited = client("wait", "six", *root)
    logs = client("logs", "--all", "six", *root).stdout
    assert waited.returncode == 0, (waited.stderr, logs)
    assert logs.count(f"sum 2 {client.lab.hosts[0].address6}") == 2, logs
    found = client.json("get", "six", *root)
    assert [rank["node"] for rank in found["instances"]] == ["h1", "h2"]
    assert found["checkpoint"] is not None
    assert client("delete", "six", *root).returncode == 0


def test_the_endpoints_of_ranks_have_brackets(named: tuple[Client, str]) -> None:
    client, hosts = named
    root = ("--ssh-root", f"~/{client.root}", "--sync-mode", "snapshot")
    tell = client.script('import os; print(os.environ["PADDLE_TRAINER_ENDPOINTS"])')
    done = client.succeeds("run", "-H", hosts, *root, "--framework", "paddle", "--no-python", sys.executable, tell)
    first, second = client.lab.hosts[:2]
    assert re.search(rf"\[{first.address6}\]:\d+,\[{second.address6}\]:\d+", done.stdout), done.stdout
