"""How a run ends: with the other ranks, without them, or with an error."""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import TYPE_CHECKING

from paceline.train.checkpoint.consensus import ExchangeError
from paceline.train.control.exit_report import has_failed

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.train.control.watch import Watch
    from paceline.train.group.group import Group
    from paceline.train.metrics.metrics import Metrics

    from .checkpointing import Checkpointing

log = logging.getLogger("paceline")


class Ending:
    """Writes the last metrics and the last checkpoint, and leaves the other ranks."""

    def __init__(self, group: Group, checkpoints: Checkpointing, metrics: Metrics, watch: Watch | None) -> None:
        self._group, self._checkpoints, self._metrics, self._watch = group, checkpoints, metrics, watch

    def close(self, save: Callable[[], None] | None, compare: Callable[[], None]) -> None:
        """Write the last metrics, and wait for a checkpoint in progress."""
        if self._watch is not None:
            self._watch.ends()
        try:
            if self._watch is not None and (save is not None or self._metrics.unreduced):
                self._watch.meet()
            if save is not None:
                save()
            self._metrics.close()
            self._checkpoints.close(self._watch.explain if self._watch is not None else lambda _: None)
            compare()
        except BaseException as error:
            if self._watch is not None:
                self._watch.failed(error)
            with contextlib.suppress(RuntimeError):  # the first error matters more
                self._disconnect()
            raise
        self._disconnect()

    def leave(self, error: BaseException | None, compare: Callable[[], None]) -> None:
        """End with the process, without the other ranks. Metrics are still reduced if no rank has failed.

        `error` ends the process, if `sys.excepthook` is not called for it.
        """
        if self._watch is not None:
            if error is not None:
                self._watch.failed(error)
            self._watch.ends()
        lost = self._checkpoints.leave()
        if isinstance(lost, ExchangeError) and self._watch is not None and error is None and not self.is_failing:
            try:
                self._watch.explain(lost)
            except RuntimeError as cause:
                lost = cause
        self._reduce_the_rest()
        self._metrics.discard()
        self._metrics.close()
        is_failing = error is not None or self.is_failing
        if lost is None and not is_failing:
            with contextlib.suppress(RuntimeError):  # what ends this rank is raised when it leaves the others
                compare()
        if lost is not None and is_failing:
            log.error("%s", lost)
        with contextlib.suppress(RuntimeError) if lost is not None else contextlib.nullcontext():
            self._disconnect()
        if lost is not None and not is_failing:
            raise lost

    @property
    def is_failing(self) -> bool:
        """Whether an exception or `sys.exit` ends this process anyway."""
        return has_failed() or (self._watch is not None and self._watch.is_failing)

    def _reduce_the_rest(self) -> None:
        """Write the values logged last, unless this rank fails or others have left."""
        if not self._metrics.has_values or sys.exc_info()[0] is not None:
            return
        try:
            if self._watch is not None and self._group.world_size > 1:
                if not self._watch.ends_well:
                    return
                self._watch.meet()
            self._metrics.flush()
            self._metrics.settle()
        except (RuntimeError, ValueError) as error:  # ValueError: torch's process group is gone
            log.warning("values logged after the last step are lost: %s; call run.close() on all ranks", error)

    def abandon(self, error: BaseException) -> None:
        """End without the other ranks, and send them the error."""
        self._metrics.discard()
        with contextlib.suppress(OSError):
            self._metrics.close()
        if self._watch is not None:
            self._watch.failed(error)
        self._disconnect()

    def _disconnect(self) -> None:
        self._checkpoints.disconnect()
        if self._watch is not None:
            self._watch.close()
