"""What a batch script or a pod runs on each node: makes this node's part of a job, and becomes its agent.

No client is connected. The scheduler starts the same command on all nodes, and a file contains what a client would
send. The process that the scheduler has started belongs to the job from beginning to end: it receives the scheduler's
signals, and ends with the job's exit code.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.node.errors import Refused
from paceline.node.files import load_json
from paceline.node.store import make
from paceline.node.store.code_folder import take, unpack
from paceline.node.store.home import Home
from paceline.node.store.plan import Order, Plan, make_plan, this_machine

from .pod_format import FIRST_POD
from .start import order_of

if TYPE_CHECKING:
    from typing import NoReturn

    from .protocol import BatchRequest

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


def read(path: Path) -> BatchRequest:
    """The request in a file, completed with the numbers from the scheduler's variables."""
    try:
        request: BatchRequest | None = load_json(path)  # type: ignore[assignment]  # what our own client has written
    except ValueError as error:
        raise Refused(str(error)) from None
    if request is None:
        raise Refused(f"no file {path} that describes the job")
    if request.get("address_variable"):
        address = os.environ.get(request["address_variable"] or "")
        request = {**request, "job": {**request["job"], "local_address": address or None}}
    variable = request["node_rank_variable"]
    if variable is None:
        return request
    value = os.environ.get(variable, "")
    pod, dash, number = value.rpartition("-")  # NAME-worker-3 is the name of a pod
    if not number.isdecimal() or bool(dash) != bool(pod):
        raise Refused(f"{variable}={value!r} is not a node rank; start this by the job's scheduler")
    first = int(os.environ.get(FIRST_POD) or 0)
    return {**request, "job": {**request["job"], "node_rank": first + int(number)}}


def _run(request: BatchRequest, folder: Path) -> NoReturn:
    """Become the agent."""
    home = home_of(request)
    order = order_of(home, request)
    if make.is_back(home, order):
        make.become_again(home, order)
    with make.making(plan_of(home, request, order)) as new:
        new.become(code_at(new.code, request, folder))


def home_of(request: BatchRequest) -> Home:
    """Where this machine's jobs are."""
    return Home(Path(request["root"]).expanduser())


def plan_of(home: Home, request: BatchRequest, order: Order) -> Plan:
    """This node's part of the job before anything of it is made."""
    return make_plan(home, this_machine(home, request["slots"], is_scheduled=True), order)


def code_at(destination: Path | None, request: BatchRequest, folder: Path) -> dict[str, Any] | None:
    """Put the job's own code there, from an archive or a folder beside the request; returns the record of it."""
    if destination is None:
        return None
    record = dict(request["code"] or {})
    if cloned := request.get("cloned"):
        record["commit"] = (folder / "commit").read_text().strip()
        take(folder / cloned, destination)
    else:
        with open(folder / (request["archive"] or ""), "rb") as archive:
            unpack(archive, destination)
    return record
