"""The files that metrics go to: lines of JSON, and event files for TensorBoard."""

from __future__ import annotations

import json
import logging
import math
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import BinaryIO

_FLUSH_SECONDS = 5  # after which values are in the event files
_log = logging.getLogger("paceline")


class JsonLines:
    """A file that grows by a line of JSON at a time, in an existing or new folder.

    Training goes on when the file cannot be written; a warning says so, once.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._failed = False

    def append(self, line: Mapping[str, Any]) -> None:
        """Write a line, at once; numbers that JSON does not know (NaN, infinity) become null."""
        if self._failed:
            return
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 - stays open until close
            self._file.write(json.dumps({key: _finite(value) for key, value in line.items()}).encode() + b"\n")
        except OSError as error:
            self._failed = True
            _log.warning("%s is not written any more: %s", self._path, error)

    def close(self) -> None:
        """Close the file; another `append` opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class TensorBoard:
    """Event files for TensorBoard, written in a thread of their own: importing its package alone takes a while.

    Without the package `tensorboard` there are no files, and a message of level INFO says so. Nothing that goes wrong
    here ends the training.
    """

    def __init__(self, folder: Path, first_step: int | None) -> None:
        """Write nothing yet.

        Args:
            first_step: what earlier attempts wrote of this step and later ones is not shown any more; None keeps it.
        """
        self._folder = folder
        self._first_step = first_step
        self._thread: ThreadPoolExecutor | None = ThreadPoolExecutor(1, "paceline-tensorboard")
        self._writer: Any = None
        self._failed = False

    def add(self, values: Mapping[str, float], step: int, when: float) -> None:
        """Write the values of a step; returns at once.

        Args:
            when: seconds since 1970.
        """
        thread = self._thread
        if thread is None:
            return
        try:
            thread.submit(self._add, values, step, when)
        except RuntimeError:  # the interpreter is shutting down
            self._add(values, step, when)

    def _add(self, values: Mapping[str, float], step: int, when: float) -> None:
        if self._failed:
            return
        try:
            if self._writer is None:
                from torch.utils.tensorboard import SummaryWriter

                self._writer = SummaryWriter(str(self._folder), purge_step=self._first_step, flush_secs=_FLUSH_SECONDS)
            from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

            scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
            self._writer.file_writer.add_summary(Summary(value=scalars), step, when)  # one event: add_scalar makes many
        except ImportError as error:
            _log.info("no files for TensorBoard: %s; `pip install tensorboard` gives some", error)
            self._failed = True
        except Exception as error:  # whatever the package raises, training goes on
            _log.warning("files for TensorBoard are not written any more: %s", error)
            self._failed = True

    def close(self) -> None:
        """Wait until everything is written."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()  # what was submitted is done first, at the end of the process too
        if self._writer is not None:
            self._writer.close()
