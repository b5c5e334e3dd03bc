"""Random faults at random moments of an elastic job: in the end every sample was trained on as often as it should.

Hosts die, hang, hang after authentication, lose their disk, are cut off both ways or one way, and come back;
agents, fork servers, ranks and clients are killed. PACELINE_SOAK says how many faults `make nightly` makes, divided
among several jobs that run side by side, each on hosts of its own; PACELINE_SOAK_SEED says which, and is printed.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import GENEROUS, eventually
from tests.needs import need

from .lab import Lab, client_of, missing
from .test_elastic import TRAIN, Job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .lab import Client, Host

FAULTS = int(os.environ.get("PACELINE_SOAK", "1000"))
JOBS = 8  # that share the many faults
FEW = 3  # faults of the test that is run each time
SEED = int(os.environ.get("PACELINE_SOAK_SEED", "1"))
pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]
OVER = ("SUCCEEDED", "FAILED", "STOPPED")


class Soak(Job):
    """A job, and what is done to it."""

    def __init__(self, client: Client, seed: int) -> None:
        super().__init__(client)
        self.chance = random.Random(seed)
        self.history: dict[str, dict[int, dict[int, float]]] = {}  # of the job, and of those that went on from it
        self.hurt: set[Host] = set()  # since all trained together last
        self.emptied: set[Host] = set()  # whose disk was lost since then
        self.began = time.monotonic()
        print("seed", seed)

    def begin(self) -> None:
        flags = "keep_alive_interval=1,keep_alive_max_attempt=5,join_timeout=60"
        self.submit(f"1:{len(self.hosts)}", restarts=1_000_000, times=flags, script=TRAIN)
        self.history[self.name] = {}
        eventually(lambda: self._all_train([(-1, 0)]), "the job trains on all hosts: before, it needs node 0")

    def tell(self, *what: object) -> None:
        print(f"{time.time():.2f} {time.monotonic() - self.began:7.2f}", *what, flush=True)

    # -- what is true --------------------------------------------------------------------------------------------------

    def lives(self, host: Host) -> bool:
        """Whether a host has a part of the job that has not ended."""
        status = self.status(host)
        return status["state"] not in (*OVER, None) and Path(f"/proc/{status['agent']['pid']}").exists()

    def record(self, name: str) -> dict[str, Any]:
        return self.client.json("get", "--on", "lab", name)

    # -- faults --------------------------------------------------------------------------------------------------------

    def hurts(self) -> None:
        """Let something happen to some host, or between them."""
        faults = [
            self.kill_agent, self.kill_agent, self.kill_server, self.kill_rank, self.power, self.hang, self.cut,
            self.part, self.silence, self.hang_logins, self.lose_disk, self.kill_client, self.kill_client,
        ]  # fmt: skip
        fault, host = self.chance.choice(faults), self.chance.choice(self.hosts)
        self.tell(fault.__name__, host.name)
        fault(host)

    def kill_agent(self, host: Host) -> None:
        self._kill(host, lambda status: [status["agent"]["pid"]])
        self.hurt.add(host)

    def kill_server(self, host: Host) -> None:
        self._kill(host, lambda status: _children(status["agent"]["pid"])[:1])

    def kill_rank(self, host: Host) -> None:
        self._kill(host, lambda status: [rank["pid"] for rank in status["ranks"] if rank["pid"]])

    def _kill(self, host: Host, whom: Callable[[dict[str, Any]], list[int]]) -> None:
        if self.lives(host):
            for pid in whom(self.status(host)):
                if pid in host.processes():
                    os.kill(pid, signal.SIGKILL)

    def power(self, host: Host) -> None:
        host.power_off()
        self.hurt.add(host)

    def hang(self, host: Host) -> None:
        if host.sshd is not None:
            host.hang()
            self.hurt.add(host)

    def cut(self, host: Host) -> None:
        if host.sshd is not None:
            host.cut()
            self.hurt.add(host)

    def part(self, host: Host) -> None:
        if all(other.sshd is not None for other in self.hosts):
            self.client.lab.part([host], [other for other in self.hosts if other is not host])
            self.hurt.add(host)

    def silence(self, host: Host) -> None:
        if host.sshd is not None:
            self.client.lab.silence(host)
            self.hurt.add(host)

    def hang_logins(self, host: Host) -> None:
        if host.sshd is not None:
            host.hang_logins()

    def lose_disk(self, host: Host) -> None:
        """One between two repairs: the checkpoints are on the disks of all hosts that have trained together."""
        if not self.emptied:
            self.remember()
            host.lose_disk()
            self.hurt.add(host)
            self.emptied.add(host)

    def kill_client(self, _: Host) -> None:
        """Kill a command at some moment, and see that one that submits leaves nothing behind, see the end."""
        script = self.client.script("import time; time.sleep(1)", "short.py")
        verb = self.chance.choice(
            [
                ("list",),
                ("get", self.name),
                ("logs", "-f", self.name),
                ("top", "job"),
                ("submit", "--name", "s-", script),
            ]
        )
        self.tell("client", *verb)
        killed = self.client.start(*verb[: 1 + (verb[0] == "top")], "--on", "lab", *verb[1 + (verb[0] == "top") :])
        self.pauses(2.0)
        killed.kill()
        killed.communicate(timeout=GENEROUS)

    def stop(self) -> None:
        """Have it stopped, while something else happens."""
        self.tell("stop")
        stopping = self.client.start("stop", "--on", "lab", self.name)
        self.pauses(2.0)
        self.hurts()
        self.client.lab.repair()
        stopping.communicate(timeout=GENEROUS)

    # -- and what becomes of it ----------------------------------------------------------------------------------------

    def pauses(self, longest: float) -> None:
        """Let a random time go by."""
        time.sleep(self.chance.uniform(0.0, longest))

    def goes_on(self) -> None:
        """Repair all, and see that all hosts train together, in the same job or in one that goes on from it."""
        self.client.lab.repair()
        self.tell("healed")
        done = self._done()
        eventually(lambda: self._all_train(done) or self._is_over() or self._bring_back(), "they train, or it ended")
        if self._is_over():
            record = self.record(self.name)
            self.tell("ended", record["state"], record["error"], [host.name for host in self.hurt])
            assert record["state"] in ("FAILED", "STOPPED")
            assert record["state"] == "STOPPED" or len(self.hurt) > 1, "one host was lost, and the job with it"
            self.remember()
            self.resubmit()
            eventually(lambda: self._all_train([(-1, 0)]), "the job that goes on trains on all hosts")
        self.tell("all train", self._done())
        self.hurt.clear()
        self.emptied.clear()

    def _done(self) -> list[tuple[int, int]]:
        """The attempt of each host, and how many steps it has done in it with all the others."""
        attempts = [self.status(host)["attempt"] for host in self.hosts]
        return [
            (attempt, [world for _, world in self.steps(host, attempt)].count(len(self.hosts)))
            for host, attempt in zip(self.hosts, attempts, strict=True)
        ]

    def _all_train(self, before: list[tuple[int, int]]) -> bool:
        """Whether all hosts have done some steps together since then."""
        now = self._done()
        attempt, least = max(before)
        return len({attempt for attempt, _ in now}) == 1 and min(now) > (attempt, least + 3) and min(now)[1] > 3

    def _is_over(self) -> bool:
        return not any(self.lives(host) for host in self.hosts)

    def _bring_back(self) -> None:
        """Have the hosts take part again that have been lost."""
        for host in self.hosts:
            if not self.lives(host):
                done = self.client("scaleout", "--on", "lab", self.name, host.name)
                self.tell("scaleout", host.name, done.returncode, done.stderr.strip())

    def resubmit(self) -> None:
        done = self.client.succeeds("resubmit", "--on", "lab", self.name)
        self.name = done.stdout.strip()
        self.history[self.name] = {}
        self.tell("resubmitted", self.name, done.stderr.strip())

    # -- in the end ----------------------------------------------------------------------------------------------------

    def remember(self) -> None:
        """Read the steps of each attempt, and when the first rank was through with them: a disk may be lost later."""
        found = self.history[self.name]
        worlds: dict[int, set[str]] = {}
        for host in self.hosts:
            for path in (self.client.run_directory(host, self.name) / "logs").glob("*/rank-*.log"):
                attempt = int(path.parent.name)
                for step, world, when in re.findall(r"^step (\d+) with (\d+) at ([\d.]+)$", path.read_text(), re.M):
                    steps = found.setdefault(attempt, {})
                    steps[int(step)] = min(float(when), steps.get(int(step), float("inf")))
                    worlds.setdefault(attempt, set()).add(world)
        assert all(len(sizes) == 1 for sizes in worlds.values()), worlds

    def check_history(self) -> None:
        """Never did two halves train at once, and nothing was left out."""
        self.remember()
        last = 0
        latest = 0.0
        for name, attempts in self.history.items():
            for attempt, steps in sorted(attempts.items()):
                first = min(steps)
                self.tell(f"{name} attempt {attempt}: steps {first} to {max(steps)} after {last}")
                assert first <= last + 1, f"{name}, attempt {attempt} began with step {first} after {last}"
                assert min(steps.values()) >= latest, f"{name}, attempt {attempt} overlaps the one before"
                last, latest = max(steps), max(steps.values())

    def check_end(self) -> None:
        """Have it end, with a last fault meanwhile."""
        self.end.touch()
        self.pauses(3.0)
        self.hurts()
        self.pauses(8.0)
        self.client.lab.repair()
        self.ends_well(self.hosts)
        assert self.record(self.name)["state"] == "SUCCEEDED"


@pytest.fixture
def crowd(tmp_path: Path) -> Iterator[Client]:
    """A client of five hosts of its own."""
    need(missing())
    it = Lab(5, "soak")
    try:
        it.start()
        with client_of(it, tmp_path) as client:
            yield client
    finally:
        it.stop()


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def soaked(client: Client, faults: int, seed: int) -> None:
    soak = Soak(client, seed)
    soak.begin()
    for number in range(faults):
        soak.tell("fault", number)
        stops = soak.chance.random() < 0.1
        if stops:
            soak.stop()
        else:
            soak.pauses(3.0)
            soak.hurts()
        if stops or soak.chance.random() < 0.15:  # what has been stopped is no target for more
            soak.pauses(4.0)
            soak.goes_on()
    soak.goes_on()
    soak.check_end()
    soak.check_history()


def test_a_few_random_faults(client: Client) -> None:
    soaked(client, FEW, SEED)


@pytest.mark.nightly
@pytest.mark.timeout(600 + 120 * FAULTS)
@pytest.mark.parametrize("job", range(JOBS))
def test_many_random_faults(crowd: Client, job: int) -> None:
    soaked(crowd, len(range(job, FAULTS, JOBS)), SEED + job)
