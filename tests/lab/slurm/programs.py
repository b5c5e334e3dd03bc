"""The programs of Slurm: those of this machine, or of another version in a folder that PACELINE_SLURM names."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

_OTHER = os.environ.get("PACELINE_SLURM") or None
LIBRARIES = Path("usr/lib/x86_64-linux-gnu/slurm-wlm")


def path(program: str) -> str:
    """The path of a program; its name if there is none."""
    return _found(program) or program


def missing(*programs: str) -> str:
    """Which of these programs is not installed, as a sentence, or ""."""
    return next((f"the cluster needs {program}" for program in programs if _found(program) is None), "")


def _found(program: str) -> str | None:
    own = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if _OTHER is None or program in ("munged", "mariadbd"):
        return shutil.which(program, path=own)
    return shutil.which(program, path=f"{_OTHER}/usr/bin:{_OTHER}/usr/sbin")


def slurmd() -> list[str]:
    """The command of slurmd; one of another version has to be told where its own slurmstepd is."""
    return [path("slurmd"), *(["-d", path("slurmstepd")] if _OTHER else [])]


def plugins() -> str:
    """The line of slurm.conf, also of slurmdbd.conf, that says where plugins are."""
    return f"PluginDir={Path(_OTHER, LIBRARIES)}" if _OTHER else ""
