"""The log lines of a machine that runs the node side for a client."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from paceline.backends.base import LogLines

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .connection import Answers, Host, Request


class RemoteLines:
    """A source of lines; see `backends/follow.py`."""

    def __init__(self, host: Host, request: Request) -> None:
        """Connect to nothing yet.

        Args:
            request: is answered with `begin`, then lines, then `end`.
        """
        self._host, self._request = host, request
        self._stack = contextlib.ExitStack()
        self._answers: Answers | None = None
        self._is_closed = False

    def open(self) -> None:
        """Wait for the first answer.

        Raises:
            UserError: it is an error, or does not come.
        """
        try:
            answers = self._stack.enter_context(self._host.listen(self._request, opened=self._connected))
            next(answers)
        except BaseException:
            self._stack.close()
            raise

    def _connected(self, answers: Answers) -> None:
        self._answers = answers
        if self._is_closed:
            answers.stop()

    def __iter__(self) -> Iterator[LogLines]:
        """The lines.

        Raises:
            UserError: the machine does not answer, or no longer.
        """
        if self._answers is None:
            self.open()
        assert self._answers is not None
        with self._stack:
            for answer in self._answers:
                if "end" in answer:
                    return
                moment, attempt, rank, stream = answer["lines"]
                yield LogLines(moment, attempt, rank, stream, answer["data"])

    def close(self) -> None:
        """Close the connection; also while another thread reads from it."""
        self._is_closed = True
        if self._answers is not None:
            self._answers.stop()
