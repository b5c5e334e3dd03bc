"""The answers of several hosts to a request with several answers, in the order of arrival."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from typing import TYPE_CHECKING

from paceline.backends.remote.connection import Unreachable
from paceline.job.errors import UserError

from .held import Held

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from paceline.backends.remote.connection import Answer, Answers, Body, Host, Request
    from paceline.backends.remote.patience import Patience

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
        self._held: dict[Host, Held] = {}
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
            self._held.pop(host, None)
        threading.Thread(target=self._listen, args=(host, request, body), daemon=True).start()

    def _is_over(self) -> None:
        with self._lock:
            self._left -= 1

    def hold(self, host: Host, name: str, job_id: str) -> None:
        """Follow a part of a job that a host has started; if the connection breaks, another one goes on with it."""
        with self._lock:
            self._held[host] = Held(host, name, job_id, self._open[host])

    def is_lost(self, host: Host) -> bool:
        """Whether the connection to a host whose part of a job is held has broken, and there is no other yet."""
        return host in self._held and self._held[host].is_lost

    def give_up(self) -> None:
        """Connect to no host again: the connections that have broken end, and others as soon as they break."""
        with self._lock:
            for host, held in self._held.items():
                held.give_up()
                if held.is_lost:
                    self._open[host].abandon()

    def _opened(self, host: Host, answers: Answers) -> None:
        with self._lock:
            self._open[host] = answers
            if self._closed or (host in self._held and self._held[host].is_given_up):
                answers.stop()

    def _listen(self, host: Host, request: Request, body: Body | None) -> None:
        try:
            self._follow(host, request, body)
        except UserError as error:
            if not self._closed:
                self._news.put((host, error))
        except (OSError, ValueError):  # closed just now
            if not self._closed:
                raise

    def _follow(self, host: Host, request: Request, body: Body | None) -> None:
        """Read all answers of a host, over several connections if one of a held part breaks.

        Raises:
            UserError: it does not answer, or not any more.
        """
        patience: Patience | None = None
        while True:
            try:
                self._read(host, request, body, patience)
                return
            except Unreachable as error:
                held = self._held.get(host)
                if held is None or not host.reconnect or self._closed:
                    raise
                if held.lose(error) and not held.is_given_up:
                    self._note(host, f"the connection to {host.name} broke; trying again for {host.reconnect:g} s")
                (request, patience), body = held.wait(), None

    def _read(self, host: Host, request: Request, body: Body | None, patience: Patience | None) -> None:
        with host.listen(request, body, lambda it: self._opened(host, it), self._apart, patience) as answers:
            for answer in answers:
                held = self._held.get(host)
                if self._closed:
                    return
                if "rejoined" in answer:
                    assert held is not None
                    self._note(host, f"{host.name} is connected again")
                    held.is_back(answers, answer["rejoined"])
                    continue
                if "end" in answer and held is not None:
                    held.takes(answer)
                    answers.finish()
                self._news.put((host, answer))
                if "end" in answer:
                    return
                if held is not None:
                    held.takes(answer)

    def _note(self, host: Host, why: str) -> None:
        self._news.put((host, {"event": "note", "details": {"why": why}}))

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
        """Send a line to a host that has answered; one whose part of a job is held gets it in any case."""
        held = self._held.get(host)
        if held is None:
            self._open[host].say(word)
        else:
            held.say(word)

    def finish(self, seconds: float) -> None:
        """Wait for so long until all streams have ended; what they still have to say is not needed."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(TimeoutError):
            while self.take(deadline - time.monotonic()) is not None:
                pass

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            self._closed = True
            for answers in self._open.values():
                answers.stop()
        while not self._news.empty():  # threads may wait for room in it
            self._news.get_nowait()
