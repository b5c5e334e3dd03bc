"""Finds the backend of a name: one of paceline's own, or of the entry-point group `paceline.backends`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from paceline.job.errors import UserError, nearest

from .base import Backend

if TYPE_CHECKING:
    from collections.abc import Mapping


BACKENDS = {"local": "paceline.backends.local.backend:Local", "ssh": "paceline.backends.ssh.backend:Ssh"}


HERE = "local"


def load(name: str = HERE, options: Mapping[str, Any] | None = None) -> Backend:
    """The place of this name: this machine, or a target of the settings.

    Args:
        name: of the place.
        options: of the target, which go over what the settings say.

    Raises:
        UserError: there is none, or its settings make no sense.
    """
    if name == HERE:
        return _kind(HERE).configured(HERE, {})
    from paceline.job.settings import load as settings  # takes long to import

    targets = settings().targets
    target = targets.get(name)
    if target is None:
        hint = nearest(name, [HERE, *targets]) if targets else "define it as [targets.NAME] in paceline.toml"
        raise UserError(f"no target {name!r}; {hint}")
    return _kind(target.backend).configured(name, {**target.options, **(options or {})})


def _kind(name: str) -> type[Backend]:
    """A kind of backend: one of paceline's own, or of the entry-point group `paceline.backends`.

    Raises:
        UserError: there is none of this name.
    """
    place = BACKENDS.get(name)
    if place is None:
        from importlib.metadata import entry_points  # takes longer than all else here

        found = {point.name: point.value for point in entry_points(group="paceline.backends")}
        if name not in found:
            raise UserError(f"no backend {name!r}; {nearest(name, [*BACKENDS, *found])}")
        place = found[name]
    module, _, attribute = place.partition(":")
    backend: type[Backend] = getattr(importlib.import_module(module), attribute)
    return backend
