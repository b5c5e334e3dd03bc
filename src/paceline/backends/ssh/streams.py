"""The answers of several hosts to a request with several answers, in the order of arrival."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

from paceline.job.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from paceline.backends.remote.connection import Answer, Answers, Body, Host, Request

_KEPT = 64  # answers that nobody has taken yet; then hosts wait


class Streams:
    """Connections to hosts, each read by its own thread. Every stream of answers finishes with `end`."""

    def __init__(
        self,
        hosts: Iterable[Host],
        request: Callable[[Host], Request],
        body: Callable[[Host], Body | None] = lambda _: None,
        apart: bool = False,
    ) -> None:
        """Send the requests.

        Args:
            hosts: the hosts.
            request: makes the request for a host.
            body: what writes what follows the request to a host.
            apart: Ctrl-C does not end the connections.
        """
        self._news: queue.Queue[tuple[Host, Answer | UserError]] = queue.Queue(_KEPT)
        self._open: dict[Host, Answers] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._apart = apart
        self._left = 0
        for host in hosts:
            self.add(host, request(host), body(host))

    def add(self, host: Host, request: Request, body: Body | None = None) -> None:
        """Send a request to another host, or to the same one again."""
        with self._lock:
            self._left += 1
        threading.Thread(target=self._listen, args=(host, request, body), daemon=True).start()

    def _is_over(self) -> None:
        with self._lock:
            self._left -= 1

    def _opened(self, host: Host, answers: Answers) -> None:
        with self._lock:
            self._open[host] = answers
            if self._closed:
                answers.stop()

    def _listen(self, host: Host, request: Request, body: Body | None) -> None:
        try:
            with host.listen(request, body, lambda it: self._opened(host, it), self._apart) as answers:
                for answer in answers:
                    if self._closed:
                        return
                    self._news.put((host, answer))
                    if "end" in answer:
                        return
        except UserError as error:
            if not self._closed:
                self._news.put((host, error))
        except (OSError, ValueError):  # closed just now
            if not self._closed:
                raise

    def take(self, seconds: float | None = None) -> tuple[Host, Answer | UserError] | None:
        """The next answer and its host, or the error of that host; None when all streams have ended.

        Raises:
            TimeoutError: no answer came in time.
        """
        while self._left:
            try:
                host, answer = self._news.get(timeout=None if seconds is None else max(0.0, seconds))
            except queue.Empty:
                raise TimeoutError from None
            if isinstance(answer, UserError):
                self._is_over()
                return host, answer
            if "end" not in answer:
                return host, answer
            self._is_over()
        return None

    def put(self, host: Host, answer: Answer) -> None:
        """Insert an answer as if it came from this host."""
        if not self._closed:
            self._news.put((host, answer))

    def next(self, seconds: float | None = None) -> tuple[Host, Answer] | None:
        """The next answer and its host; None when all streams have ended.

        Raises:
            TimeoutError: no answer came in time.
            UserError: a host does not answer.
        """
        found = self.take(seconds)
        if found is None:
            return None
        host, answer = found
        if isinstance(answer, UserError):
            raise answer
        return host, answer

    def say(self, host: Host, word: str) -> None:
        """Send a line to a host that has answered."""
        self._open[host].say(word)

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            self._closed = True
            for answers in self._open.values():
                answers.stop()
        while not self._news.empty():  # threads may wait for room in it
            self._news.get_nowait()
