"""Jobs on several hosts that share no folder go on from their checkpoints."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from .lab import Client, Host

torch = pytest.importorskip("torch")

from paceline.train.checkpoint.store import CheckpointStore, SingleExchange  # noqa: E402

pytestmark = pytest.mark.torch

TRAIN = """
    import os, sys, time
    from pathlib import Path
    import torch
    from torch.utils.data import TensorDataset
    import paceline

    epochs, stop_at = 100_000, int(sys.argv[1])
    run = paceline.init(seed=1, checkpoint_every=4)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), 0.01))
    train = run.dataloader(TensorDataset(torch.arange(80.0)), global_batch_size=4, shuffle=True)
    for epoch in run.epochs(epochs):
        for (numbers,) in train:
            print("used", run.step + 1, epoch, *map(int, numbers[: train.samples].tolist()), flush=True)
            run.backward(model(numbers[:, None].expand(-1, 3) / 80).mean())
            optimizer.step()
            optimizer.zero_grad()
            if run.step == stop_at:
                run.broadcast_object(None)
                folder = os.environ.get("PACELINE_CHECKPOINT_DIR") or os.environ["PACELINE_RUN_DIR"] + "/checkpoints"
                while not Path(folder, f"step-{stop_at // 4 * 4:06}").exists():  # it is saved while steps go on
                    time.sleep(0.01)
                print("waits", flush=True)
                while True:
                    time.sleep(0.01)
"""


def submitted(client: Client, *args: str) -> str:
    done = client.succeeds(*args)
    return done.stdout.strip()


def job(client: Client, name: str) -> dict[str, Any]:
    return client.json("get", "--on", "lab", name)


def checkpoints(client: Client, host: Host, name: str) -> Path:
    return client.run_directory(host, name) / "checkpoints"


def used(log: str, steps: range) -> list[tuple[int, int]]:
    """Epoch and number of each sample that was trained on in these steps."""
    lines = [line.split() for line in re.findall(r"^used (.*)$", log, re.M)]
    return sorted((int(epoch), int(n)) for step, epoch, *numbers in lines if int(step) in steps for n in numbers)


def waits(client: Client, name: str, ranks: int = 2) -> None:
    """Wait until all ranks of a job have come to the step at which they wait."""
    eventually(lambda: client.logs(name).count("waits\n") == ranks, f"{name} has come to its last step")


def test_two_hosts_go_on_from_copies_of_their_own(client: Client) -> None:
    first, second = client.lab.hosts[:2]
    client.settings(python=sys.executable)  # which has torch
    script = client.script(TRAIN)
    flags = ("--nnodes", "2", "--name", "apart", "--max-restarts", "0")
    name = submitted(client, "submit", "--on", "lab", *flags, script, "30")
    waits(client, name)

    def kept(host: Host) -> list[str]:
        return sorted(path.name for path in checkpoints(client, host, name).glob("step-*"))

    newest = ["step-000020", "step-000024", "step-000028"]
    eventually(lambda: kept(first) == kept(second) == newest, "both have the last three")
    assert client("stop", "--on", "lab", "--now", name).returncode == 0
    assert kept(first) == kept(second) == newest
    before = client.logs(name)

    shutil.rmtree(checkpoints(client, first, name))  # of the host with rank 0
    shutil.rmtree(checkpoints(client, second, name) / "step-000028")  # what it lacks, nobody has: 24 is the newest
    again = submitted(client, "resubmit", "--on", "lab", name)
    waits(client, again)
    after = client.logs(again)
    assert "resuming after step 24 in epoch 2" in after
    assert "step-000024" in [path.name for path in checkpoints(client, first, again).iterdir()]
    assert client("stop", "--on", "lab", "--now", again).returncode == 0

    samples = used(before, range(1, 25)) + used(after, range(25, 31))
    assert len(samples) == len(set(samples)) == 30 * 4
    assert {n for epoch, n in samples if epoch == 0} == set(range(80))


def test_a_job_that_was_stopped_goes_on_without_a_host_that_has_gone(client: Client) -> None:
    client.settings(python=sys.executable)
    flags = ("--nnodes", "2", "--name", "survives")
    name = submitted(client, "submit", "--on", "lab", *flags, client.script(TRAIN), "0")
    eventually(lambda: "used 10 " in client.logs(name), "it trains")
    assert client("stop", "--on", "lab", name).returncode == 0
    said = re.search(r"stopped after step (\d+), which is saved", client.logs(name))
    assert said is not None
    client.hang_up()
    client.lab.hosts[0].lose_route()
    again = submitted(client, "resubmit", "--on", "lab", name)
    eventually(lambda: f"resuming after step {said[1]} in epoch" in client.logs(again), "it goes on")
    assert [rank["node"] for rank in job(client, again)["instances"]] == ["h2", "h3"]
    assert client("stop", "--on", "lab", "--now", again).returncode == 0


LOAD = """
    import sys, time
    from pathlib import Path
    import torch.distributed as dist
    from paceline.train.group import join
    from paceline.train.checkpoint.store import CheckpointError, CheckpointStore, SocketExchange

    place = join.join().placement
    folder, marks = Path(sys.argv[1]), Path(sys.argv[1]).parent
    store = CheckpointStore(folder, rank=place.rank, world_size=place.world_size, exchange=SocketExchange())

    def hold(event, args):
        if event == "open" and str(args[0]).endswith("optimizer.pt") and "saving" in str(args[0]):
            (marks / "begun").touch()
            while not (marks / "cut").exists():
                time.sleep(0.01)

    sys.addaudithook(hold)
    try:
        print(store.load().step)
    except CheckpointError as error:
        print(error)
