"""Ten faults, here and over ssh, mended by a script that reads only JSON and does what SKILL.md says."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import eventually

from .mender import Mender

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .lab import Client

pytestmark = pytest.mark.torch
UNTIL = """
    import os, sys, time
    print("here", flush=True)
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.05)
"""
# name → script, arguments, flags, the kind that is named. FOLDER is the folder of the script.
SCRIPTS = {
    "path": """
        import sys
        print(open(sys.argv[1]).read())
    """,
    "memory": """
        import os, resource
        resource.setrlimit(resource.RLIMIT_AS, (resource.getrlimit(resource.RLIMIT_AS)[1],) * 2)
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        budget = (400 << 20) // int(os.environ["LOCAL_WORLD_SIZE"])  # of a machine, for all its ranks
        resource.setrlimit(resource.RLIMIT_AS, (used + budget, used + budget))
        bytearray(300 << 20)
    """,
    "package": """
        import colours
    """,
    "nan": """
        import argparse, math, time
        import paceline, torch
        parser = argparse.ArgumentParser()
        parser.add_argument("--lr", type=float)
        lr = parser.parse_args().lr
        run = paceline.init(checkpoint_every=1000, log_every=1)
        data = torch.utils.data.TensorDataset(torch.randn(64, 4))
        loader = run.dataloader(data, batch_size=8)
        model, optimizer = (it := torch.nn.Linear(4, 1), torch.optim.SGD(it.parameters(), lr=lr))
        model, optimizer = run.setup(model, optimizer)
        for epoch in run.epochs(10**6):
            for (batch,) in loader:
                loss = (model(batch) ** 2).mean() ** 2
                run.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=loss)
                time.sleep(0.01)
            if epoch >= 3 and math.isfinite(loss.item()):
                break
        run.close()
    """,
    "hang": """
        import threading
        import torch
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    """,
    "data": """
        import time, torch
        class Images(torch.utils.data.Dataset):  # which last until workers load them
            def __len__(self):
                return 1_000_000
            def __getitem__(self, index):
                time.sleep(0.04)
                return torch.ones(1) * (torch.utils.data.get_worker_info() is not None)
        for batch in torch.utils.data.DataLoader(Images(), batch_size=8, num_workers=0):
            torch.ones(8) @ torch.ones(8)
            if batch.any():
                break
    """,
    "disk": """
        import os, sys
        with open(os.path.join(sys.argv[1], "weights"), "wb") as file:
            file.write(bytes(1 << 20))
    """,
    "host": UNTIL,
    "preempted": UNTIL,
}


class Place:
    """Where jobs run: on this machine, or on hosts over ssh."""

    def __init__(self, client: Client, target: str) -> None:
        self.client, self.target = client, target
        self.folder = client.folder / "project"

    def submitted(self, name: str, *args: str, target: str = "", flags: tuple[str, ...] = ()) -> str:
        """Submit the script of a fault, which lies in a folder of its own."""
        script = self.client.script(SCRIPTS[name], f"project/{name}/{name}.py") if name in SCRIPTS else args[0]
        args = args if name in SCRIPTS else args[1:]
        where = ("--on", target or self.target) if self.target else ()
        done = self.client.succeeds("submit", *where, "--name", name, *flags, script, *args)
        return done.stdout.strip()

    def runs(self, name: str) -> None:
        eventually(lambda: "here" in self.client.logs(name), f"{name} runs")

    def agent(self, name: str) -> dict[str, Any]:
        """The record of the agent of a job's first node."""
        homes = [self.client.home, *(it.home / self.client.root / "hosts" / it.name for it in self.client.lab.hosts)]
        (path,) = [it for home in homes for it in home.glob(f"jobs/{name}/status.json")]
        found: dict[str, Any] = json.loads(path.read_text())["agent"]
        return found


def lose_host(place: Place) -> None:
    """Here the agent dies with all its processes; over ssh the machine is switched off."""
    if place.target:
        place.client.lab.hosts[2].power_off()
    else:
        agent = place.agent("host")
        for pid in (agent["guard"]["pid"], agent["pid"]):
            os.kill(pid, signal.SIGKILL)


def preempt(place: Place) -> None:
    """The machine is taken away: its processes get SIGTERM, as at a shutdown."""
    os.kill(place.agent("preempted")["pid"], signal.SIGTERM)


@contextlib.contextmanager
def disk(folder: Path) -> Iterator[None]:
    """A disk of 64 KiB at this folder."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


KINDS = {
    "path": "missing file", "memory": "out of memory", "package": "missing module", "nan": "loss not finite",
    "hang": "hang", "data": "slow", "disk": "disk full", "host": None, "image": "missing program",
    "preempted": "stopped",
}  # fmt: skip


@pytest.mark.parametrize("target", ["", pytest.param("lab", marks=pytest.mark.nightly)], ids=["here", "ssh"])
def test_ten_faults_are_mended_by_what_the_json_says(client: Client, target: str) -> None:
    python = sys.executable  # which has torch
    hosts = {"lab": ["h1"], "two": ["h2", "h3", "h1"]}
    client.write_settings({name: {"hosts": these, "python": python} for name, these in hosts.items()})
    place = Place(client, target)
    for folder in KINDS:
        (place.folder / folder).mkdir(parents=True)
    full, flag = place.folder / "disk" / "full", place.folder / "go"
    full.mkdir()
    (place.folder / "path" / "store").mkdir()
    (place.folder / "path" / "store" / "images.csv").write_text("1,2")
    (place.folder / "package" / "vendor").mkdir()
    (place.folder / "package" / "vendor" / "colours.py").touch()
    other = place.folder / "image" / "environment" / "bin" / "python"
    image = client.script(f"#!/bin/sh\n{other} -c 'print(1)'\n", "project/image/train.sh")
    (client.folder / image).chmod(0o755)
    with disk(full):
        jobs = {
            "path": place.submitted("path", "/data/images.csv"),
            "memory": place.submitted("memory", flags=("-n", "2")),
            "package": place.submitted("package"),
            "nan": place.submitted("nan", "--lr", "1000.0"),
            "hang": place.submitted("hang", flags=("--hang-after", "2s")),
            "data": place.submitted("data", flags=("--hang-after", "2s")),
            "disk": place.submitted("disk", str(full)),
            "host": place.submitted("host", str(flag), target="two", flags=("--nnodes", "2") if target else ()),
            "image": place.submitted("image", image, flags=("--no-python",)),
            "preempted": place.submitted("preempted", str(flag)),
        }
        for name, fault in (("host", lose_host), ("preempted", preempt)):
            place.runs(name)
            fault(place)
        flag.touch()
        menders = {name: Mender(client, place.folder / name) for name in jobs}

        def all_are_well() -> bool:
            for name, job in list(jobs.items()):
                goes_on = menders[name].look(job)
                if goes_on is None:
                    del jobs[name]
                else:
                    jobs[name] = goes_on
            return not jobs

        eventually(all_are_well, lambda: f"all are mended; these are not: {jobs}", pause=0.5)
    kinds = {name: it.mended for name, it in menders.items()}
    assert kinds == {name: [kind or ("node lost" if target else "agent")] for name, kind in KINDS.items()}
