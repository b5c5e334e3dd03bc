"""Prepares a job for Slurm, and submits it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import shutil
import tarfile
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.backends.base import MOST_RANKS, Prepared
from paceline.backends.foreground import terminal_size
from paceline.backends.submission import NameTaken, checked, fetched, shown_name, start_named
from paceline.job.errors import UserError
from paceline.node.ranks.placement import CHOSEN

from .options import indices

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.backends.base import Allocation, ProgressReporter
    from paceline.backends.foreground import Shown
    from paceline.backends.remote.connection import Answer, Answers, Input
    from paceline.job.spec import JobSpec

    from .login import Login
    from .options import Options


_MOST_NAME = 50  # letters of the name of an array


@dataclass(frozen=True)
class SlurmPrepared(Prepared):
    """A job that Slurm would take.

    Attributes:
        request: the order to the login node, without the code.
        script: the batch script.
        notes: lines for the user.
    """

    request: dict[str, Any] = dataclasses.field(default_factory=dict)
    script: str = ""
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        """The batch script."""
        return self.script.rstrip("\n")


def prepare(
    login: Login, options: Options, spec: JobSpec, *, detached: bool, target: str, allocation: Allocation | None
) -> SlurmPrepared:
    """Check a job on the login node, and by Slurm itself; submits nothing.

    With an allocation, it is to run on its nodes.

    Raises:
        UserError: it cannot run there, or its name is taken.
    """
    _refuse(spec, options)
    if options.array is not None:
        _refuse_with_array(spec, options, detached=detached)
    if allocation is not None:
        _refuse_in(allocation, spec)
    spec = checked(spec, detached=detached).model_copy(update={"backend": target})
    folder = spec.working_dir
    if options.ssh is None and not folder.startswith("~") and (spec.code is None or folder != "."):
        spec = spec.model_copy(update={"working_dir": os.path.normpath(Path.cwd() / folder)})
    name = shown_name(spec)
    request = {
        "job": {**spec.for_node(), "name": name},
        "data": _sources(spec),
        "job_id": CHOSEN,
        "token": None,
        "secrets": {},
        "code": None,
        "bytes": 0,
        "terminal": {} if detached else terminal_size(),
        "target": target,
        "tasks": [] if options.array is None else indices(options.array),
        "allocation": allocation and {"id": allocation.id, "nodes": min(spec.node_range[1], len(allocation.hosts))},
        "options": {
            "slurm": options.slurm,
            "chain": options.chain,
            "array": options.array,
            "no_kill": spec.node_range[0] < spec.node_range[1],
            "container": _container(spec, options),
            "python": options.python or "python3",
        },
    }
    answer = login.ask({**request, "do": "slurm_prepare"})
    _refuse_taken(answer, name)
    ranks = spec.ranks if isinstance(spec.ranks, int) else MOST_RANKS
    return SlurmPrepared(spec, (), ranks, request=request, script=answer["script"], notes=tuple(answer["notes"]))


def _refuse(spec: JobSpec, options: Options) -> None:
    """Refuse what contradicts the options.

    Raises:
        UserError: it does.
    """
    if isinstance(spec.devices, tuple):
        raise UserError("--devices: Slurm chooses the devices; give their number with --gpus")
    if spec.time_limit is not None and "time" in options.slurm:
        raise UserError("--time-limit and --slurm time say the same; give one")
    if spec.image is not None and options.containers is None:
        raise UserError(
            "--image: it is not said what runs containers there; give --containers pyxis, apptainer or singularity, or"
            " set containers in the target's settings"
        )


def _refuse_with_array(spec: JobSpec, options: Options, *, detached: bool) -> None:
    """Refuse what an array cannot do.

    Raises:
        UserError: it is asked for.
    """
    if not detached:
        raise UserError("--array: its jobs go on without this terminal; start them with paceline submit")
    if options.chain:
        raise UserError("--chain: the jobs of an array cannot go on in other jobs; leave it or --array out")
    if spec.resume_from is not None:
        raise UserError("--array: one job is run again, not several; leave it out")
    if len(spec.name) > _MOST_NAME:
        raise UserError(f"--name {spec.name}: the jobs of an array add their index; give at most {_MOST_NAME} letters")


def _refuse_in(allocation: Allocation, spec: JobSpec) -> None:
    """Refuse what an allocation cannot give.

    Raises:
        UserError: the job needs that.
    """
    least, there = spec.node_range[0], len(allocation.hosts)
    if least > there:
        raise UserError(
            f"--nnodes {spec.nodes}, but the allocation {allocation.id} has {there} node{'s' if there > 1 else ''}; ask"
            " for fewer, or make a larger one with salloc"
        )
    if spec.queue is not None:
        raise UserError(
            f"--queue: the allocation {allocation.id} has its partition already; leave it out, or use paceline submit"
        )


def _container(spec: JobSpec, options: Options) -> list[str]:
    """How srun starts the agent in a container; empty without one."""
    if spec.image is None:
        return []
    if options.containers == "pyxis":
        return [f"--container-image={spec.image}", "--container-mount-home", "--no-container-remap-root"]
    return [str(options.containers), "exec", "--nv", spec.image]


def _sources(spec: JobSpec) -> list[dict[str, Any]]:
    """The paths of the job's volumes on the nodes, from the settings."""
    if not spec.data:
        return []
    from paceline.backends.volumes import sources
    from paceline.job.settings import load

    return sources(spec.data, load())


def _refuse_taken(answer: Answer, name: str) -> None:
    if "taken" in answer:
        raise NameTaken(
            f"a job named {name} has its files in {answer['taken']}; choose another --name, or delete that job"
        )


def start(
    login: Login, prepared: SlurmPrepared, progress: ProgressReporter, shown: Shown | None = None
) -> tuple[contextlib.ExitStack, Answers, Answer]:
    """Submit a job; returns the open connection, which follows the job if `shown` says so, and its record.

    Raises:
        UserError: Slurm does not take it; nothing of it is left.
    """
    spec = prepared.spec
    for line in prepared.notes:
        progress.say(line)
    with tempfile.TemporaryDirectory() as folder:
        archive, record = Path(folder, "code.tar"), None
        if spec.code is not None and spec.resume_from is None:
            record = fetched(spec, Path(folder, "code"), progress)
            with tarfile.open(archive, "w") as tar:
                tar.add(Path(folder, "code"), arcname=".")

        def send(stdin: Input) -> None:
            if archive.exists():
                with open(archive, "rb") as source:
                    shutil.copyfileobj(source, stdin)

        def start_as(name: str) -> tuple[contextlib.ExitStack, Answers, Answer]:
            progress(f"submitting {name}", 0, None)
            request = {
                **prepared.request,
                "do": "slurm_submit",
                "job": {**prepared.request["job"], "name": name},
                "job_id": uuid.uuid4().hex,
                "token": secrets.token_hex(16),
                "secrets": {name: os.environ[name] for name in spec.secrets},
                "code": record,
                "bytes": archive.stat().st_size if archive.exists() else 0,
                "shown": shown and dataclasses.asdict(shown),
            }
            return _submitted(login, name, request, send, apart=shown is not None)

        return start_named(spec, start_as)


def _submitted(
    login: Login, name: str, request: dict[str, Any], send: Callable[[Input], None], *, apart: bool
) -> tuple[contextlib.ExitStack, Answers, Answer]:
    with contextlib.ExitStack() as stack:
        answers = stack.enter_context(login.listen(request, send, apart=apart))
        answer = next(answers)
        _refuse_taken(answer, name)
        found = next(answers)
        return stack.pop_all(), answers, found
