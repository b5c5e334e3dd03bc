"""The log lines of a machine that runs the node side for a client."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.backends.base import LogLines

from .engine import close, run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.contract.messages import LogAnswer, Request

    from .connection import Answers, Host


def lines_of(answer: LogAnswer) -> LogLines:
    """The lines in an answer."""
    moment, attempt, rank, stream = answer["lines"]
    return LogLines(moment, attempt, rank, stream, answer["data"])


class RemoteLines:
    """A source of lines; see `backends/follow.py`."""

    def __init__(self, host: Host, request: Request) -> None:
        """Connect to nothing yet."""
        self._host, self._request = host, request
        self._answers: Answers | None = None

    def open(self) -> None:
        """See `begin`; for other threads than the engine's."""
        run(self.begin())

    async def begin(self) -> None:
        """Wait for the first answer."""
        self._answers = await self._host.connect(self._request)
        try:
            await anext(self._answers)
        except BaseException:
            await self._answers.aclose()
            raise

    def __iter__(self) -> Iterator[LogLines]:
        """The lines."""
        if self._answers is None:
            self.open()
        assert self._answers is not None
        try:
            for answer in self._answers:
                if "end" in answer:
                    return
                yield lines_of(answer)
        finally:
            close(self._answers.aclose(), self._answers.loop)
