"""What a batch script or a pod runs on each node: makes this node's part of a job, and becomes its agent.

No client is connected. The scheduler starts the same command on all nodes, and a file contains what a client would
send. The process that the scheduler has started belongs to the job from beginning to end: it receives the scheduler's
signals, and ends with the job's exit code.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.contract.nodejob import BatchOrder
from paceline.node.errors import Refused
from paceline.node.files import load_json
from paceline.node.store import make
from paceline.node.store.code_folder import take, unpack
from paceline.node.store.home import Home
from paceline.node.store.plan import Plan, make_plan, this_machine

from .pod_format import FIRST_POD
from .start import order_of

if TYPE_CHECKING:
    from typing import NoReturn

    from paceline.contract.nodejob import Order
    from paceline.contract.records import CodeRecord

_REFUSED = 2  # the exit code if a job cannot run


def main(file: str) -> NoReturn:
    """Make this node's part of the job that a file describes, and become its agent."""
    path = Path(file)
    try:
        _run(read(path), path.parent)
    except Refused as error:
        print(f"paceline: {error}", file=sys.stderr)
    except OSError as error:
        print(f"paceline: {error.filename or path}: {error.strerror or error}", file=sys.stderr)
    sys.exit(_REFUSED)


def read(path: Path) -> BatchOrder:
    """The order in a file, completed with the numbers from the scheduler's variables."""
    try:
        stored = load_json(path)
    except ValueError as error:
        raise Refused(str(error)) from None
    if stored is None:
        raise Refused(f"no file {path} that describes the job")
    batch = BatchOrder.from_json(stored)
    if batch.address_variable:
        address = os.environ.get(batch.address_variable) or None
        batch = replace(batch, order=batch.order.with_job(local_address=address))
    if batch.node_rank_variable is None:
        return batch
    value = os.environ.get(batch.node_rank_variable, "")
    pod, dash, number = value.rpartition("-")  # NAME-worker-3 is the name of a pod
    if not number.isdecimal() or bool(dash) != bool(pod):
        raise Refused(f"{batch.node_rank_variable}={value!r} is not a node rank; start this by the job's scheduler")
    first = int(os.environ.get(FIRST_POD) or 0)
    return replace(batch, order=batch.order.with_job(node_rank=first + int(number)))


def _run(batch: BatchOrder, folder: Path) -> NoReturn:
    """Become the agent."""
    home = home_of(batch)
    order = order_of(home, batch.order)
    if make.is_back(home, order):
        make.become_again(home, order)
    with make.making(plan_of(home, order)) as new:
        new.become(code_at(new.code, batch, folder))


def home_of(batch: BatchOrder) -> Home:
    """Where this machine's jobs are."""
    return Home(Path(batch.root).expanduser())


def plan_of(home: Home, order: Order) -> Plan:
    """This node's part of the job before anything of it is made."""
    return make_plan(home, this_machine(home, order.slots, is_scheduled=True), order)


def code_at(destination: Path | None, batch: BatchOrder, folder: Path) -> CodeRecord | None:
    """Put the job's own code there, from an archive or a folder beside the order; returns the record of it."""
    if destination is None:
        return None
    if batch.cloned:
        take(folder / batch.cloned, destination)
        return {**(batch.order.code or {}), "commit": (folder / "commit").read_text().strip()}
    with open(folder / (batch.archive or ""), "rb") as archive:
        unpack(archive, destination)
    return batch.order.code or {}
