"""Submits a job to this machine: everything that can be wrong is found before anything is started."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.job.errors import UserError
from paceline.job.home import jobs_folder
from paceline.job.spec import JobSpec, new_name
from paceline.node.run_directory import RunDirectory

from . import prepare
from .starting import NameTaken, staged, start

if TYPE_CHECKING:
    import socket
    import subprocess
    from collections.abc import Callable

    from paceline.node.spec import NodeSpec

    Progress = Callable[[str, int, int | None], None]


@dataclass(frozen=True)
class Launched:
    """A job that was just started: what was asked for, complete; this node's part; its folder and its agent."""

    spec: JobSpec
    node: NodeSpec
    directory: RunDirectory
    agent: subprocess.Popen[bytes]


def launch(
    spec: JobSpec,
    progress: Progress,
    *,
    lifeline: socket.socket | None = None,
    split_streams: Callable[[JobSpec], tuple[int, ...]] = lambda _: (),
) -> Launched:
    """Start a job.

    Args:
        spec: what the user asked for.
        progress: hears what is done, how much of it is done, and how much there is.
        lifeline: the job ends when the other end closes; None for one that outlives its client.
        split_streams: the local ranks of the completed job whose stderr is kept apart.

    Raises:
        NameTaken: another job has the name.
        UserError: the job cannot run here.
    """
    spec = named(spec).model_copy(update={"detached": lifeline is None})
    taken = jobs_folder() / spec.name
    if os.path.lexists(taken):
        raise NameTaken(spec.name, taken)
    missing = [name for name in spec.secrets if name not in os.environ]
    if missing:
        raise UserError(f"secret {missing[0]} is not set in your environment; export it, then submit again")
    record: dict[str, Any] = {}
    if spec.code is None:  # a job that cannot run leaves nothing, not even a folder
        spec = prepare.complete(spec)
        split = split_streams(spec)
    with staged(spec) as staging:
        node = prepare.place(spec, split)
        if spec.resume_from is not None:
            _take_checkpoints(spec.resume_from, staging.directory.path)
        directory, agent = start(staging, spec, node, record, lifeline)
    return Launched(spec, node, directory, agent)


def named(spec: JobSpec) -> JobSpec:
    """The job with a name, made up where it has none."""
    stem = spec.target.rpartition(".")[2] if spec.kind == "module" else Path(spec.target).stem
    return spec if spec.name else spec.model_copy(update={"name": new_name(stem)})


def _take_checkpoints(name: str, folder: Path) -> None:
    """Give a job the checkpoints that another one kept in its own folder."""
    old = jobs_folder() / name / "checkpoints"
    if old.is_dir():
        shutil.copytree(old, folder / "checkpoints", copy_function=_link)


def _link(source: str, target: str) -> None:
    """Committed checkpoints never change, so both jobs may have the same file."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
