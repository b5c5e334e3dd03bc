"""Copies of the logs on a volume, for pods that are gone: where they are.

Pods write them to `LOG-DIR/JOB-ID/node-K-TIME.log`, see `node/host/kept_log.py`.
"""

from __future__ import annotations

import json
import posixpath
from typing import TYPE_CHECKING, NamedTuple

from paceline.job.errors import UserError

from .names import LOGS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.job.spec import JobSpec, Mount

FOLDER = "paceline-logs"  # on the volume that has the checkpoints


class Kept(NamedTuple):
    """Where the logs of a job are kept."""

    claim: str
    mount: str  # where the job's pods have it
    folder: str  # of the job's logs, in the pods


def kept(spec: JobSpec, name: str, job_id: str) -> Kept | None:
    """Where a job's logs are kept: in --log-dir, or else on the volume of its checkpoints; None for nowhere."""
    for path, flag in ((spec.log_dir, "--log-dir"), (spec.checkpoint_dir, None)):
        if not path:
            continue
        mount = volume_of(path, spec)
        if mount is not None:
            above = path if flag else posixpath.join(mount.path, FOLDER)
            return Kept(mount.volume, mount.path, posixpath.join(above, f"{name}-{job_id[:8]}"))
        if flag:
            raise UserError(f"{flag} {path}: pods keep logs on a volume only; mount one there with --data CLAIM:/path")
    return None


def volume_of(path: str, spec: JobSpec) -> Mount | None:
    """The volume of a job that has a path of its pods; None if it is on none."""
    found = [it for it in spec.data if is_below(path, it.path)]
    return max(found, key=lambda it: len(it.path), default=None)


def is_below(path: str, folder: str) -> bool:
    """Whether a path of a pod is in a folder, or is it."""
    return posixpath.isabs(path) and posixpath.commonpath(
        [posixpath.normpath(path), posixpath.normpath(folder)]
    ) == posixpath.normpath(folder)


def of(annotations: Mapping[str, str]) -> Kept | None:
    """Where the logs of a job are kept, as its annotation says."""
    try:
        return Kept(**json.loads(annotations[LOGS]))
    except (KeyError, ValueError, TypeError):
        return None


def shown(where: Kept | None) -> str:
    """Where the logs of a job are, in words."""
    if where is None:
        return "not kept: they go with the pods; --log-dir on a volume (--data) keeps them"
    return f"kept on volume {where.claim}, in {where.folder}"
