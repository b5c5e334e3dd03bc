"""Jobs on a Slurm of the tests' lab: a real slurmctld, and nodes that are network namespaces of this machine.

They share its cores and its clock. The other side are Slurm's own commands, and submitit.
"""

from __future__ import annotations

import itertools
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..case import Case, Goal, Side
from ..lab import SCRIPTS, TIMEOUT, Lab, installed
from ..sample import Failed, Sample

if TYPE_CHECKING:
    from tests.lab.slurm.cluster import Cluster

TOUCHES, ALLREDUCE, WATCHES = (str(SCRIPTS / f"{name}.py") for name in ("touch", "first_allreduce", "watch_submitit"))
JOBS, CLIENTS, SECONDS = 100, 4, 60.0
_NUMBERS = itertools.count()
_LATER = "now+10hours"  # when the jobs begin that are only watched
# The lab keeps no accounts, so `sacct` says of each job that it is asked for that it runs.
_SACCT = 'echo "JobID|State|NodeList"; for it; do case $it in [0-9]*) echo "$it|RUNNING|n0";; esac; done'


# -- until the script runs ---------------------------------------------------------------------------------------------


def _submit(lab: Lab) -> Sample:
    """Seconds from `paceline submit` until the first line of a script."""
    name, path = f"it-{next(_NUMBERS)}", lab.slurm_folder / f"touched-{next(_NUMBERS)}"
    return _until(lab, path.exists, _paceline("submit", "--name", name, TOUCHES, str(path)))


def _submit_agent(lab: Lab) -> Sample:
    """Seconds from `paceline submit` until the agent on the node runs."""
    name, path = f"it-{next(_NUMBERS)}", lab.slurm_folder / f"touched-{next(_NUMBERS)}"
    job = lab.slurm_folder / "root" / "slurm" / name

    def runs() -> bool:
        return any('"pid"' in status.read_text() for status in job.glob(f"lives/*/0/{name}/status.json"))

    return _until(lab, runs, _paceline("submit", "--name", name, TOUCHES, str(path)))


def _sbatch(lab: Lab) -> Sample:
    """Seconds from `sbatch` until a batch script of one line runs."""
    path = lab.slurm_folder / f"touched-{next(_NUMBERS)}"
    return _until(lab, path.exists, ["sbatch", "--output=/dev/null", f"--wrap=touch {shlex.quote(str(path))}"])


def _until(lab: Lab, is_reached: Callable[[], bool], command: list[str]) -> Sample:
    cluster = lab.slurm()
    time.sleep(random.random())  # the controller works in turns of a second: no side may begin at a better moment
    began = time.monotonic()
    with open(lab.slurm_folder / "err", "w+b") as errors:
        process = subprocess.Popen(
            cluster.login.command(command), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors,
            env=lab.slurm_env, cwd=lab.slurm_folder,
        )  # fmt: skip
        while not is_reached():
            if time.monotonic() - began > TIMEOUT or process.poll():
                process.kill()
                errors.seek(0)
                raise Failed(f"nothing ran in {TIMEOUT:g} s: {errors.read().decode(errors='replace')[-1000:]}")
            time.sleep(0.005)
        seconds = time.monotonic() - began
        process.wait(TIMEOUT)
    _wait_until_empty(cluster)
    return Sample(seconds)


def _wait_until_empty(cluster: Cluster) -> None:
    began = time.monotonic()
    while cluster.slurm("squeue", "--noheader"):
        if time.monotonic() - began > TIMEOUT:
            raise Failed(f"jobs did not end in {TIMEOUT:g} s")
        time.sleep(0.05)


# -- calls of the scheduler --------------------------------------------------------------------------------------------


def _watch(lab: Lab) -> Sample:
    """How often Slurm is called in a minute while some clients of a user watch 100 jobs."""
    cluster = lab.slurm()
    names = [f"job-{number}" for number in range(JOBS)]
    for name in names:
        _output(lab, _paceline("submit", "--name", name, "--slurm", f"begin={_LATER}", TOUCHES, "/dev/null"))
    clients = [_paceline("list", "-w"), _paceline("wait", *names)]
    try:
        return _counted(lab, cluster, [clients[number % len(clients)] for number in range(CLIENTS)])
    finally:
        _output(lab, _paceline("delete", "--force", *names))
        _wait_until_empty(cluster)


