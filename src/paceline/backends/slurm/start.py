"""Prepares a job for Slurm, and submits it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.backends.base import MOST_RANKS, Prepared
from paceline.backends.environments.jobs import environments_of
from paceline.backends.foreground import terminal_size
from paceline.backends.remote.connection import pieces_of
from paceline.backends.submission import NameTaken, check_script, checked, names, packed, volumes_of
from paceline.contract.nodejob import Order, SlurmOrder
from paceline.job.errors import UserError
from paceline.node.ranks.placement import CHOSEN

from .options import indices

if TYPE_CHECKING:
    from paceline.backends.base import Allocation, ProgressReporter
    from paceline.backends.environments.machines import Environments
    from paceline.backends.foreground import RankStreams
    from paceline.contract.messages import JobAnswer, SlurmSubmit
    from paceline.contract.records import ContainerRecord
    from paceline.job.spec import JobSpec

    from .login import Login
    from .options import Options


_MOST_NAME = 50  # letters of the name of an array


@dataclass(frozen=True)
class SlurmPrepared(Prepared):
    """A job that Slurm would take."""

    opened: Opened | None = None  # has checked it
    environments: Environments | None = None

    def text(self) -> str:
        """The batch script; the job cannot be started any more."""
        assert self.opened is not None
        with self.opened as opened:
            return str(opened.checked["script"]).rstrip("\n")


class Opened:
    """A connection to the login node that has checked a job, and waits for the order to submit it."""

    def __init__(self, login: Login, asked: SlurmOrder, *, apart: bool) -> None:
        """Check the job; writes nothing."""
        self.login, self.asked, self._apart = login, asked, apart
        request: SlurmSubmit = {"do": "slurm_submit", "order": asked.to_json()}
        with contextlib.ExitStack() as stack:
            self.answers = stack.enter_context(login.listen(request, apart=apart))
            self.checked = self._next()  # `script`, the batch script, and `notes`, lines for the user
            self._connection = stack.pop_all()

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def again(self, name: str) -> Opened:
        """Another one, for the same job by another name."""
        asked = replace(self.asked, order=self.asked.order.with_job(name=name))
        return Opened(self.login, asked, apart=self._apart)

    def by(self, login: Login) -> Opened:
        """The same job, checked by another Python; this connection is closed."""
        self._connection.close()
        return Opened(login, self.asked, apart=self._apart)

    def order(self, order: Order, archive: Path | None = None) -> JobAnswer:
        """The answer to a complete order, with the archive of the code."""
        files = () if archive is None else (archive,)
        self.answers.send(itertools.chain([f"{json.dumps(order.to_json())}\n".encode()], pieces_of(*files)))
        return self._next()

    def keep(self, name: str) -> None:
        """Confirm that the job is to stay, and wait until that has arrived: the connection may end before."""
        self.answers.tell("keep")
        try:
            next(self.answers)
        except UserError as error:
            raise UserError(f"{error}; so job {name} may have been cancelled again: paceline list shows it") from None

    def _next(self) -> JobAnswer:
        answer: JobAnswer = next(self.answers)
        if "taken" in answer:
            place = answer["taken"]
            raise NameTaken(
                f"a job named {os.path.basename(place)} has its files in {place}; choose another --name, or delete that"
                " job"
            )
        return answer


def prepare(
    login: Login, options: Options, spec: JobSpec, *, detached: bool, target: str, allocation: Allocation | None
) -> SlurmPrepared:
    """Check a job on the login node, and by Slurm itself; submits nothing.

    With an allocation, it is to run on its nodes.
    """
    if spec.resume_from is not None:  # one job of an array is run again, as a job of its own
        options = options.changed({"array": None})
    _refuse(spec, options, detached=detached)
    if allocation is not None:
        _refuse_in(allocation, spec)
    spec, name, source = checked(spec, detached=detached)
    check_script(spec, source)
    spec = spec.changed({"backend": target})
    folder = spec.working_dir
    if options.ssh is None and not folder.startswith("~") and (spec.code is None or folder != "."):
        spec = spec.changed({"working_dir": os.path.normpath(Path.cwd() / folder)})
    environments, spec = environments_of(spec)
    if environments is not None:
        environments.ask([login])
    asked = SlurmOrder(
        Order(
            job=spec.for_node(name), data=volumes_of(spec), job_id=CHOSEN,
            terminal={} if detached else terminal_size(),
        ),
        target,
        {
            "slurm": options.slurm, "chain": options.chain, "array": options.array,
            "no_kill": spec.node_range[0] < spec.node_range[1], "container": _container(spec, options),
            "python": options.python or "python3",
        },
        () if options.array is None else tuple(indices(options.array)),
        None if allocation is None
        else {"id": allocation.id, "nodes": min(spec.node_range[1], len(allocation.hosts))},
    )  # fmt: skip
    ranks = spec.ranks if isinstance(spec.ranks, int) else MOST_RANKS
    opened = Opened(login, asked, apart=not detached)
    notes = tuple(opened.checked["notes"])
    return SlurmPrepared(
        spec, (), ranks, notes=notes, opened=opened, environments=environments,
        installs="" if environments is None else environments.foreseen(),
    )  # fmt: skip


def _refuse(spec: JobSpec, options: Options, *, detached: bool) -> None:
    """Refuse what contradicts the options, or what an array cannot do."""
    if isinstance(spec.devices, tuple):
        raise UserError("--devices: Slurm chooses the devices; give their number with --gpus")
    if spec.image is not None and options.containers is None:
        raise UserError(
            "--image: it is not said what runs containers there; give --containers pyxis, apptainer or singularity, or"
            " set containers in the target's settings"
        )
    if options.array is None:
        return
    if not detached:
        raise UserError("--array: its jobs go on without this terminal; start them with paceline submit")
    if options.chain:
        raise UserError("--chain: the jobs of an array cannot go on in other jobs; leave it or --array out")
    if len(spec.name) > _MOST_NAME:
        raise UserError(f"--name {spec.name}: the jobs of an array add their index; give at most {_MOST_NAME} letters")


def refuse_new(spec: JobSpec, allocation: Allocation) -> None:
    """Refuse options for a new job of Slurm."""
    for option in ("slurm", "chain", "array"):
        if option in spec.options:
            raise UserError(
                f"--{option} is for a new job of Slurm, and paceline run uses allocation {allocation.id}; leave it out,"
                " or use paceline submit"
            )


def _refuse_in(allocation: Allocation, spec: JobSpec) -> None:
    """Refuse what an allocation cannot give."""
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


def _container(spec: JobSpec, options: Options) -> ContainerRecord | None:
    """What runs the job's image, and the image; None without one."""
    if spec.image is None:
        return None
    image, program = spec.image, str(options.containers)
    is_path = image.startswith(("./", "../")) if program == "pyxis" else "://" not in image and image[0] not in "/~"
    if is_path and options.ssh is not None:
        raise UserError(
            f"--image {image}: it is looked for on the login node; give its whole path there, or for example"
            f" docker://{image}"
        )
    return {"program": program, "image": os.path.abspath(image) if is_path else image, "binds": []}


