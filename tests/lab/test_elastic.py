"""Jobs whose number of nodes changes: whatever happens to hosts, those that are left go on together."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import eventually

if TYPE_CHECKING:
    from .lab import Client, Host

TRAIN = """
    import os, sys, time
    import torch
    from torch.utils.data import TensorDataset
    import paceline

    class Seen:  # how often each sample was trained on
        def __init__(self, count):
            self.counts = torch.zeros(count)
        def state_dict(self):
            return {"counts": self.counts}
        def load_state_dict(self, state):
            self.counts = state["counts"]

    end, epochs, samples = sys.argv[1], int(sys.argv[2]), 400
    run = paceline.init(seed=1, checkpoint_every=5, progress=False)
    torch.manual_seed(0)
    model, optimizer = run.setup(model := torch.nn.Linear(1, 1), torch.optim.SGD(model.parameters(), 0.01))
    seen = Seen(samples)
    run.register(seen=seen)
    began = None  # the step
    train = run.dataloader(TensorDataset(torch.arange(float(samples))), global_batch_size=12, shuffle=True)
    for epoch in run.epochs(epochs):
        for (numbers,) in train:
            mine = torch.zeros(samples)
            mine[numbers[: train.samples].long()] = 1
            run.backward(model(numbers[:, None] / samples).mean())
            optimizer.step()
            optimizer.zero_grad()
            seen.counts += run.all_reduce(mine)
            print("step", run.step, "with", run.world_size, "at", time.time(), flush=True)
            began = run.step if began is None else began
            if run.step - began == 8:
                print("one of", run.world_size, flush=True)
            time.sleep(0.05)
        if run.all_reduce(torch.tensor(float(os.path.exists(end)))):
            break
    print("seen", int(seen.counts.min()), int(seen.counts.max()), flush=True)
"""
# The same lines without a training, where that is not the matter.
STEPS = """
    import os, sys, time
    for step in range(1, 1_000_000):
        print("step", step, "with", os.environ["WORLD_SIZE"], "at", time.time(), flush=True)
        if os.path.exists(sys.argv[1]):
            break
        time.sleep(0.05)
"""
NAME = "elastic"
TIMES = "keep_alive_interval=1,keep_alive_max_attempt=5,join_timeout=120"


@pytest.fixture
def job(client: Client) -> Job:
    """An elastic job on the lab's hosts."""
    return Job(client)


class Job:
    def __init__(self, client: Client) -> None:
        self.client = client
        self.hosts = client.lab.hosts
        self.name = NAME
        self.end = client.folder / "end"  # once it is there, the job ends after the epoch
        self.has_seen = False  # whether its script says how often each sample was trained on

    def submit(self, nodes: str, restarts: int = 0, times: str = TIMES, script: str = STEPS) -> None:
        if script == TRAIN:
            self.has_seen = True
            self.client.settings(python=sys.executable)  # which has torch
        flags = ("--nnodes", nodes, "--name", NAME, "--max-restarts", str(restarts), "--rdzv-conf", times)
        path = self.client.script(script)
        self.client.succeeds("submit", "--on", "lab", *flags, path, str(self.end), "1000000")

    def status(self, host: Host) -> dict[str, Any]:
        """What the agent on a host last said."""
        path = self.client.run_directory(host, self.name) / "status.json"
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"state": None, "attempt": -1}
        return found

    def steps(self, host: Host, attempt: int) -> list[tuple[int, int]]:
        """The steps that a host's ranks have done in an attempt, each with the world size."""
        folder = self.client.run_directory(host, self.name) / "logs" / str(attempt)
        text = "".join(path.read_text() for path in folder.glob("rank-*.log"))
        return [(int(step), int(world)) for step, world in re.findall(r"^step (\d+) with (\d+) at", text, re.M)]

    def trains(self, hosts: list[Host], after: int = -1) -> None:
        """Wait until all these hosts, and no others, train in an attempt after this one; checks that they do."""

        def is_so() -> bool:
            attempts = {self.status(host)["attempt"] for host in hosts}
            if len(attempts) > 1 or min(attempts) <= after:
                return False
            steps = [self.steps(host, min(attempts)) for host in hosts]
            return all(len(found) > 3 and found[-1][1] == len(hosts) for found in steps)

        eventually(is_so, f"{', '.join(host.name for host in hosts)} train together")

    def ends_well(self, hosts: list[Host]) -> None:
        """Have it end; checks of one that trains that every sample was trained on as often as any other."""
        self.end.touch()
        done = self.client("wait", "--on", "lab", self.name)
        said = "".join(
            path.read_text()
            for host in hosts
            for path in (self.client.run_directory(host, self.name) / "logs").glob("*/rank-0.log")
        )
        assert done.returncode == 0, done.stderr + said
        if self.has_seen:
            ((least, most),) = set(re.findall(r"^seen (\d+) (\d+)$", said, re.M))
            assert least == most

    def kill_agent(self, host: Host) -> None:
        os.kill(self.status(host)["agent"]["pid"], signal.SIGKILL)


