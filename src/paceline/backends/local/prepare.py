"""Makes a job concrete for this machine: what its script and the machine say, and its part on this node."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.backends.refusals import refusals
from paceline.job.errors import UserError
from paceline.job.paths import jobs_folder
from paceline.node.planning import fitting, node_part
from paceline.node.ranks import placement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.backends.volumes import Source
    from paceline.job.spec import JobSpec
    from paceline.node.spec import NodeSpec


def complete(spec: JobSpec, code: Path | None = None) -> JobSpec:
    """Fill in what the script itself and this machine say, and refuse what cannot work; starts nothing.

    Args:
        spec: what the user asked for.
        code: where the job's own copy of its code is; None where it has none, or none yet: then what depends on it
            stays open.

    Raises:
        UserError: the job cannot run here.
    """
    if spec.code is None or spec.working_dir != ".":
        spec = spec.model_copy(update={"working_dir": str(working_dir(spec))})
    with refusals():
        return type(spec).model_validate(fitting.complete(spec.for_node(), here(), code))


def here() -> fitting.Here:
    """This machine."""
    declare = "declare slots as [local] devices = N in paceline.toml"
    return fitting.Here(jobs_folder().parent, python_command(), _slots, declare, "run paceline with another Python")


def _slots() -> int:
    from paceline.job.settings import load  # takes long to import, and few jobs need it

    return load().local.devices or 0


def working_dir(spec: JobSpec) -> Path:
    """Where the ranks start, as a whole path.

    Raises:
        UserError: the current folder is gone.
    """
    try:
        return Path.cwd() / Path(spec.working_dir).expanduser()
    except FileNotFoundError:
        raise UserError("the folder that you are in was deleted; change to one that exists") from None
    except RuntimeError:
        raise UserError(f"--working-dir {spec.working_dir}: no such user; write the whole path") from None


def place(
    spec: JobSpec,
    split_streams: tuple[int, ...] = (),
    *,
    folder: Path | None = None,
    sources: Sequence[Source] = (),
) -> NodeSpec:
    """This node's part of a completed job.

    Args:
        spec: the completed job.
        split_streams: the local ranks whose stderr is kept apart.
        folder: where the ranks start, unless it is the job's working dir.
        sources: its volumes.
    """
    variables = [(source.variable, source.path) for source in sources]
    return node_part.place(spec.for_node(), here(), split_streams=split_streams, folder=folder, variables=variables)


def python_command() -> tuple[str, ...]:
    """This interpreter with the options it was started with (-X, -W, -u, -O, …), so that the ranks get them too."""
    options = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
    if sys.stdout is not None and getattr(sys.stdout, "write_through", False):
        options.append("-u")
    return (sys.executable, *options)


def describe_ranks(spec: NodeSpec) -> list[dict[str, Any]]:
    """The variables that each rank of a single-node job would get, for --dry-run; ports are chosen at the start."""
    return [placement.foreseen(spec, rank, {}) for rank in range(spec.nproc)]