"""


@pytest.mark.parametrize("holder", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_a_cut_in_mid_transfer_ends_on_both_sides_and_is_made_good(client: Client, holder: int) -> None:
    script, large = client.folder / client.script(LOAD), torch.ones(15_000_000)  # no buffer holds it
    folders = [client.folder / host.name for host in client.lab.hosts[:2]]
    store = CheckpointStore(folders[holder], rank=0, world_size=1, exchange=SingleExchange())
    store.save(7, {"model": large[:9].clone(), "optimizer": large}, None, block=True)
    store.close()  # and free its folder

    def start(rank: int, host: Host) -> subprocess.Popen[str]:
        where = {"MASTER_ADDR": client.lab.hosts[0].address, "MASTER_PORT": "29511", "PACELINE_LAB": host.namespace}
        numbers = {"RANK": rank, "GROUP_RANK": rank, "LOCAL_RANK": 0}
        sizes = {"WORLD_SIZE": 2, "GROUP_WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1}
        env = {**client.env, **where, **{name: str(value) for name, value in {**numbers, **sizes}.items()}}
        command = [*host.enter(), sys.executable, str(script), str(folders[rank])]
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)

    ranks = [start(rank, host) for rank, host in enumerate(client.lab.hosts[:2])]
    begun = client.folder / "begun"
    eventually(lambda: begun.exists() or any(rank.poll() is not None for rank in ranks), "it is on its way")
    assert begun.exists(), "a rank ended before"
    client.lab.hosts[1].cut()
    (client.folder / "cut").touch()
    told = [rank.communicate()[0] for rank in ranks]
    assert "rank 1 cannot be reached while" in told[0] or "the connection to rank 1, which has it, has ended" in told[0]
    assert told[1] == "rank 0 cannot be reached while the ranks agreed on a checkpoint\n"
    assert not list(folders[1 - holder].iterdir())
    client.lab.hosts[1].heal()
    ranks = [start(rank, host) for rank, host in enumerate(client.lab.hosts[:2])]
    assert [rank.communicate()[0] for rank in ranks] == ["7\n", "7\n"]
