"""What srun starts on each node: makes this node's part of the job, and becomes its agent.

Everything that the nodes must agree on follows from Slurm's own variables, which are the same on all of them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.contract import TOKEN, ContractError
from paceline.contract.nodejob import Order
from paceline.contract.slurm import SlurmContract, agreed_port, expand_hosts
from paceline.node.errors import Refused
from paceline.node.host.slurm.call import call
from paceline.node.host.slurm.job_folder import JobFolder, current_start, own_number
from paceline.node.host.start import order_of
from paceline.node.spec import CURRENT_SECONDS
from paceline.node.store import make
from paceline.node.store.home import Home
from paceline.node.store.plan import make_plan, this_machine

if TYPE_CHECKING:
    from typing import NoReturn

    from paceline.contract import Placement
    from paceline.node.host.slurm.job_folder import Start

_LEAST_LOOK, _LOOK = 0.02, 0.2  # seconds between two looks at what another machine writes, at first and later
_NOTING = 30.0  # seconds in which who has submitted a Slurm job notes its number
_REFUSED = 2  # the exit code if the job cannot run here


def main(path: str) -> NoReturn:
    """Run this node's part of the job with this folder."""
    folder, start, placement = JobFolder(Path(path)), current_start(), _placement()
    part = folder.part(start, placement.node_rank)
    try:
        _claim(folder, start)
        if placement.node_rank == 0:  # before it looks for a stop: who stops the job does it the other way round
            with contextlib.suppress(OSError):
                (folder.of(start) / "step").write_text(os.environ["SLURM_STEP_ID"])
        if folder.is_stopped:  # the signal came before this process
            sys.exit(128 + signal.SIGTERM)
        part.mkdir(parents=True, exist_ok=True)
        _become(folder, start, placement)
    except _Other as error:  # the start that may work says how the job is
        _give_up(f"{socket.gethostname()}: {error}")
    except Refused as error:
        why = f"{socket.gethostname()}: {error}"
    except OSError as error:
        why = f"{socket.gethostname()}: {error.filename or path}: {error.strerror or error}"
    with contextlib.suppress(OSError):
        (part / "refused").write_text(why)
    _give_up(why)


class _Other(Refused):
    """It is not for this start to work on the job."""


def _claim(folder: JobFolder, start: Start) -> None:
    """Make this the start that may work: Slurm starts a job elsewhere when it has lost a node, which may go on."""
    until, pause = time.monotonic() + _NOTING, _LEAST_LOOK
    while not folder.has(start, own_number()):
        if time.monotonic() > until:
            raise _Other(
                f"Slurm job {own_number()} is none of the job {folder.name}, whose script it has; to run that again:"
                f" paceline resubmit {folder.name}"
            )
        time.sleep(pause)  # the kernel does not report what other machines write
        pause = min(2 * pause, _LOOK)
    newer = folder.take_over(start)
    if newer is not None:
        raise _Other(f"Slurm has started the job {folder.name} again meanwhile, as {newer}; this start, {start}, ends")
    folder.is_let_go()


def _give_up(why: str) -> NoReturn:
    print(f"paceline: {why}", file=sys.stderr, flush=True)
    with contextlib.suppress(Refused):  # the other nodes need not wait for this one
        call("scancel", "--quiet", "--signal=TERM", f"{own_number()}.{os.environ.get('SLURM_STEP_ID', '0')}")
    sys.exit(_REFUSED)


def _placement() -> Placement:
    """Where this process is in the step."""
    try:
        found = SlurmContract().read(os.environ)
    except ContractError as error:
        sys.exit(f"paceline: {error}")
    if found is None:
        sys.exit("paceline: this is started by srun, in the batch script of a job")
    if os.environ.get("SLURM_HET_SIZE"):
        sys.exit("paceline: the nodes are those of a heterogeneous job; leave ':' and het options out of --slurm")
    if found.world_size != found.node_count:
        sys.exit(
            f"paceline: srun started {found.world_size} tasks on {found.node_count} nodes, and a job needs one agent"
            " on each; leave ntasks options out of --slurm and of SLURM_ variables, and give the ranks with -n"
        )
    return found


def _become(folder: JobFolder, start: Start, placement: Placement) -> NoReturn:
    stored = folder.read()
    queue = os.environ.get("SLURM_JOB_PARTITION")
    job = replace(stored.node, node_rank=placement.node_rank, queue=queue)
    if placement.node_rank == 0:  # whom the others wait for
        _await_end(folder, start)
    hosts = expand_hosts(os.environ.get("SLURM_STEP_NODELIST") or os.environ["SLURM_JOB_NODELIST"])  # by node rank
    node = os.environ.get("SLURMD_NODENAME") or hosts[placement.node_rank]
    (folder.part(start, placement.node_rank) / "node").write_text(node)
    if len(hosts) > 1 or str(job.nodes) != "1":
        of_srun = os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "")  # on the first node, since the batch script is there
        address = _address(placement.main_address, "" if stored.allocation is not None else of_srun)
        port = agreed_port(start.id, f"{start.restarts}.{os.environ['SLURM_STEP_ID']}")
        if placement.node_rank == 0:
            _check_free(port, folder.name)
        job = replace(job, main_address=address, main_port=port)
    home = Home(folder.root, folder.part(start, placement.node_rank), is_remote=True)
    order = Order(
        job=job,
        data=stored.data,
        job_id=stored.job_id,
        hosts=tuple(hosts),
        first_attempt=_first_attempt(folder, start),
        current=(str(folder.of(start) / "followed"), ""),
        stop_file=str(folder.stop),
        terminal=stored.terminal,
        secrets={name: os.environ[name] for name in job.secrets if name in os.environ},
        token=os.environ.get(TOKEN),
    )
    with make.making(make_plan(home, this_machine(home, 0, is_scheduled=True), order_of(home, order))) as new:
        new.become()


def _check_free(port: int, name: str) -> None:
    """Check that the port at which the nodes meet is free on the first one."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        raise Refused(
            f"cannot listen on port {port}, which follows from the number of the Slurm job: {error.strerror}; start it"
            f" again to get another port: paceline resubmit {name}"
        ) from None


def _await_end(folder: JobFolder, start: Start) -> None:
    """Wait for agents of the starts before that may still run, until they have seen that this one has taken over."""
    before = [other for other in folder.claimed if folder.follower(other) == str(start)]
    until = time.monotonic() + 2 * CURRENT_SECONDS + _LOOK
    while time.monotonic() < until and not all(map(folder.is_over, before)):
        time.sleep(_LOOK)  # the kernel does not report what other machines write


def _address(name: str, of_srun: str) -> str:
    """The address of the first node: its name, if that can be resolved here, else where srun says that it runs."""
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return of_srun or name
    return name


def _first_attempt(folder: JobFolder, start: Start) -> int:
    """The number after the last attempt of the starts before."""
    before = (run.read_status() or {} for other in folder.starts if other != start for run in folder.runs(other))
    return 1 + max((int(status["attempt"]) for status in before if status.get("start") is not None), default=-1)
