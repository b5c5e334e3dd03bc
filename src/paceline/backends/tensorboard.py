"""TensorBoards of jobs on this machine."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.job.errors import UserError
from paceline.node import tensorboard
from paceline.node.run_directory import read_json

if TYPE_CHECKING:
    from collections.abc import Sequence


def check_installed() -> None:
    """See that this Python, on which ranks run too, has TensorBoard.

    Raises:
        UserError: it has not.
    """
    found = importlib.util.find_spec("tensorboard")
    if found is None or found.origin is None:  # a folder of event files may have the same name
        raise UserError(f"tensorboard is not installed for {sys.executable}; pip install 'paceline[train]'")


def logdir_of(working_dir: str, logdir: str) -> str:
    """A log folder as TensorBoard takes it from any current folder; an address such as s3://… stays as it is."""
    return logdir if "://" in logdir else str(Path(working_dir, logdir).absolute())


def open_tensorboard(python: Sequence[str], folder: Path, logdir: str | None) -> str:
    """The address of the TensorBoard of a run directory, which is started if there is none.

    Args:
        logdir: what it shows; None takes what its job asked for, or the run directory.

    Raises:
        UserError: it cannot be started.
    """
    check_installed()
    try:
        spec = read_json(folder / "spec.json") or {}
        default = spec.get("tensorboard") or str(folder)
        asked = None if logdir is None else logdir_of(".", logdir)
        return tensorboard.open_for(python, asked, default, folder)
    except (OSError, ValueError, tensorboard.TensorBoardError) as error:
        raise UserError(f"no TensorBoard for {folder.name}: {error}") from None