def _watch_submitit(lab: Lab) -> Sample:
    """The same of submitit."""
    cluster = lab.slurm()
    cluster.break_command("sacct", _SACCT)
    try:
        return _counted(lab, cluster, [[sys.executable, WATCHES, str(JOBS)]] * CLIENTS)
    finally:
        cluster.break_command("sacct", 'exec "$real" "$@"')


def _counted(lab: Lab, cluster: Cluster, commands: Sequence[Sequence[str]]) -> Sample:
    """Run commands for a while; from when all have begun, their calls of Slurm are counted."""
    cluster.forget_calls()
    with open(lab.slurm_folder / "err", "w+b") as errors:
        started = [
            subprocess.Popen(
                cluster.login.command(command), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors,
                env=lab.slurm_env, cwd=lab.slurm_folder,
            )
            for command in commands
        ]  # fmt: skip
        time.sleep(SECONDS)
        ended = [process.returncode for process in started if process.poll() is not None]
        for process in started:
            process.send_signal(signal.SIGINT)
        for process in started:
            process.wait(TIMEOUT)
        errors.seek(0)
        if ended:
            raise Failed(f"a client ended with {ended[0]}: {errors.read().decode(errors='replace')[-1000:]}")
    return Sample(SECONDS, requests=len(cluster.calls))


# -- until the first all-reduce ----------------------------------------------------------------------------------------


def _first(nodes: int, command: Callable[[int, str], list[str]]) -> Callable[[Lab], Sample]:
    """From the command until the last rank has the sum, with one rank on each node."""

    def measure(lab: Lab) -> Sample:
        cluster = lab.slurm()
        address = lab.slurm_folder / "reports"
        address.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as reports:
            reports.bind(str(address))
            reports.settimeout(TIMEOUT)
            began = time.monotonic()
            _output(lab, command(nodes, str(address)))
            try:
                times = [float(reports.recv(64)) for _ in range(nodes)]
            except TimeoutError:
                raise Failed(f"a rank reported nothing for {TIMEOUT:g} s") from None
        _wait_until_empty(cluster)
        return Sample(max(times) - began)

    return measure


def _submit_allreduce(nodes: int, address: str) -> list[str]:
    return _paceline("submit", "--name", f"sum-{next(_NUMBERS)}", "--nnodes", str(nodes), ALLREDUCE, address)


def _srun_torchrun(nodes: int, address: str) -> list[str]:
    port = 20_000 + next(_NUMBERS)
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=n0:{port}", f"--rdzv-id={port}"]
    torchrun = [installed("torchrun"), f"--nnodes={nodes}", "--nproc-per-node=1", *meeting, ALLREDUCE, address]
    return ["srun", "--quiet", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", *torchrun]


# -- commands ----------------------------------------------------------------------------------------------------------


def _output(lab: Lab, command: Sequence[str]) -> str:
    """What a command prints that runs on the login machine."""
    done = subprocess.run(
        lab.slurm().login.command(command), stdin=subprocess.DEVNULL, env=lab.slurm_env, cwd=lab.slurm_folder,
        capture_output=True, text=True, check=False, timeout=TIMEOUT,
    )  # fmt: skip
    if done.returncode:
        raise Failed(f"{shlex.join(command)[:80]}: exit code {done.returncode}: {done.stderr.strip()[-1000:]}")
    return done.stdout


def _paceline(verb: str, *args: str) -> list[str]:
    return [sys.executable, "-m", "paceline", verb, "--on", "slurm", *args]


CASES = [
    Case(
        "slurm-start",
        "submit a job until its agent runs",
        Side("paceline submit", _submit_agent),
        Side("sbatch, a script of one line", _sbatch),
        Goal(beyond=0.5),
    ),
    Case(
        "slurm-script",
        "submit a job until its script runs",
        Side("paceline submit", _submit),
        Side("sbatch, a script of one line", _sbatch),
    ),
    Case(
        "slurm-watch",
        f"calls of Slurm in the first minute of {CLIENTS} clients that watch {JOBS} jobs",
        Side("paceline list -w, wait", _watch),
        Side("submitit", _watch_submitit),
        Goal(ratio=1.0),
        once=True,
        is_count=True,
    ),
    *(
        Case(
            f"slurm-{nodes}-torchrun",
            f"{nodes} nodes: from the command to the first all-reduce",
            Side("paceline submit", _first(nodes, _submit_allreduce)),
            Side("srun torchrun", _first(nodes, _srun_torchrun)),
        )
        for nodes in (2, 8)
    ),
]
