"""The interface of a contract: one framework's variables, written and read in one place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .placement import Placement

Variables = dict[str, str]


class Contract(ABC):
    """Turns a `Placement` into the environment variables that one framework reads, and back.

    `name` is what `--framework` calls it; `carries` are the fields of `Placement` that its variables hold, so
    `read(write(p))` equals `p` in these fields and has the defaults in the others. `unsets` are variables that the
    framework's own launcher keeps from its processes.
    """

    name: ClassVar[str]
    carries: ClassVar[frozenset[str]]
    unsets: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def write(self, placement: Placement) -> Variables:
        """The variables that a process at `placement` must see."""

    @abstractmethod
    def read(self, env: Mapping[str, str]) -> Placement | None:
        """The placement that `env` describes, or None when this launcher did not start the process."""
