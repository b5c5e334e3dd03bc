"""The environment of a job; its modules are imported only for jobs that have one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.backends.remote.connection import Host
    from paceline.job.spec import JobSpec

    from .machines import Environments

_OWN = ("script", "module", "command", "environment", "environment_digest")
_Host = TypeVar("_Host", bound="Host")


def environments_of(spec: JobSpec) -> tuple[Environments | None, JobSpec]:
    """The environment of a job, if it has one, and the job with its digest."""
    if spec.environment is None:
        return None, spec
    from .machines import Environments

    found = Environments(spec)
    return found, spec.changed({"environment_digest": found.digest})


def equipped(hosts: Sequence[_Host], invited: Mapping[str, Any]) -> list[_Host]:
    """Machines that join a job, each with the Python of the job's environment, which is built where it is not."""
    job = invited["job"]
    if not job.get("environment_digest"):  # a host may run an older version
        return list(hosts)
    from paceline.job.spec import JobSpec

    from .machines import Environments, Silence

    found = Environments(JobSpec.validated({key: job[key] for key in _OWN}))
    found.ask(hosts, invited.get("minor"))
    return [*found.build(hosts, Silence()).values()]
