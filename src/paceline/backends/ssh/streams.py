"""The answers of several hosts to a request with several answers, in the order of arrival."""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import threading
import time
from typing import TYPE_CHECKING

from paceline.backends.remote.connection import Unreachable
from paceline.backends.remote.crowd import Workers, need_files
from paceline.backends.remote.lines import lines_of
from paceline.job.errors import UserError
from paceline.node.logs.readers import Ended, Readers

from .held import Held

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from paceline.backends.base import LogLines
    from paceline.backends.remote.connection import Answer, Answers, Body, Host
    from paceline.backends.remote.patience import Patience
    from paceline.contract.messages import Request

    Take = Callable[[Answers], bool]


class Streams:
    """Connections to hosts. A stream of answers finishes with `end`.

    Some threads make and end connections, a bounded number of them at a time, and one reads all answers. While a host
    whose part of a job is held has no connection, a thread of its own tries to make another one.
    """

    def __init__(
        self,
        hosts: Iterable[Host],
        request: Callable[[Host], Request],
        body: Callable[[Host], Body | None] = lambda _: None,
        apart: bool = False,
    ) -> None:
        """Send the requests."""
        self._readers: Readers[Host, Answer] = Readers()
        self._pump, self._workers = Pump(), Workers()
        self._open: dict[Host, Answers] = {}
        self._held: dict[Host, Held] = {}
        self._lost: set[Host] = set()
        self._lock = threading.Lock()
        self._apart = apart
        hosts = list(hosts)
        need_files(len(hosts))
        for host in hosts:
            self.add(host, request(host), body(host))

    def add(self, host: Host, request: Request, body: Body | None = None) -> None:
        """Send a request to another host, or to the same one again."""
        with self._lock:
            self._held.pop(host, None)
            self._lost.discard(host)
        self._readers.enter()
        self._workers.do(lambda: self._connect(host, request, body))

    def hold(self, host: Host, name: str, job_id: str) -> None:
        """Follow a part of a job that a host has started; if the connection breaks, another one goes on with it."""
        with self._lock:
            self._held[host] = Held(host, name, job_id, self._open[host])

    def is_lost(self, host: Host) -> bool:
        """Whether the connection to a host whose part of a job is held has broken, and there is no other yet."""
        return host in self._lost

    @property
    def has_lost(self) -> bool:
        """Whether `is_lost` is true of a host."""
        return bool(self._lost)

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
            if self._readers.is_closed or (host in self._held and self._held[host].is_given_up):
                answers.stop()

    def _connect(self, host: Host, request: Request, body: Body | None, patience: Patience | None = None) -> None:
        """Make a connection, and have its answers read."""
        with contextlib.ExitStack() as stack:
            try:
                listen = host.listen(request, body, lambda it: self._opened(host, it), self._apart, patience)
                answers = stack.enter_context(listen)
            except Exception as error:
                self._break(host, error)
                return
            connection = stack.pop_all()
        self._pump.add(answers, lambda it: self._take(host, it, connection))

    def _take(self, host: Host, answers: Answers, connection: contextlib.ExitStack) -> bool:
        """Pass on what a connection has brought; returns whether it goes on."""
        error: Exception | None = None
        try:
            for answer in answers.arrived():
                held = self._held.get(host)
                if "rejoined" in answer:
                    assert held is not None
                    self._readers.put(host, _note(f"{host.name} is connected again"))
                    held.is_back(answers, answer["rejoined"])
                    self._lost.discard(host)
                    continue
                if "end" in answer:
                    if held is not None:
                        held.takes(answer)
                    self._workers.do(functools.partial(self._end, host, answers, connection, held is not None))
                    return False
                self._readers.put(host, answer)
                if held is not None:
                    held.takes(answer)
        except EOFError:
            pass
        except Exception as caught:
            error = caught
        else:
            return not self._readers.is_closed
        self._workers.do(lambda: self._close(host, answers, connection, error))
        return False

    def _end(self, host: Host, answers: Answers, connection: contextlib.ExitStack, is_held: bool) -> None:
        if is_held:
            answers.finish()
        connection.close()
        self._readers.put(host, Ended(None))

    def _close(self, host: Host, answers: Answers, connection: contextlib.ExitStack, error: Exception | None) -> None:
        why = error or answers.why_over()
        connection.close()
        self._break(host, why)

    def _break(self, host: Host, why: Exception) -> None:
        """There is no connection, or no longer: if it is one of a held part, make another one."""
        held = self._held.get(host)
        if not isinstance(why, Unreachable) or held is None or not host.reconnect or self._readers.is_closed:
            self._readers.put(host, Ended(why))
            return
        was_there = held.lose(why)
        self._lost.add(host)
        if was_there and not held.is_given_up:
            self._readers.put(
                host, _note(f"the connection to {host.name} broke; trying again for {host.reconnect:g} s")
            )
        threading.Thread(target=self._connect_again, args=(host, held), daemon=True).start()

    def _connect_again(self, host: Host, held: Held) -> None:
        try:
            request, patience = held.wait()
        except Unreachable as error:
            self._readers.put(host, Ended(error))
            return
        self._connect(host, request, None, patience)

    def take(self, seconds: float | None = None) -> tuple[Host, Answer | UserError] | None:
        """The next answer and its host, or the error of that host; None when all streams have ended."""
        for host, found in iter(lambda: self._readers.take(seconds), None):
            if not isinstance(found, Ended):
                return host, found
            if isinstance(found.error, UserError):
                return host, found.error
            if found.error is not None:
                raise found.error
        return None

    def put(self, host: Host, answer: Answer) -> None:
        """Insert an answer as if it came from this host."""
        self._readers.put(host, answer)

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
            self._readers.is_closed = True
            self._pump.close()
            for answers in self._open.values():
                answers.stop()
        self._readers.close()


