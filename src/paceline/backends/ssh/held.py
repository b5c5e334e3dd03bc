"""A held part of a job: when the connection to its host breaks, the client connects again."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.backends.remote.connection import Unreachable

if TYPE_CHECKING:
    from paceline.backends.remote.connection import Answers, Host
    from paceline.backends.remote.patience import Patience
    from paceline.contract.messages import JobAnswer, Rejoin, Request

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 8.0  # seconds between two tries; each takes twice the one before
_LEAST = 1.0  # seconds for a try
_MOST_ANSWERS, _MOST_BYTES = 64, 1 << 20  # until the host is told that they have been received


class GivenUp(Unreachable):
    """A host of a job in the foreground could not be reached again in time."""


class Held:
    """What a client knows of its connections to one part of a job. See `node/host/held.py` for the other side.

    Attributes:
        is_given_up: whether no other connection is made.
        why: how the connection broke, or the last try failed.
    """

    def __init__(self, host: Host, name: str, job_id: str, answers: Answers) -> None:
        """Begin with the connection that started the part."""
        self._host = replace(host, inside=())  # the process there has the container
        self._request: Rejoin = {"do": "rejoin", "name": name, "job_id": job_id, "seen": 0}
        self._answers: Answers | None = answers
        self._words: list[str] = []
        self._seen = self._acknowledged = self._bytes = 0
        self._lost_since = self._pause = 0.0
        self.is_given_up = False
        self.why = Unreachable()
        answers.say("hold")

    def say(self, word: str) -> None:
        """Give the host an order, now or when it is reached again."""
        self._words.append(word)
        if self._answers is not None:
            self._answers.say(word)

    def takes(self, answer: JobAnswer) -> None:
        """Note an answer that nobody needs again."""
        self._seen += 1
        self._bytes += len(answer.get("data", b""))
        if "end" in answer or self._seen - self._acknowledged >= _MOST_ANSWERS or self._bytes >= _MOST_BYTES:
            self._acknowledged, self._bytes = self._seen, 0
            if self._answers is not None:
                self._answers.say(f"seen {self._seen}")

    # -- another connection --------------------------------------------------------------------------------------------

    def lose(self, why: Unreachable) -> bool:
        """Note that there is no connection, and why; returns whether there was one until now."""
        was_there, self._answers = self._answers is not None, None
        if was_there or not self.is_given_up:
            self.why = why
        if was_there:
            self._lost_since, self._pause = time.monotonic(), _FIRST_PAUSE
        return was_there

    async def wait(self) -> tuple[Host, Request, Patience]:
        """Wait for the next try; returns where it goes, its request, and how long it may take."""
        seconds = self._host.reconnect
        remaining = self._lost_since + seconds - time.monotonic()
        if self.is_given_up:
            raise self.why
        if remaining <= 0:
            raise GivenUp(f"{self._host.name} was not reached again within {seconds:g} s ({self.why})")
        await asyncio.sleep(min(self._pause, remaining))
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        request: Rejoin = {**self._request, "seen": self._seen}
        patience = self._host.patience(request)
        return self._host, request, patience.shortened(max(_LEAST, min(patience.login, remaining)))

    def is_back(self, answers: Answers, heard: int) -> None:
        """Note that there is a connection again, and that the host has heard so many orders."""
        self._answers, self._acknowledged, self._bytes = answers, self._seen, 0
        answers.say(f"seen {self._seen}", *self._words[heard:])
