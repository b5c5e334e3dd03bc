"""The programs of Slurm: those of this machine, or of another version in a folder that PACELINE_SLURM names."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests import needs

_OTHER = os.environ.get("PACELINE_SLURM") or None
LIBRARIES = Path("usr/lib/x86_64-linux-gnu/slurm-wlm")


def path(program: str) -> str:
    """The path of a program; its name if there is none."""
    return _found(program) or program


def missing(*programs: str) -> str:
    """What to install, for the first of these programs that is missing, or ""."""
    why = needs.missing(*programs, find=_found)
    return f"the cluster {why}" if why else ""


def _found(program: str) -> str | None:
    if _OTHER is None or program in ("munged", "mariadbd"):
        return needs.find(program)
    return shutil.which(program, path=f"{_OTHER}/usr/bin:{_OTHER}/usr/sbin")


def slurmd() -> list[str]:
    """The command of slurmd; one of another version has to be told where its own slurmstepd is."""
    return [path("slurmd"), *(["-d", path("slurmstepd")] if _OTHER else [])]


def plugins() -> str:
    """The line of slurm.conf, also of slurmdbd.conf, that says where plugins are."""
    return f"PluginDir={Path(_OTHER, LIBRARIES)}" if _OTHER else ""
