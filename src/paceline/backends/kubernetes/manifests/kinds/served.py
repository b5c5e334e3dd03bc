"""Which kinds a cluster serves: those that operators brought, in the versions that they brought."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.job.errors import UserError

from .job import BatchJob, JobSet, TrainJob
from .kubeflow import PaddleJob, PyTorchJob, TFJob
from .mpijob import MPIJob

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.backends.kubernetes.api.client import Cluster

    from .base import Kind

KINDS: tuple[type[Kind], ...] = (BatchJob, PyTorchJob, MPIJob, TFJob, PaddleJob, TrainJob, JobSet)


def discover(cluster: Cluster) -> None:
    """Ask the cluster for all that `served` is to know."""
    cluster.learn(f"{kind.group}/{it}" for kind in KINDS if kind is not BatchJob for it in kind.versions)


def served(cluster: Cluster) -> Iterator[Kind]:
    """The kinds that the cluster serves, each in the best version of those that paceline knows."""
    discover(cluster)
    for kind in KINDS:
        if kind is BatchJob:
            yield kind()
            continue
        version = next((it for it in kind.versions if cluster.serves(f"{kind.group}/{it}", kind.title)), None)
        if version is not None:
            yield kind(version)


def chosen(cluster: Cluster, name: str) -> Kind:
    """The kind that `--kind` names."""
    if name == BatchJob.name:
        return BatchJob()
    (wanted,) = (kind for kind in KINDS if kind.name == name)
    there = list(served(cluster))
    found = next((kind for kind in there if isinstance(kind, wanted)), None)
    if found is not None:
        found.learn(cluster)
        return found
    others = [it for it in cluster.versions(wanted.group) if cluster.serves(f"{wanted.group}/{it}", wanted.title)]
    lacks = f"{wanted.title} {' or '.join(f'{wanted.group}/{it}' for it in wanted.versions)}"
    only = f" (but {', '.join(others)}, which paceline does not know)" if others else ""
    listed = ", ".join(kind.name if kind.name == "job" else f"{kind.name} ({kind.api_version})" for kind in there)
    raise UserError(
        f"--kind {name}: the cluster does not serve {lacks}{only}, which {wanted.brought_by} brings; it serves {listed}"
    )