def _note(why: str) -> Answer:
    return {"event": "note", "details": {"why": why}}


# -- log lines ---------------------------------------------------------------------------------------------------------


class Followed:
    """See `follow.Arrivals`."""

    def __init__(self, hosts: Iterable[Host], request: Request) -> None:
        self._streams = Streams(hosts, lambda _: request)

    def take(self) -> tuple[Host, LogLines | Ended] | None:
        for host, answer in iter(self._streams.take, None):
            if isinstance(answer, UserError):
                return host, Ended(answer)
            if "lines" in answer:
                return host, lines_of(answer)
        return None

    def close(self) -> None:
        self._streams.close()


# -- reading -----------------------------------------------------------------------------------------------------------


class Pump:
    """Tells of each connection when there is something to read: a function, which returns whether to go on with it.

    The function reads all that is there with `Answers.arrived`. One that waits holds up all other connections.
    """

    def __init__(self) -> None:
        self._selector: selectors.BaseSelector | None = None
        self._wake = -1
        self._new: list[tuple[Answers, Take]] = []
        self._lock = threading.Lock()
        self._is_closed = False

    def add(self, answers: Answers, take: Take) -> None:
        """Read another connection from now on."""
        with self._lock:
            if self._is_closed:
                return
            self._new.append((answers, take))
            if self._selector is None:
                self._selector = selectors.DefaultSelector()
                reader, self._wake = os.pipe()
                self._selector.register(reader, selectors.EVENT_READ)
                threading.Thread(target=self._run, args=(self._selector, reader), daemon=True).start()
            os.write(self._wake, b"+")

    def close(self) -> None:
        """Read no more."""
        with self._lock:
            self._is_closed = True
            if self._wake != -1:
                os.close(self._wake)
                self._wake = -1

    def _run(self, selector: selectors.BaseSelector, reader: int) -> None:
        with selector:
            while True:
                for key, _ in selector.select():
                    if key.fd != reader:
                        answers, take = key.data
                        if not take(answers):
                            selector.unregister(key.fd)
                    elif not os.read(reader, 4096):
                        os.close(reader)
                        return
                with self._lock:
                    new, self._new = self._new, []
                for answers, take in new:
                    if take(answers):  # what has come before it was registered
                        selector.register(answers.fileno(), selectors.EVENT_READ, (answers, take))
