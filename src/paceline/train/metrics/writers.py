"""Files for metrics: lines of JSON, and event files for TensorBoard."""

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
    """A file to which lines of JSON are appended, in an existing or new folder.

    If the file cannot be written, training continues, and one warning is logged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._failed = False

    def append(self, line: Mapping[str, Any]) -> None:
        """Write a line immediately. Numbers that JSON does not have (NaN, infinity) become null."""
        if self._failed:
            return
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 - stays open until close
            self._file.write(json.dumps({key: _finite(value) for key, value in line.items()}).encode() + b"\n")
        except OSError as error:
            self._failed = True
            _log.warning("%s is no longer written: %s", self._path, error)

    def close(self) -> None:
        """Close the file. Another `append` opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class TensorBoard:
    """Event files for TensorBoard, written in a separate thread, since even the import of its package takes long.

    Without the package `tensorboard`, there are no files, and a message of level INFO is logged. An error here does not
    end the training.
    """

    def __init__(self, folder: Path, first_step: int | None) -> None:
        self._folder = folder
        self._first_step = first_step
        self._thread: ThreadPoolExecutor | None = ThreadPoolExecutor(1, "paceline-tensorboard")
        self._writer: Any = None
        self._failed = False

    def add(self, values: Mapping[str, float], step: int, when: float) -> None:
        """Write the values of a step; returns at once."""
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
            self._writer.file_writer.add_summary(
                Summary(value=scalars), step, when
            )  # one event; add_scalar would write one per value
        except ImportError as error:
            _log.info("no event files for TensorBoard: %s; for them, pip install tensorboard", error)
            self._failed = True
        except Exception as error:  # whatever the package raises, training continues
            _log.warning("event files for TensorBoard are no longer written: %s", error)
            self._failed = True

    def close(self) -> None:
        """Wait until everything is written."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()  # completes what was submitted, also at the end of the process
        if self._writer is not None:
            self._writer.close()
