"""Prepares a job for this machine; starts nothing."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.backends import moving
from paceline.backends.base import Prepared
from paceline.backends.environments.jobs import environments_of
from paceline.backends.refusals import refusals
from paceline.backends.submission import checked, kept_warm
from paceline.contract.nodejob import Order
from paceline.job.errors import UserError
from paceline.job.paths import jobs_folder
from paceline.node.planning import fitting
from paceline.node.store.home import Home
from paceline.node.store.plan import Plan, make_plan
from paceline.node.store.records import is_job

from .at_hand import SECONDS, is_at_hand

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.backends.base import JobExport
    from paceline.backends.environments.machines import Environments
    from paceline.contract.records import DataRecord
    from paceline.job.spec import JobSpec


def home() -> Home:
    """Where this user's jobs on this machine are."""
    jobs = jobs_folder()
    return Home(jobs.parent, jobs)


def here(python: str = sys.executable) -> fitting.Here:
    """This machine, with an interpreter for the ranks."""
    declare = "declare slots as [local] devices = N in paceline.toml"
    command = (python, *python_command()[1:])
    return fitting.Here(jobs_folder().parent, command, _slots, declare, "run paceline with another Python")


def _slots() -> int:
    from paceline.job.settings import load  # takes long to import, and few jobs need it

    return load().local.devices or 0


@dataclass(frozen=True)
class LocalPrepared(Prepared):
    """A job for this machine.

    Attributes:
        asked: the specification as submitted.
        plan: the complete job, with a placeholder for a name that is chosen at the start.
        export: of the job on another target that it resumes.
        environments: its environment, which may still have to be built.
        stays: whether a process stays after it that nobody has asked for.
    """

    asked: JobSpec = field(kw_only=True)
    plan: Plan = field(kw_only=True)
    export: JobExport | None = field(kw_only=True, default=None)
    stays: bool = field(kw_only=True, default=False)
    environments: Environments | None = field(kw_only=True, default=None)

    def text(self) -> str:
        """The complete job, and the variables of its ranks."""
        own = sys.executable
        if self.environments is not None:
            from paceline.backends.environments.machines import this_machine

            own = self.environments.python(this_machine())
        python = () if self.spec.command else (shlex.join([own, *python_command()[1:]]),)
        return Prepared(self.spec, self.plan.ranks(), python=python).text()


def prepared(spec: JobSpec, *, detached: bool, export: JobExport | None = None) -> LocalPrepared:
    """Check a job and complete it; writes and fetches nothing."""
    brought = None if export is None else moving.brought(spec, export)
    spec = kept_warm(spec)
    is_usual = spec.keep_warm is None and not detached and is_at_hand()
    if is_usual:
        spec = spec.changed({"keep_warm": SECONDS})
    spec, name, source = checked(spec, detached=detached)
    environments, spec = environments_of(spec)
    if environments is not None:
        from paceline.backends.environments.machines import this_machine  # brings along connections

        environments.ask([this_machine()])
    own = home()
    data: tuple[DataRecord, ...] = ()
    if spec.data:
        from paceline.backends.volumes import find
        from paceline.job.settings import load

        data = find(spec.data, load(), str(own.root), str(source or spec.working_dir))
    terminal: dict[str, str] = {}
    if not detached:
        from paceline.backends.foreground import terminal_size  # brings along what follows a job

        terminal = terminal_size()
    if spec.resume_from is not None and export is None and not is_job(own.jobs / spec.resume_from):
        raise UserError(f"no job {spec.resume_from!r} to resume from; see paceline list -A")
    order = Order(
        job=spec.for_node(name), data=data, source=None if source is None else str(source),
        terminal=terminal, brought=brought,
    )  # fmt: skip
    with writing(spec.log_dir), refusals():
        plan = make_plan(own, here(), order)
    complete = spec.planned(plan.foreseen_job())
    ranks, is_part = int(complete.ranks), spec.nodes != 1
    return LocalPrepared(
        complete, (), ranks, is_part, asked=spec, plan=plan, export=export, stays=is_usual, environments=environments,
        installs="" if environments is None else environments.foreseen(),
    )  # fmt: skip


@contextlib.contextmanager
def writing(log_dir: str | None) -> Iterator[None]:
    """Raise errors of writing a run directory as `UserError`."""
    path, flag = (log_dir, "--log-dir") if log_dir else (jobs_folder(), "PACELINE_HOME")
    try:
        yield
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"cannot write to {path}: it is not a folder; choose another {flag}") from None
    except OSError as error:
        raise UserError(f"cannot write to {path}: {error.strerror}; make room, or choose another {flag}") from None


def python_command() -> tuple[str, ...]:
    """This interpreter with the options it was started with (-X, -W, -u, -O, …), so that the ranks get them too."""
    options = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
    if sys.stdout is not None and getattr(sys.stdout, "write_through", False):
        options.append("-u")
    return (sys.executable, *options)
