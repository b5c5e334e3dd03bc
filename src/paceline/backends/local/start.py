"""Gives a job its run directory and starts its agent."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.backends.foreground import terminal_size
from paceline.backends.submission import NameTaken
from paceline.job.errors import UserError
from paceline.job.paths import jobs_folder
from paceline.node.rundir.directory import RunDirectory
from paceline.node.rundir.staging import Staging
from paceline.node.store.lifecycle import start_agent, write_down

if TYPE_CHECKING:
    import socket
    import subprocess
    from collections.abc import Iterator

    from paceline.job.spec import JobSpec
    from paceline.node.spec import NodeSpec

NOT_FOR_JOBS = ("GIT_SYNC_USERNAME", "GIT_SYNC_PASSWORD")  # they fetch the code, and end there


def folder_of(spec: JobSpec) -> Path:
    """Where the job's run directory goes."""
    return Path(spec.log_dir).absolute() / spec.name if spec.log_dir else jobs_folder() / spec.name


def _jobs_if_elsewhere(spec: JobSpec) -> Path | None:
    """The folder of jobs, for one whose run directory is not in it."""
    return jobs_folder() if spec.log_dir else None


@contextlib.contextmanager
def staged(spec: JobSpec) -> Iterator[Staging]:
    """A run directory for a job, which becomes one by `start`; a failure before leaves nothing.

    Raises:
        UserError: it cannot be made.
    """
    path = folder_of(spec)
    try:
        staging = Staging(path, _jobs_if_elsewhere(spec))
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"cannot write to {path.parent}: it is no folder; choose another {_where(spec)}") from None
    except OSError as error:
        raise UserError(
            f"cannot write to {path.parent}: {error.strerror}; choose another folder with {_where(spec)}"
        ) from None
    with staging:
        try:
            yield staging
        except OSError as error:
            raise UserError(
                f"cannot write to {path.parent}: {error.strerror}; make room, or choose another {_where(spec)}"
            ) from None


def _where(spec: JobSpec) -> str:
    return "--log-dir" if spec.log_dir else "PACELINE_HOME"


def start(
    staging: Staging, spec: JobSpec, node: NodeSpec, record: dict[str, Any], lifeline: socket.socket | None
) -> tuple[RunDirectory, subprocess.Popen[bytes]]:
    """Write down what the job is, give it its name, and start its agent.

    Args:
        staging: the job's folder, being made.
        spec: what the user asked for.
        node: this node's part of it.
        record: what is known of the job beside the two, for `job.json`.
        lifeline: the job ends when the other end of this closes; None for one that outlives the client.

    Raises:
        NameTaken: another job has the name.
    """
    directory = staging.directory
    write_down(directory, {**record, "spec": spec.model_dump(mode="json"), "created": time.time()}, node)
    with _registered(spec):
        try:
            directory = staging.settle()
        except FileExistsError as error:
            raise NameTaken(spec.name, Path(error.filename)) from None
    env = {name: value for name, value in os.environ.items() if name not in NOT_FOR_JOBS}
    if lifeline is not None:
        env = {**terminal_size(), **env}
    return directory, start_agent(staging, node.python, env, lifeline)


@contextlib.contextmanager
def _registered(spec: JobSpec) -> Iterator[None]:
    """A run directory elsewhere is known by a link among the others, where names are unique."""
    jobs = _jobs_if_elsewhere(spec)
    link = None if jobs is None else jobs / spec.name
    if link is not None:
        try:
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(folder_of(spec))
        except FileExistsError:
            raise NameTaken(spec.name, link) from None
        except OSError:  # no home that can be written to: the job runs, and only `list` does not know it
            link = None
    try:
        yield
    except BaseException:
        if link is not None:
            link.unlink(missing_ok=True)
        raise