def start(
    prepared: SlurmPrepared, progress: ProgressReporter, rank_streams: RankStreams | None = None
) -> tuple[Opened, JobAnswer]:
    """Submit a job; returns the open connection, which follows the job if `shown` says so, and its record.

    A job that is not followed has to be confirmed by a line on the connection; else nothing is left of it.
    """
    spec, opened = prepared.spec, prepared.opened
    assert opened is not None
    if prepared.environments is not None:
        opened = opened.by(prepared.environments.build([opened.login], progress)[opened.login])
    for line in prepared.notes:
        progress.say(line)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        stack.enter_context(opened)
        archive, record = None, None
        if spec.code is not None and spec.resume_from is None:
            archive = Path(folder, "code.tar")
            with archive.open("wb") as file:
                record = packed(spec, file, progress)
        to: Opened | None = opened
        for name in names(spec):
            progress(f"submitting {name}", 0, None)
            order = replace(
                opened.asked.order.with_job(name=name),
                job_id=os.urandom(16).hex(),
                token=secrets.token_hex(16),
                secrets={name: os.environ[name] for name in spec.secrets},
                code=record,
                bytes=archive.stat().st_size if archive is not None else 0,
                rank_streams=rank_streams,
            )
            try:
                to = to or stack.enter_context(opened.again(name))
                answer = to.order(order, archive)
                stack.pop_all()
                return to, answer
            except NameTaken as error:
                to, taken = None, error
        raise taken
