"""Starts, stops and removes the jobs of this machine, whose run directories lie in one folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from typing import TYPE_CHECKING, Any

from . import ENTRY, records, tensorboard
from .errors import Refused
from .run_directory import RunDirectory, write_json

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from .run_directory import Staging
    from .spec import NodeSpec

CLEAN, AT_ONCE = (15,), (15, 2)  # SIGTERM asks an agent to stop; a second signal, to stop at once
_AGENT_COMES = 10.0  # seconds for an agent to say who it is
_PAUSE = 0.02  # seconds between two looks whether it has


def write_down(directory: RunDirectory, job: Mapping[str, Any], node: NodeSpec) -> None:
    """Store what a job is: what was asked for and what is known of it beside, and this node's part."""
    write_json(directory.job, job)
    directory.spec.write_text(node.to_json())
    directory.spec.chmod(0o600)


def start_agent(
    staging: Staging, python: Sequence[str], env: Mapping[str, str], lifeline: socket.socket | None = None
) -> subprocess.Popen[bytes]:
    """Start the agent of a settled job; it holds the job's lock from now on, and outlives this process.

    Args:
        staging: the job's folder.
        python: interpreter with its options.
        env: its environment.
        lifeline: the job ends when the other end of this closes; None for one that outlives its client.
    """
    directory, end = staging.directory, -1 if lifeline is None else lifeline.fileno()
    command = [*python, ENTRY, "agent", str(directory.path), str(staging.lock), str(end)]
    with open(directory.agent_log, "ab") as log:
        return subprocess.Popen(
            command, pass_fds=[staging.lock, *([] if lifeline is None else [end])], stdin=subprocess.DEVNULL,
            stdout=log, stderr=log, start_new_session=True, cwd="/", env=env,
        )  # fmt: skip


def stop(run: RunDirectory, now: bool) -> None:
    """Ask a job to stop: cleanly, with its grace, or at once. One that has ended is left as it is.

    Raises:
        Refused: its agent does not answer.
    """
    deadline = time.monotonic() + _AGENT_COMES
    while run.is_held and not records.signal_agent(run.path, AT_ONCE if now else CLEAN):
        if time.monotonic() > deadline:
            raise Refused(f"the agent of job {run.path.name} does not answer; see {run.agent_log}")
        time.sleep(_PAUSE)  # it has just been started


def check_over(run: RunDirectory) -> None:
    """See that nobody works on a job.

    Raises:
        Refused: somebody does.
    """
    if run.is_held:
        raise Refused(f"job {run.path.name} has not ended; stop it first: paceline stop {run.path.name}")


def remove(run: RunDirectory) -> None:
    """Remove a job that has ended, with all that its run directory holds."""
    tensorboard.stop(run.path)
    folder = run.path.resolve()
    hidden = folder.with_name(f".{folder.name}.deleted.{time.monotonic_ns()}")
    folder.rename(hidden)  # so that there is never half a job
    if run.path.is_symlink():
        run.path.unlink()
    shutil.rmtree(hidden)


def take_checkpoints(old: Path, new: Path) -> None:
    """Give a job the checkpoints that another one kept in its own run directory."""
    for folder in old.glob("checkpoints*"):
        shutil.copytree(folder, new / folder.name, copy_function=_link)


def _link(source: str, target: str) -> None:
    """Committed checkpoints never change, so both jobs may have the same file."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
