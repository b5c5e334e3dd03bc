"""The answers of several hosts to a request with several answers, in the order of arrival."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from typing import TYPE_CHECKING

from paceline.backends.remote.connection import Unreachable
from paceline.backends.remote.crowd import AT_ONCE, need_files
from paceline.backends.remote.engine import call, close, own_loop, run
from paceline.backends.remote.lines import lines_of
from paceline.job.errors import UserError
from paceline.node.readers import Ended

from .held import Held

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractAsyncContextManager

    from paceline.backends.base import LogLines
    from paceline.backends.remote.connection import Answer, Answers, Body, Host
    from paceline.backends.remote.patience import Patience
    from paceline.contract.messages import Request

    Found = tuple[Host, Answer | Ended]

_KEPT = 64  # answers that nobody has taken yet; then no more are read


class Streams:
    """Connections to hosts. A stream of answers finishes with `end`.

    A task of the engine for each host connects, passes the answers on, and connects again if the part of a job is held;
    nothing but the engine's thread changes what is not of `take`.
    """

    def __init__(
        self,
        hosts: Iterable[Host],
        request: Callable[[Host], Request],
        body: Callable[[Host], Body | None] = lambda _: None,
        apart: bool = False,
    ) -> None:
        """Send the requests."""
        self._apart, self._loop = apart, own_loop()
        self._tasks: dict[asyncio.Task[None], Host] = {}
        self._open: dict[Host, Answers] = {}
        self._held: dict[Host, Held] = {}
        self._lost: set[Host] = set()
        self._starting = asyncio.Semaphore(AT_ONCE)
        self._arrived: list[Found] = []
        self._has_arrived, self._has_room = asyncio.Event(), asyncio.Event()
        self._taken: deque[Found] = deque()
        self._is_closed = False
        hosts = list(hosts)
        need_files(len(hosts))
        for host in hosts:
            self.add(host, request(host), body(host))

    def add(self, host: Host, request: Request, body: Body | None = None) -> None:
        """Send a request to another host, or to the same one again."""
        call(self._add, host, request, body)

    def hold(self, host: Host, name: str, job_id: str) -> None:
        """Follow a part of a job that a host has started; if the connection breaks, another one goes on with it."""
        call(self._hold, host, name, job_id)

    def say(self, host: Host, word: str) -> None:
        """Send a line to a host that has answered; one whose part of a job is held gets it in any case."""
        call(self._say, host, word)

    def give_up(self) -> None:
        """Connect to no host again: the connections that have broken end, and others as soon as they break."""
        call(self._give_up)

    def is_lost(self, host: Host) -> bool:
        """Whether the connection to a host whose part of a job is held has broken, and there is no other yet."""
        return host in self._lost

    @property
    def has_lost(self) -> bool:
        """Whether `is_lost` is true of a host."""
        return bool(self._lost)

    def put(self, host: Host, answer: Answer) -> None:
        """Insert an answer as if it came from this host."""
        call(self._put, host, answer)

    def take(self, seconds: float | None = None) -> tuple[Host, Answer | UserError] | None:
        """The next answer and its host, or the error of that host; None when all streams have ended."""
        while True:
            if not self._taken:
                self._taken.extend(run(self._batch(seconds), self._loop))
            if not self._taken:
                return None
            host, found = self._taken.popleft()
            if not isinstance(found, Ended):
                return host, found
            if isinstance(found.error, UserError):
                return host, found.error
            if found.error is not None:
                raise found.error

    def finish(self, seconds: float) -> None:
        """Wait for so long until all streams have ended; what they still have to say is not needed."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(TimeoutError):
            while self.take(deadline - time.monotonic()) is not None:
                pass

    def close(self) -> None:
        """Close all connections."""
        close(self._close(), self._loop)

    # -- in the engine's thread ----------------------------------------------------------------------------------------

    def _add(self, host: Host, request: Request, body: Body | None) -> None:
        if not self._is_closed:
            self._held.pop(host, None)
            self._lost.discard(host)
            task = asyncio.get_running_loop().create_task(self._follow(host, request, body))
            self._tasks[task] = host
            task.add_done_callback(self._ended)

    async def _follow(self, host: Host, request: Request, body: Body | None) -> None:
        """Pass on what a host answers, over several connections if its part of a job is held."""
        turn: AbstractAsyncContextManager[object] = self._starting
        patience: Patience | None = None
        to = host
        while True:
            try:
                async with turn:
                    answers = await to.connect(request, body, apart=self._apart, patience=patience)
                await self._pass_on(host, answers)
                return
            except Unreachable as error:
                held = self._held.get(host)
                if held is None or not host.reconnect:
                    raise
                if held.lose(error) and not held.is_given_up:
                    self._note(host, f"the connection to {host.name} broke; trying again for {host.reconnect:g} s")
                self._lost.add(host)
            to, request, patience = await held.wait()
            body, turn = None, contextlib.nullcontext()

    async def _pass_on(self, host: Host, answers: Answers) -> None:
        """Pass on what comes over a connection until the stream ends."""
        async with contextlib.aclosing(answers):
            self._open[host] = answers
            async for answer in answers:
                held = self._held.get(host)
                if "rejoined" in answer:
                    assert held is not None
                    self._note(host, f"{host.name} is connected again")
                    held.is_back(answers, answer["rejoined"])
                    self._lost.discard(host)
                    continue
                if held is not None:
                    held.takes(answer)
                if "end" in answer:
                    if held is not None:
                        await answers.finish()
                    return
                self._put(host, answer)
                while len(self._arrived) >= _KEPT:
                    self._has_room.clear()
                    await self._has_room.wait()

    def _hold(self, host: Host, name: str, job_id: str) -> None:
        self._held[host] = Held(host, name, job_id, self._open[host])

    def _say(self, host: Host, word: str) -> None:
        to = self._held.get(host) or self._open.get(host)
        if to is not None:  # else nobody is there to hear it
            to.say(word)

    def _give_up(self) -> None:
        for held in self._held.values():
            held.is_given_up = True
        for task, host in self._tasks.items():
            if host in self._lost:
                task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        host = self._tasks.pop(task)
        if self._is_closed:
            return
        error = self._held[host].why if task.cancelled() else task.exception()
        self._put(host, Ended(error))

    def _put(self, host: Host, found: Answer | Ended) -> None:
        self._arrived.append((host, found))
        self._has_arrived.set()

    def _note(self, host: Host, why: str) -> None:
        self._put(host, {"event": "note", "details": {"why": why}})

    async def _batch(self, seconds: float | None) -> list[Found]:
        """What has arrived, or else what comes first; nothing if all streams have ended."""
        if not self._arrived and self._tasks:
            self._has_arrived.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._has_arrived.wait(), seconds)
            if not self._arrived and self._tasks:
                raise TimeoutError
        found, self._arrived = self._arrived, []
        self._has_room.set()
        return found

    async def _close(self) -> None:
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for answers in self._open.values():
            await answers.aclose()


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
