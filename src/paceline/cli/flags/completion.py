"""What the Tab key completes beside verbs and flags; no other machine is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.backends import registry
from paceline.job import settings_files
from paceline.job.errors import UserError
from paceline.job.paths import jobs_folder, target_folder

if TYPE_CHECKING:
    import click


def jobs(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """The jobs of this machine, and those that were submitted from here."""
    try:
        folders = [jobs_folder(), *target_folder("x").parent.glob("*/")]
    except UserError:
        return []
    named = context.params.get(parameter.name or "")
    left_out = set(named if isinstance(named, tuple) else ())
    found = {path.name for folder in folders for path in folder.glob("[!.]*")}
    return sorted(name for name in found - left_out if name.startswith(incomplete))


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
