"""What the Tab key completes beside verbs and flags; no other machine is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from click.shell_completion import CompletionItem

from paceline.backends import registry
from paceline.job import settings_files
from paceline.job.errors import UserError
from paceline.job.paths import jobs_folder, target_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

    import click

    from paceline.job.job import Job


def jobs(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """The jobs of this machine, and those that were submitted from here."""
    named = context.params.get(parameter.name or "")
    left_out = set(named if isinstance(named, tuple) else ())
    return [name for name in known_jobs(incomplete) if name not in left_out]


def known_jobs(begin: str) -> list[str]:
    """The names of the same jobs that begin so."""
    try:
        folders = [jobs_folder(), *target_folder("x").parent.glob("*/")]
    except UserError:
        return []
    found = {path.name for folder in folders for path in folder.glob("[!.]*")}
    return sorted(name for name in found if name.startswith(begin))


def jobs_and_folders(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The same jobs, and the folders that the shell finds."""
    return [*map(CompletionItem, jobs(context, parameter, incomplete)), CompletionItem(incomplete, type="dir")]


def instances(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """The ranks of a job on this machine that stands before the flag, by number and name; else of all that run here."""
    words = [*(it for it in context.params.values() if isinstance(it, str)), *context.args]
    named = _jobs_here(words)
    ranks = [rank for job in named or _jobs_here(None) if named or not job.is_over for rank in job.instances]
    names = [str(number) for number in sorted({rank.rank for rank in ranks})] + [rank.name for rank in ranks]
    return [name for name in names if name.startswith(incomplete)]


def labels(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """The labels that jobs on this machine have."""
    found = {f"{name}={value}" for job in _jobs_here(None) for name, value in job.labels.items()}
    return sorted(label for label in found if label.startswith(incomplete))


def _jobs_here(names: Sequence[str] | None) -> Sequence[Job]:
    try:
        return registry.load(registry.HERE).describe(names).jobs
    except (UserError, OSError):
        return []


def states(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """The states of jobs; several may be given, with commas between them."""
    from paceline.job.job import STATES

    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{state}" for state in STATES if state.startswith(last.upper())]


def targets(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """The targets of the settings, this machine, and the kinds of backends that need no target."""
    names = [registry.HERE, *(kind for kind in registry.flags() if kind not in registry.kinds_of_hosts())]
    if settings_files.exist():
        from paceline.job.settings import load

        try:
            names += load().targets
        except UserError:
            return []
    return sorted({name for name in names if name.startswith(incomplete)})


def frameworks(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """The frameworks whose variables ranks can get."""
    from paceline.contract import CONTRACTS

    return sorted(name for name in CONTRACTS if name.startswith(incomplete))
