"""What the flags that say where jobs are have given, and which of them backends have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.backends import registry

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.backends.base import Flag


def flags_of_backends() -> list[tuple[str, Flag]]:
    """The flags of all kinds of backends, each with its kind."""
    return [(kind, flag) for kind, those in registry.flags().items() for flag in those]


class Where:
    """What the flags of a command line say of where jobs are.

    Attributes:
        of_backends: the flags of backends that are given: parameter → value.
        on: the target.
        host_discovery_script: prints the hosts. Only verbs that start jobs have this flag and the next one.
        cooldown: the least and the greatest time until a host that has failed comes back.
    """

    of_backends: Mapping[str, str | int | tuple[str, ...]]
    on: str | None = None
    host_discovery_script: str | None = None
    cooldown: tuple[str, str] | None = None

    def __init__(self, params: Mapping[str, Any]) -> None:
        """Take what click has read."""
        names = {flag.parameter for _, flag in flags_of_backends()}
        self.of_backends = {name: it for name, it in params.items() if name in names and it not in (None, ())}
        vars(self).update((name, value) for name, value in params.items() if name not in names)
