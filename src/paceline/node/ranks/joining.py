"""Detects whether a script has read its rank: if it never does, every rank does the same work."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import sys
from collections.abc import ItemsView
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path
    from types import FrameType

# Beside the error record of a rank, with this suffix: its script has ended without reading its rank.
UNJOINED = ".unjoined"
# The variables from which Python code learns its rank, for any framework. C code reads those of MPI and Horovod.
_PLACE = re.compile(rb"(.*_)?(RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|PROCID|NTASKS|LOCALID)|TF_CONFIG|(PADDLE|JAX)_.*")
_READ_BY_C = re.compile("OMPI_COMM_WORLD_RANK|HOROVOD_RANK|PACELINE_PROCESS_INDEX")
# The files of the frames between `os.environ.items()` and its caller.
_BETWEEN = {type(os.environ).__getitem__.__code__.co_filename, ItemsView.__iter__.__code__.co_filename}


class _Environment(dict):  # type: ignore[type-arg]  # generic only from Python 3.9 on, and os.environ has a plain one
    """The variables of `os.environ`, with a note of whether the rank was read."""

    is_asked = False

    def __getitem__(self, key: Any) -> Any:
        if not self.is_asked and _PLACE.fullmatch(key):
            self.is_asked = not _is_incidental()
        return dict.__getitem__(self, key)


def _is_incidental() -> bool:
    """Whether an installed package reads the variable while it is imported, or reads all variables, as tqdm does."""
    frame: FrameType | None = sys._getframe(2)
    goes_through = False
    while frame is not None and frame.f_code.co_filename in _BETWEEN:
        goes_through = goes_through or frame.f_code.co_name == "__iter__"
        frame = frame.f_back
    if frame is None or "-packages" not in frame.f_code.co_filename:
        return False
    return goes_through or frame.f_code.co_name == "<module>"


def watch() -> None:
    """Start to note whether the script reads its rank, if it runs on several ranks that should work together."""
    if os.environ.get("PACELINE_WORLD_SIZE") != "1" and not any(map(_READ_BY_C.fullmatch, os.environ)):
        os.environ._data = _Environment(os.environ._data)  # type: ignore[attr-defined]


def is_alone() -> bool:
    """Whether the script has not read its rank so far, and has run no other programs, which may do the work."""
    variables = os.environ._data  # type: ignore[attr-defined]
    return isinstance(variables, _Environment) and not variables.is_asked and not _has_run_programs()


def worlds() -> list[str]:
    """The packages in whose world this process is alone; called by another thread than the script's."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    with contextlib.suppress(Exception):  # it is just being imported, or has ended
        if mpi.Is_initialized() and mpi.Query_thread() == mpi.THREAD_MULTIPLE and mpi.COMM_WORLD.size == 1:
            return ["mpi4py"]
    return []


def report(error_path: Path) -> None:
    """At the end of a script that has succeeded: record if it has never read its rank."""
    if is_alone() and os.environ.get("PACELINE_RANK") == "0":
        error_path.with_suffix(UNJOINED).touch()


def _has_run_programs() -> bool:
    """Whether this process has had children that multiprocessing has not started."""
    if resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss == 0:
        return False
    process = sys.modules.get("multiprocessing.process")
    return process is None or repr(getattr(process, "_process_counter", "")) == "count(1)"
