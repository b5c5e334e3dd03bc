"""Several hosts as with torchrun: `paceline run`, typed on each of them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from tests.conftest import GENEROUS, Paceline

if TYPE_CHECKING:
    import subprocess

    from .lab import Client, Host

WHO = """
    import os, socket
    print(socket.gethostname(), *(os.environ[name] for name in ("WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR")))
"""


def by_hand(
    client: Client, host: Host, *flags: str, host_name: str | None = None, **variables: str
) -> subprocess.Popen[str]:
    """Type `paceline run` on a host, which is called so."""
    there = Paceline(client.folder / host.name)
    there.folder.mkdir(exist_ok=True)
    there.env.update(PACELINE_LAB=host.namespace, **variables)
    name = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', host_name or host.name)
    main = client.lab.hosts[0].address
    command = ("run", "--nnodes", "2", "--master-addr", main, "--master-port", "29511", *flags)
    return there.start(*command, python=(*host.enter(), *name, sys.executable), cwd=client.folder)


@pytest.mark.parametrize("is_numbered", [True, False])
def test_by_hand_on_each_host(client: Client, is_numbered: bool) -> None:
    script = client.script(WHO)
    started = [
        by_hand(client, host, *(("--node-rank", str(number)) if is_numbered else ()), script, PACELINE_TOKEN="secret")
        for number, host in enumerate(client.lab.hosts[:2])
    ]
    for host, process in zip(client.lab.hosts[:2], started, strict=True):
        out, err = process.communicate(timeout=GENEROUS)
        assert process.returncode == 0, err
        assert out == f"{host.name} 2 2 {client.lab.hosts[0].address}\n"


@pytest.mark.parametrize("name", ["nobody-knows-it", "localhost"])  # the other resolves to a loopback address
def test_plain_torch_finds_the_other_machine(client: Client, name: str) -> None:
    script = client.script("""
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        it = torch.ones(1)
        dist.all_reduce(it)
        print(it.item())
    """)
    started = [
        by_hand(client, host, "--node-rank", str(number), script, host_name=name, PACELINE_TOKEN="secret")
        for number, host in enumerate(client.lab.hosts[:2])
    ]
    for process in started:
        out, err = process.communicate(timeout=GENEROUS)
        assert (process.returncode, out) == (0, "2.0\n"), err


def test_two_machines_that_call_themselves_node_0_are_told(client: Client) -> None:
    script = client.script(WHO)
    started = [
        by_hand(client, host, "--node-rank", "0", script, PACELINE_TOKEN="secret") for host in client.lab.hosts[:2]
    ]
    for process in started:
        _, err = process.communicate(timeout=GENEROUS)
        assert process.returncode == 2, err
        assert "two machines call themselves node 0, h1 and h2; give each its own --node-rank" in err


def test_two_hosts_of_one_name_are_two_machines(client: Client) -> None:
    """Their networks differ, as those of two containers on one machine do: their ranks cannot share memory."""
    script = client.script("""
        import torch, paceline
        run = paceline.init()
        model = torch.nn.Linear(1, 1)
        model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for (x,) in run.dataloader(torch.utils.data.TensorDataset(torch.ones(4, 1)), 2):
            run.backward(model(x).sum())
            optimizer.step()
        print("done")
    """)
    started = [
        by_hand(client, host, "--node-rank", str(number), script, host_name="twin", PACELINE_TOKEN="secret")
        for number, host in enumerate(client.lab.hosts[:2])
    ]
    for process in started:
        out, err = process.communicate(timeout=GENEROUS)
        assert (process.returncode, out) == (0, "done\n"), err


@pytest.mark.needs("mpirun")
def test_by_hand_with_mpi(client: Client) -> None:
    script = client.script("""
        import socket
        from mpi4py import MPI
        world = MPI.COMM_WORLD
        print(socket.gethostname(), world.rank, world.size, world.allreduce(world.rank))
    """)
    started = [
        by_hand(client, host, "--framework", "mpi", "--node-rank", str(number), script)
        for number, host in enumerate(client.lab.hosts[:2])
    ]
    for number, process in enumerate(started):
        out, err = process.communicate(timeout=GENEROUS)
        assert process.returncode == 0, err
        assert out == f"h{number + 1} {number} 2 1\n"
