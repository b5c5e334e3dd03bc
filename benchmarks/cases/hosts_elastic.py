"""From `kill -9` of all processes of a job on one of three hosts until the ranks on the other two step again.

torchrun waits for the lost node to come back, 30 s by default (`last_call_timeout`); in a second row it waits 3 s.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable

from paceline.node.machine import processes

from ..case import Case, Side
from ..lab import SCRIPTS, TIMEOUT, Lab, installed
from ..sample import Failed, Sample
from .hosts import each, paceline

SCRIPT = str(SCRIPTS / "stepping_on.py")
ALL, LEFT, STEPS_BEFORE = 3, 2, 3
_PORT = 19_999


def _measure(command: Callable[[Lab, str], list[str]], detached: bool) -> Callable[[Lab], Sample]:
    """Kill the last host's part once all three ranks have stepped, and wait for the first step of the other two."""

    def measure(lab: Lab) -> Sample:
        address = lab.folder / "steps"
        address.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as reports:
            reports.bind(str(address))
            reports.settimeout(TIMEOUT)
            with lab.started(command(lab, str(address))) as job:
                if detached:
                    job.finish()
                _wait_for(reports, ALL, STEPS_BEFORE)
                victim = lab.hosts().hosts[ALL - 1]
                killed = time.monotonic()
                while pids := victim.processes():
                    for pid in pids:
                        processes.signal_process(pid, signal.SIGKILL)
                return Sample(_wait_for(reports, LEFT, 1) - killed)

    return measure


def _wait_for(reports: socket.socket, world: int, step: int) -> float:
    """The time at which the last of `world` ranks had done this step."""
    done: dict[int, float] = {}
    while len(done) < world:
        try:
            size, rank, number, when = reports.recv(128).split()
        except TimeoutError:
            raise Failed(f"{len(done)} of {world} ranks did step {step} in {TIMEOUT:g} s") from None
        if (int(size), int(number)) == (world, step):
            done[int(rank)] = float(when)
    return max(done.values())


def _submit(lab: Lab, address: str) -> list[str]:
    return paceline(lab, "submit", "--on", "lab8", "--nnodes", f"{LEFT}:{ALL}", SCRIPT, address)


def _torchrun(conf: str) -> Callable[[Lab, str], list[str]]:
    def command(lab: Lab, address: str) -> list[str]:
        hosts = lab.hosts().hosts

        def remote(rank: int) -> list[str]:
            meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts[0].address}:{_PORT}", "--rdzv-id", "bench"]
            here = ["--rdzv-conf", f"is_host={int(rank == 0)}{conf}", "--local-addr", hosts[rank].address]
            nodes = ["--nnodes", f"{LEFT}:{ALL}", "--nproc-per-node", "1", "--max-restarts", "3"]
            return ["env", "GLOO_SOCKET_IFNAME=eth0", installed("torchrun"), *nodes, *meeting, *here, SCRIPT, address]

        return each(lab, ALL, remote)

    return command


CASES = [
    Case(
        "hosts-killed",
        "kill -9 of one of 3 hosts' part of a job → the others step again",
        Side("paceline submit", _measure(_submit, detached=True)),
        Side("torchrun", _measure(_torchrun(""), detached=False)),
    ),
    Case(
        "hosts-killed-soon",
        "the same, where torchrun waits 3 s for the lost one",
        Side("paceline submit", _measure(_submit, detached=True)),
        Side("torchrun", _measure(_torchrun(",last_call_timeout=3"), detached=False)),
    ),
]
