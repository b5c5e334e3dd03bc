"""Environments of this machine, for a client here or elsewhere; see `machine/environments.py`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.node.machine import environments
from paceline.node.store.code_folder import unpack

from .protocol import Bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.contract import messages
    from paceline.contract.facts import EnvironmentFacts
    from paceline.node.store.home import Home


def environment(home: Home, request: messages.Environment) -> EnvironmentFacts:
    """What this machine has for an environment, and whether it has that."""
    return environments.look(home.root, request["digest"], request["index"])


def environment_build(home: Home, request: messages.BuildEnvironment) -> Iterator[messages.Says | messages.Built]:
    """Build an environment; an archive (tar) of `bytes` bytes with what it needs follows on stdin."""
    place = environments.folder(home.root)
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place, prefix=".files-") as folder:
        files = Path(folder, "files")
        unpack(Bytes(request["bytes"], "what the environment needs"), files)
        yield {"says": "begins"}  # all has come
        yield from environments.build(home.root, request, files)


def environment_list(home: Home, request: messages.Plain) -> messages.Environments:
    """The environments of this machine."""
    return {"environments": environments.listed(home.root)}


def environment_prune(home: Home, request: messages.PruneEnvironments) -> messages.Removed:
    """Remove environments."""
    return {"removed": environments.prune(home.root, request["names"])}
