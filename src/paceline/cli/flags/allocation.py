"""`paceline run` in an allocation, such as the shell of salloc: its nodes are those of the job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.backends import registry
from paceline.job.errors import UserError

from .selection import warn
from .where import backend_for, is_elsewhere

if TYPE_CHECKING:
    from paceline.backends.base import Backend
    from paceline.job.spec import JobSpec

_BY_HAND = ("standalone", "node_rank", "master_addr", "rdzv_endpoint")  # who gives these starts each node himself


def in_allocation(given: dict[str, Any], spec: JobSpec, there: Backend) -> tuple[Backend, dict[str, Any]] | None:
    """The backend that uses the allocation of this process, and what follows from it, as flags.

    None if there is no allocation, or the job is not for it: its flags name other places, or say that it is started on
    each node by hand, or on this machine alone. Warns if it was started several times, each for itself.
    """
    is_named = given["on"] is not None
    if not is_named and (
        is_elsewhere(given) or any(given[flag] not in (None, False) for flag in _BY_HAND)
        or (spec.node_range == (1, 1) and "nodes" in spec.given)
    ):  # fmt: skip
        return None
    if is_named and there.name == registry.HERE:
        return None
    found = registry.allocation()
    if found is None:
        if there.name == registry.HERE and spec.node_range == (1, 1) and (line := registry.started_alone()) is not None:
            warn(line)
        return None
    kind, allocation = found
    inside: Backend | None = there
    if there.name != registry.HERE or not allocation.is_here:
        place = backend_for({**given, "on": kind}) if there.name == registry.HERE else there
        inside = place.within(allocation)
    if inside is None:
        return None
    follows: dict[str, Any] = {}
    if "nodes" not in spec.given:
        follows["nnodes"] = str(len(allocation.hosts))
    if "ranks" not in spec.given and allocation.ranks is not None:
        if not allocation.ranks:
            raise UserError(
                f"the tasks of allocation {allocation.id} are not the same number on each node; say how many ranks each"
                " node is to have with -n"
            )
        follows["ranks"] = str(allocation.ranks)
    return inside, follows
