"""How a job of a client elsewhere fits this machine, before anything of it starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.contract.machine import machine_id
from paceline.node.devicequeue import ticket
from paceline.node.errors import Refused
from paceline.node.machine import containers, environments, software, volumes
from paceline.node.machine.network import own_address
from paceline.node.machine.ports import Reservation
from paceline.node.planning import fitting
from paceline.node.store import records
from paceline.node.store.plan import Order, check_writable, has_checkpoint, link_notes, make_plan, this_machine

from .check import converse, disks, machine_facts, software_facts
from .start import brought_by, found_volumes, order_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    from paceline.node.store.home import Answer, Home, Request

    from .protocol import PlanRequest


def plan(home: Home, request: PlanRequest) -> Answer:
    """What `start` would do: the complete job, this machine's node rank, and its ranks' variables."""
    plan = make_plan(home, this_machine(home, request["slots"]), order_of(home, request))
    return {
        "job": plan.foreseen_job(),
        "node": {"address": own_address(), "slots": plan.node.nproc},
        "ranks": plan.ranks(request["start"]),
    }


def preflight(home: Home, request: Request) -> Iterator[Answer]:
    """What decides where a job runs, and `refused` if it cannot run here; then see `check.converse`.

    Without a job, everything that this machine has.
    """
    facts: Answer = {"address": own_address()}
    if (wanted := request["environment"]) is not None:
        facts["environment"] = found = (containers if "image" in wanted else environments).look(home.root, **wanted)
        if "problem" in found:
            facts["refused"] = found["problem"]
    if request["job"] is None:
        facts.update(software_facts(home.root), **machine_facts(), disks=disks(home.root, home.jobs))
    else:
        facts.update(_look(home, request))
        try:
            facts["has_checkpoint"] = _has_checkpoint(home, request)
            facts["notes"] = [*volumes.notes(found_volumes(home, request)), *link_notes(home, request["job"])]
            facts.update(software_of(home, request), disks=disks(home.root, home.jobs))
        except Refused as error:
            facts["refused"] = str(error)
    return converse(request["token"].encode(), request["name"], facts)


def software_of(home: Home, request: Request) -> Answer:
    """Python, the framework of a job and what its script imports, as they are here; `refused` if that does not fit."""
    try:
        framework = _framework(home, request)
    except Refused as error:
        return {"refused": str(error)}
    if this_machine(home, request["slots"]).chooses_python(request["job"]):  # what is installed here says nothing
        framework = None
    facts = software_facts(home.root, [framework] if framework else [])
    if framework:
        facts["imports"] = software.versions(request["imports"] or _imported(request["job"]))
    return facts


def _look(home: Home, request: Request) -> Answer:
    """What decides where a job runs: names that are taken, devices that are free, and ports for the nodes."""
    devices, _ = this_machine(home, request["slots"]).devices
    try:
        held = {device for entry in ticket.overview(ticket.folder_of(home.root)) for device in entry.devices}
    except OSError:
        held = set()
    ports = Reservation()
    port = ports.take()
    ports.release()
    return {
        "names": list(records.names(home.jobs)),
        "free": len([device for device in devices if device not in held]),
        "address": own_address(),
        "machine": machine_id(),
        "port": port,
    }


def _has_checkpoint(home: Home, request: Request) -> bool:
    """Whether the checkpoint that the job goes on from is here already."""
    order = Order(request["job"], data=found_volumes(home, request), brought=brought_by(request))
    return has_checkpoint(order, Path(os.path.expanduser(request["job"]["working_dir"])))


def _imported(job: Mapping[str, Any]) -> list[str]:
    """What a job imports whose code is here already."""
    return fitting.imported(job, Path(os.path.expanduser(job["working_dir"]))) if job["code"] is None else []


def _framework(home: Home, request: Request) -> str | None:
    """The framework that a job's ranks import, None if they import none. Ports are checked at the start."""
    job = {**request["job"], "node_rank": None, "main_address": "127.0.0.1", "main_port": None}
    if job["code"] is None or job["working_dir"] != ".":
        job["working_dir"] = os.path.expanduser(job["working_dir"])
    try:
        check_writable(home.jobs)
    except OSError as error:
        raise Refused(f"{error.filename}: {error.strerror}; choose another root in the target's settings") from None
    job = fitting.complete(job, this_machine(home, request["slots"]), None)
    return None if job["command"] is not None else fitting.PACKAGES.get(job["framework"])
