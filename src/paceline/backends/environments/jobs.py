"""The environment or image of a job; its modules are imported only for jobs that have one."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from paceline.contract.nodejob import NodeJob

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.backends.containers import Containers
    from paceline.backends.remote.connection import Host
    from paceline.contract.messages import Invitation
    from paceline.contract.records import DataRecord
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


def containers_of(
    spec: JobSpec, program: str | None, data: tuple[DataRecord, ...], imports: Sequence[str]
) -> Containers | None:
    """The containers of a job, if it has an image; see `Containers` for the arguments."""
    if spec.image is None:
        return None
    from paceline.backends.containers import Containers
    from paceline.job.errors import UserError

    if spec.environment is not None:
        raise UserError("--environment: the packages are those of --image; leave it out, or give --environment none")
    return Containers(spec.for_node(), program, data, imports)


def equipped(hosts: Sequence[_Host], invited: Invitation, program: str | None) -> list[_Host]:
    """Machines that join a job, each with the Python of its environment or image, which they get if they lack it."""
    job = NodeJob.from_json(invited["job"])
    if job.image:
        from paceline.backends.containers import Containers

        from .machines import Silence

        containers = Containers(job, program, tuple(invited["sources"]), ())
        containers.ask(hosts)
        return [*containers.build(hosts, Silence()).values()]
    if not job.environment_digest:  # a host may run an older version
        return list(hosts)
    from paceline.job.spec import JobSpec

    from .machines import Environments, Silence

    found = Environments(JobSpec.validated({key: getattr(job, key) for key in _OWN}))
    found.ask(hosts, invited.get("minor"))
    return [*found.build(hosts, Silence()).values()]
