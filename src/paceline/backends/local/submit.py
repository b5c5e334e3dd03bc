"""Submits a job to this machine: everything that can be wrong is found before anything is started."""

from __future__ import annotations

import contextlib
import itertools
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.backends.base import Prepared
from paceline.backends.submission import NameTaken, bring, check_secrets, in_copy, named, named_as_copy
from paceline.job.errors import UserError
from paceline.job.paths import jobs_folder
from paceline.job.spec import NAME, JobSpec
from paceline.node.rundir.directory import RunDirectory
from paceline.node.store.lifecycle import take_checkpoints
from paceline.node.store.records import is_job

from . import prepare
from .start import folder_of, staged
from .start import start as start_agent_of

if TYPE_CHECKING:
    import socket
    import subprocess

    from paceline.backends.base import Progress
    from paceline.backends.volumes import Source
    from paceline.node.rundir.staging import Staging
    from paceline.node.spec import NodeSpec


@dataclass(frozen=True)
class Launched:
    """A job that was just started: what was asked for, complete; this node's part; its folder and its agent."""

    spec: JobSpec
    node: NodeSpec
    directory: RunDirectory
    agent: subprocess.Popen[bytes]


@dataclass(frozen=True)
class _Prepared(Prepared):
    """A job for this machine, and what was asked for."""

    asked: JobSpec | None = None

    def text(self) -> str:
        """The complete job, and the variables of its ranks."""
        return Prepared(self.spec, prepare.describe_ranks(prepare.place(self.spec))).text()


def prepared(spec: JobSpec, detached: bool) -> Prepared:
    """What would become of a job here; see `Backend.prepare`.

    Raises:
        UserError: it cannot run here, or its name is taken.
    """
    asked = spec = named(spec).model_copy(update={"detached": detached})
    if not NAME.fullmatch(spec.name):
        raise UserError(f"{spec.name!r} is no name for a job; take letters, digits, '.', '_' and '-'")
    if spec.resume_from is not None and not is_job(jobs_folder() / spec.resume_from):
        raise UserError(f"no job {spec.resume_from!r} to resume from; see paceline list -A")
    if not spec.name.endswith("-") and os.path.lexists(taken := jobs_folder() / spec.name):
        raise NameTaken(spec.name, taken)
    check_secrets(spec)
    _sources(spec)
    snapshot = spec.code is not None and spec.code.mode == "snapshot" and spec.resume_from is None
    spec = in_copy(spec) if spec.code is not None else spec
    spec = prepare.complete(spec, Path.cwd() / (spec.code.source or ".") if snapshot and spec.code else None)
    return _Prepared(spec, node_ranks=int(spec.ranks), is_part=spec.nodes != 1, asked=asked)


def start(
    prepared: Prepared,
    progress: Progress,
    *,
    lifeline: socket.socket | None = None,
    split_streams: tuple[int, ...] = (),
) -> Launched:
    """Start a job; a name that ends in `-` takes the next free number.

    Args:
        prepared: the job.
        progress: is called with how far it is.
        lifeline: the job ends when the other end closes; None for one that outlives its client.
        split_streams: the local ranks whose stderr is kept apart.

    Raises:
        NameTaken: another job has the name.
        UserError: the job cannot run here.
    """
    assert isinstance(prepared, _Prepared) and prepared.asked is not None
    spec = prepared.asked
    if not spec.name.endswith("-"):
        return _launch(spec, progress, lifeline, split_streams)
    for number in itertools.count(2 if spec.resume_from else 1):
        name = f"{spec.name}{number}"
        if not os.path.lexists(jobs_folder() / name):
            try:
                return _launch(spec.model_copy(update={"name": name}), progress, lifeline, split_streams)
            except NameTaken:  # by another one, just now
                continue
    raise AssertionError  # there is always another number


def _launch(
    spec: JobSpec, progress: Progress, lifeline: socket.socket | None, split_streams: tuple[int, ...]
) -> Launched:
    taken = jobs_folder() / spec.name
    if os.path.lexists(taken):
        raise NameTaken(spec.name, taken)
    sources = _sources(spec)
    asked = spec
    if spec.code is None:  # a job that cannot run leaves nothing, not even a folder
        spec = prepare.complete(spec)
    record: dict[str, Any] = {"data": [asdict(source) for source in sources]}
    with contextlib.ExitStack() as stack:
        staging = stack.enter_context(staged(spec))
        folder = None
        if spec.code is not None:
            made, folder = _places(spec, staging.directory.path)
            stack.callback(_unless_started, made, staging)
            asked = spec = in_copy(spec)
            record["code"] = {**bring(spec, made, progress), "path": str(folder)}
            with named_as_copy(made, record["code"]):
                spec = prepare.complete(spec, made)
        node = prepare.place(spec, split_streams, folder=folder, sources=sources)
        if spec.resume_from is not None:
            take_checkpoints(jobs_folder() / spec.resume_from, staging.directory.path)
        # What was asked for, not what was found out: another time that may be something else.
        stored = asked.model_copy(update={"working_dir": spec.working_dir, "devices": spec.devices})
        directory, agent = start_agent_of(staging, stored, node, record, lifeline)
    return Launched(spec, node, directory, agent)


def _sources(spec: JobSpec) -> list[Source]:
    if not spec.data:
        return []
    from paceline.backends.volumes import resolve
    from paceline.job.settings import load

    return resolve(spec.data, load())


def _places(spec: JobSpec, hidden: Path) -> tuple[Path, Path]:
    """Where to put the code while the job is being made in a hidden folder, and where it is afterwards."""
    below = Path("code") / spec.name
    if spec.working_dir == ".":
        return hidden / below, folder_of(spec) / below
    place = prepare.working_dir(spec) / below
    if place.exists():
        raise UserError(f"{place} is there already; remove it, or choose another --name or --working-dir")
    return place, place


def _unless_started(made: Path, staging: Staging) -> None:
    """Remove code that no job has come to need."""
    from paceline.job.code.bring import discard

    if not staging.is_settled:
        discard(made)