@pytest.mark.torch
@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.nightly)])
def test_an_agent_is_killed(job: Job, victim: int) -> None:
    pytest.importorskip("torch")
    job.submit("1:3", script=TRAIN)
    job.trains(job.hosts)
    job.kill_agent(job.hosts[victim])
    left = [host for host in job.hosts if host is not job.hosts[victim]]
    job.trains(left, after=0)
    found = job.client.json("get", "--on", "lab", NAME)
    assert (found["state"], found["nodes"], found["ranks"], found["attempt"]) == ("RUNNING", 2, 2, 1)
    assert sorted(rank["node"] for rank in found["instances"]) == [host.name for host in left]
    job.ends_well(left)
    assert job.client.json("get", "--on", "lab", NAME)["state"] == "SUCCEEDED"


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_a_host_loses_its_power(job: Job, victim: int) -> None:
    job.submit("2:3")
    job.trains(job.hosts)
    job.hosts[victim].power_off()
    left = [host for host in job.hosts if host is not job.hosts[victim]]
    job.trains(left, after=0)
    job.hosts[victim].power_on()
    job.ends_well(left)


def test_the_host_that_led_comes_back_while_the_others_look_for_another(job: Job) -> None:
    first, *others = job.hosts
    job.submit("1:3")
    job.trains(job.hosts)
    first.power_off()
    job.client.lab.part(*([host] for host in others))
    eventually(lambda: all(job.status(host)["state"] == "RESTARTING" for host in others), "they miss it")
    first.power_on()
    job.client.succeeds("scaleout", "--on", "lab", NAME, first.name)
    job.client.lab.join()
    job.trains(job.hosts, after=0)
    job.ends_well(job.hosts)


def test_of_two_hosts_the_one_that_led_reboots(job: Job) -> None:
    first, second, _ = job.hosts
    job.submit("1:2")
    job.trains([first, second])
    first.power_off()
    eventually(lambda: job.status(second)["state"] == "RESTARTING", "the other one waits")
    first.power_on()
    job.client.succeeds("scaleout", "--on", "lab", NAME, first.name)
    job.trains([first, second], after=0)
    job.ends_well([first, second])


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_host_hangs_and_comes_back(job: Job, victim: int) -> None:
    job.submit("2:3")
    job.trains(job.hosts)
    job.hosts[victim].hang()
    left = [host for host in job.hosts if host is not job.hosts[victim]]
    job.trains(left, after=0)
    job.hosts[victim].wake()
    job.trains(job.hosts, after=1)
    job.ends_well(job.hosts)


@pytest.mark.parametrize("alone", [pytest.param(0, marks=pytest.mark.nightly), 2])
def test_a_network_is_cut_and_heals(job: Job, alone: int) -> None:
    job.submit("1:3")
    job.trains(job.hosts)
    cut = job.hosts[alone]
    left = [host for host in job.hosts if host is not cut]
    job.client.lab.part([cut], left)
    job.trains(left, after=0)
    eventually(lambda: job.status(cut)["state"] == "RESTARTING", "the other one waits")
    assert not [rank for rank in job.status(cut)["ranks"] if rank["state"] == "RUNNING"]
    assert job.status(cut)["attempt"] == 0
    job.client.lab.join()
    job.trains(job.hosts, after=1)
    job.ends_well(job.hosts)


def test_of_two_nodes_that_are_cut_the_one_that_leads_goes_on(job: Job) -> None:
    first, second, _ = job.hosts
    job.submit("1:2")
    job.trains([first, second])
    job.client.lab.part([first], [second])
    job.trains([first], after=0)
    eventually(lambda: job.status(second)["state"] == "RESTARTING", "the other one waits")
    job.client.lab.join()
    job.trains([first, second], after=1)
    job.ends_well([first, second])


def test_a_node_that_was_cut_off_when_the_job_ended_ends_too(job: Job) -> None:
    *left, cut = job.hosts
    job.submit("1:3", times=TIMES.replace("=120", "=3600"))
    job.trains(job.hosts)
    job.client.lab.part([cut], left)
    job.trains(left, after=0)
    eventually(lambda: job.status(cut)["state"] == "RESTARTING", "the other one waits")
    job.end.touch()
    eventually(lambda: {job.status(host)["state"] for host in left} == {"SUCCEEDED"}, "the job ends")
    job.client.lab.join()
    eventually(lambda: job.status(cut)["state"] == "FAILED", "the other one learns it")
    assert "their agents have ended: the job has, or" in job.status(cut)["failure"]["message"]
    assert job.client.json("get", "--on", "lab", NAME)["state"] == "SUCCEEDED"
