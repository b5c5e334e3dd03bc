"""How a job of a client elsewhere fits this machine, before anything of it starts."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from paceline.contract.machine import machine_id
from paceline.contract.nodejob import Order
from paceline.node.devicequeue import ticket
from paceline.node.errors import Refused
from paceline.node.machine import containers, environments, software, volumes
from paceline.node.machine.network import own_address
from paceline.node.machine.ports import Reservation
from paceline.node.planning import fitting
from paceline.node.store import records
from paceline.node.store.plan import check_writable, has_checkpoint, link_notes, make_plan, this_machine

from .check import converse, disks, machine_facts, software_facts
from .start import order_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.contract.facts import EnvironmentFacts, ForJob, ImageFacts, PreflightFacts, RouteFacts, Software
    from paceline.contract.messages import Now, Plan, Planned, Preflight, Reached
    from paceline.node.journal.status import Attempt
    from paceline.node.store.home import Home


def plan(home: Home, request: Plan) -> Planned:
    """What `start` would do: the complete job, this machine's node rank, and its ranks' variables."""
    order = order_of(home, Order.from_json(request["order"]))
    plan = make_plan(home, this_machine(home, order.slots), order)
    return {
        "job": plan.foreseen_job().to_json(),
        "node": {"address": own_address(), "slots": plan.node.nproc},
        "ranks": plan.ranks(cast("Attempt | None", request["start"])),
    }


def preflight(home: Home, request: Preflight) -> Iterator[PreflightFacts | Now | Reached | RouteFacts]:
    """What decides where a job runs, and `refused` if it cannot run here; then see `check.converse`.

    Without a job, everything that this machine has.
    """
    facts: PreflightFacts = {"address": own_address()}
    if (wanted := request["environment"]) is not None:
        found: EnvironmentFacts | ImageFacts
        found = (containers if "image" in wanted else environments).look(home.root, **wanted)
        facts["environment"] = found
        if "problem" in found:
            facts["refused"] = found["problem"]
    if request["order"] is None:
        there = disks(home.root, home.jobs)
        facts = {**facts, **software_facts(home.root), **machine_facts(), "disks": there}
    else:
        order = Order.from_json(request["order"])
        facts = {**facts, **_look(home, order)}
        try:
            order = order_of(home, order)
            facts["has_checkpoint"] = has_checkpoint(order, Path(os.path.expanduser(order.job.working_dir)))
            facts["notes"] = [*volumes.notes(order.data), *link_notes(home, order.job)]
            facts = {**facts, **software_of(home, order, request["imports"]), "disks": disks(home.root, home.jobs)}
        except Refused as error:
            facts["refused"] = str(error)
    return converse(request["token"].encode(), request["name"], facts)


def software_of(home: Home, order: Order, imports: Sequence[str]) -> Software:
    """Python, the framework of a job and what its script imports, as they are here; `refused` if that does not fit."""
    try:
        fitted = _fitted(home, order)
    except Refused as error:
        return {"refused": str(error)}
    framework = fitting.PACKAGES.get(fitted.job.framework or "") if fitted.job.command is None else None
    if this_machine(home, order.slots).packages(order.job).are_unknown:  # what is installed here says nothing
        framework = None
    facts = software_facts(home.root, [framework] if framework else [])
    if framework:
        facts["imports"] = software.versions(imports or fitted.imports.packages)
    return facts


def _look(home: Home, order: Order) -> ForJob:
    """What decides where a job runs: names that are taken, devices that are free, and ports for the nodes."""
    devices, _ = this_machine(home, order.slots).devices
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


def _fitted(home: Home, order: Order) -> fitting.Fitted:
    """A job as this machine would run it. Ports are checked at the start."""
    job = replace(order.job, node_rank=None, main_address="127.0.0.1", main_port=None)
    if job.code is None or job.working_dir != ".":
        job = replace(job, working_dir=os.path.expanduser(job.working_dir))
    try:
        check_writable(home.jobs)
    except OSError as error:
        raise Refused(f"{error.filename}: {error.strerror}; choose another root in the target's settings") from None
    return fitting.complete(job, this_machine(home, order.slots), None)
