"""The environment variables of every launcher and framework, written and read in one place.

`CONTRACTS` maps the name that `--framework` takes to the class that knows that framework's variables; `OWN_CONTRACT`
knows paceline's own variables, which every rank gets too. `recognise` finds out which launcher started the
calling process. The names are imported when they are used: a node answers most questions without them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .base import Contract, Variables
    from .frameworks import CONTRACTS, OWN_CONTRACT
    from .paceline import (
        ERROR_FILE,
        GIT_CREDENTIALS,
        HOROVOD,
        RANK_KEY,
        RESUME_CODE,
        STOP_SIGNALS,
        TOKEN,
        WANTS_INTERRUPT,
    )
    from .placement import ContractError, Placement, thread_count
    from .recognition import Recognised, recognise

__all__ = [
    "CONTRACTS",
    "ERROR_FILE",
    "GIT_CREDENTIALS",
    "HOROVOD",
    "OWN_CONTRACT",
    "RANK_KEY",
    "RESUME_CODE",
    "STOP_SIGNALS",
    "TOKEN",
    "WANTS_INTERRUPT",
    "Contract",
    "ContractError",
    "Placement",
    "Recognised",
    "Variables",
    "recognise",
    "thread_count",
]

_HOMES = {
    "CONTRACTS": "frameworks", "OWN_CONTRACT": "frameworks",
    "Contract": "base", "Variables": "base",
    "ContractError": "placement", "Placement": "placement",
    "Recognised": "recognition", "recognise": "recognition",
    "thread_count": "placement",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    found = getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'paceline')}"), name)
    globals()[name] = found
    return found
