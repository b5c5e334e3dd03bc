"""The warm servers of this machine, for a client elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.node.store import warming
from paceline.node.store.plan import this_machine

if TYPE_CHECKING:
    from paceline.contract.messages import Servers, WarmAsk, WarmStart
    from paceline.node.store.home import Home


def warm_start(home: Home, request: WarmStart) -> Servers:
    """Start a warm server here."""
    return {"servers": [warming.start(home, this_machine(home, request["slots"]), request)]}


def warm_ask(home: Home, request: WarmAsk) -> Servers:
    """What each warm server here answers to `what`: "describe" or "stop"."""
    return {"servers": warming.ask(home, request["what"])}
