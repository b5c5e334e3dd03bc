"""Whether a run is one of many that somebody types on a machine of his own, who waits for the start of each."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.contract.memory import machine_memory
from paceline.job.quantities import show_size
from paceline.node.warm.start import ask

if TYPE_CHECKING:
    from collections.abc import Mapping

SECONDS = 600.0  # for which a process stays after such a run
ROOT = Path("/")
_FREE = 4 << 30  # bytes; a process that has imported torch and CUDA takes about a tenth
_CONTAINERS = (".dockerenv", "run/.containerenv")  # of Docker and of Podman
# Variables of what runs a process for somebody else: schedulers, Kubernetes, containers and continuous integration.
_ELSEWHERE = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID", "KUBERNETES_SERVICE_HOST", "container", "CI")


def is_at_hand(env: Mapping[str, str] = os.environ, root: Path | None = None) -> bool:
    """Whether a person at a terminal has typed this, on a machine with free memory that is his while he works."""
    memory = machine_memory()
    return (
        all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr))
        and not any(env.get(name) for name in _ELSEWHERE)
        and not any((ROOT if root is None else root).joinpath(name).exists() for name in _CONTAINERS)
        and min(memory.available, memory.limit or memory.available) >= _FREE
    )


def what_stays(folder: Path) -> str:
    """The line, once per user, that a process stays after such a run, and, when there is one, what memory it takes.

    Args:
        folder: of this user's jobs; what was said is noted in it.
    """
    first, second = folder / "said-what-stays", folder / "said-what-stays-takes"
    kept = [] if second.exists() else ask("describe")
    if second.exists() or (first.exists() and not kept):
        return ""
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (second if kept else first).touch()
    ends = 'paceline warm --stop ends it, keep_warm = "off" below [defaults] in the settings lets none stay'
    if not kept:
        return f"after this run, a process stays for 10 minutes, from which the next one starts at once; {ends}"
    size = show_size(max(each["memory"] for each in kept))
    return f"a process that stayed after an earlier run takes {size} of memory, and starts this one; {ends}"
