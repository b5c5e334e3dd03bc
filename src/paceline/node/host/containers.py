"""Images of containers on this machine, for a client elsewhere; see `machine/containers.py`."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.contract.nodejob import Order
from paceline.node import ENTRY
from paceline.node.machine import containers
from paceline.node.store.home import Home

from .plan import software_of
from .start import order_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.contract.facts import ImageFacts
    from paceline.contract.messages import Container, PrepareContainer, Pulled, Says


def container(home: Home, request: Container) -> ImageFacts:
    """What would run an image here, and whether it is there."""
    return containers.look(home.root, request["image"], request["program"], needs_devices=request["needs_devices"])


def container_prepare(home: Home, request: PrepareContainer) -> Iterator[Says | Pulled]:
    """Get an image, and find out whether a job fits what is in it; its container shows the folders of the job."""
    own = [home.root, Path.home()]
    order = order_of(home, Order.from_json(request["order"]))
    binds = containers.binds_of("a container", own, order.job, order.data)
    asked = {**request, "root": str(home.root)}
    argument = base64.urlsafe_b64encode(json.dumps(asked).encode()).decode()
    yield from containers.prepare(home.root, request, binds, [ENTRY, "inside", argument])


def inside(argument: str) -> None:
    """In a container: print what decides whether a job fits it."""
    request = json.loads(base64.urlsafe_b64decode(argument))
    order = Order.from_json(request["order"])
    print(json.dumps(software_of(Home(Path(request["root"])), order, request["imports"])))
