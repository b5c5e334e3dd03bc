"""The TensorBoard that an agent runs beside its job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.node.tensorboard import PAUSE, TensorBoard, start_with_job

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.node.eventloop.loop import Loop
    from paceline.node.rundir.directory import RunDirectory


class JobBoard:
    """The TensorBoard of a running job; it ends with this process."""

    def __init__(self, loop: Loop, run: RunDirectory) -> None:
        self._loop, self._run = loop, run
        self._board: TensorBoard | None = None

    def start(self, python: Sequence[str], logdir: str) -> None:
        """Start it, unless it runs; its address or its problem becomes an event of the job."""
        if self._board is None or not self._board.is_alive():
            self._board = start_with_job(python, logdir, self._run.path)
            self._check(self._board)

    def _check(self, board: TensorBoard | None) -> None:
        """Check until it is known whether it runs, or it has been replaced."""
        if board is None or board is not self._board:
            return
        if board.look():
            self._run.append({"event": "tensorboard", "url": board.url, "problem": board.problem})
        else:
            self._loop.after(PAUSE, lambda: self._check(board))
