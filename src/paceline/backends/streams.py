"""What several hosts say to a request that they answer again and again, as it comes."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

from paceline.job.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .connection import Answer, Answers, Host, Request


class Streams:
    """Connections to hosts, each listened to by a thread of its own. Every stream of answers finishes with `end`."""

    def __init__(self, hosts: Sequence[Host], request: Request) -> None:
        self._news: queue.Queue[tuple[Host, Answer | UserError]] = queue.Queue()
        self._open: list[Answers] = []
        self._left = len(hosts)
        self._lock = threading.Lock()
        self._closed = False
        for host in hosts:
            threading.Thread(target=self._listen, args=(host, request), daemon=True).start()

    def _listen(self, host: Host, request: Request) -> None:
        try:
            with host.listen(request) as answers:
                with self._lock:
                    if self._closed:
                        return
                    self._open.append(answers)
                for answer in answers:
                    self._news.put((host, answer))
                    if "end" in answer:
                        return
        except UserError as error:
            self._news.put((host, error))

    def next(self, seconds: float | None = None) -> tuple[Host, Answer] | None:
        """The next answer and whose it is; None when all have said everything.

        Raises:
            TimeoutError: nobody said anything in time.
            UserError: a host does not answer.
        """
        while self._left:
            try:
                host, answer = self._news.get(timeout=None if seconds is None else max(0.0, seconds))
            except queue.Empty:
                raise TimeoutError from None
            if isinstance(answer, UserError):
                raise answer
            if "end" not in answer:
                return host, answer
            self._left -= 1
        return None

    def close(self) -> None:
        """Listen no more."""
        with self._lock:
            self._closed = True
            for answers in self._open:
                answers.stop()
