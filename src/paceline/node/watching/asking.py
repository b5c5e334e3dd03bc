"""Asks ranks where they are (`contract/stands.py`), many at once."""

from __future__ import annotations

import collections
import contextlib
import json
import socket
import time
from functools import partial
from typing import TYPE_CHECKING, Callable, NamedTuple

from paceline.contract.stands import WHOLE, address, is_of_this_user

from .connections import Connections
from .native import Dump
from .outside import look, look_at_children

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.contract.stands import Answer, Stand, Thread
    from paceline.node.eventloop.loop import Loop

    from .activity import Activity

_ANSWER_SECONDS = 2.0  # that a rank has to answer
_MOST_DUMPS = 4  # at once: each takes about a core for a second
_DUMP_SECONDS = 10.0  # after which no other one begins


class Asked(NamedTuple):
    """A rank that can be asked: the number of its attempt, its rank, its node, its process, and its device."""

    job_id: str
    attempt: int
    rank: int
    node: int
    pid: int
    device: str = ""


class Question:
    """Asks one rank, without waiting; `then` is called once, with None if there is no answer."""

    def __init__(
        self,
        loop: Loop,
        rank: Asked,
        what: bytes,
        then: Callable[[Answer | None], None],
        seconds: float = _ANSWER_SECONDS,
    ) -> None:
        self._loop, self._then, self._data = loop, then, b""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._is_open = True
        try:
            self._socket.connect(address(rank.job_id, rank.attempt, rank.rank))
            if not is_of_this_user(self._socket):
                raise OSError
            self._socket.send(what)
        except OSError:  # it has no socket, or many questions wait there
            self._end(None)
            return
        loop.watch(self._socket, self._receive)
        loop.after(seconds, lambda: self._end(None))

    def _receive(self) -> None:
        try:
            data = self._socket.recv(1 << 20)
        except OSError:
            self._end(None)
            return
        self._data += data
        if not data:
            answer = None
            with contextlib.suppress(ValueError):
                answer = json.loads(self._data)
            self._end(answer)

    def _end(self, answer: Answer | None) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._loop.forget(self._socket)
        self._socket.close()
        self._then(answer)


def ask(
    loop: Loop, ranks: Mapping[int, Asked], activities: Mapping[int, Activity], then: Callable[[list[Stand]], None],
    seconds: float = _ANSWER_SECONDS, *, looks: bool = True,
) -> None:  # fmt: skip
    """Ask ranks for all that they know; `then` is called once with where they are, when all have answered or cannot."""
    answers: dict[int, Answer | None] = {}
    stands: dict[int, Stand] = {}
    silent: list[int] = []  # ranks that have not answered, and are not seen yet
    waiting: collections.deque[int] = collections.deque()  # those of them that are not looked at yet
    until: list[float] = []

    def saw(number: int, threads: list[Thread], problem: str) -> None:
        stands[number]["seen"], stands[number]["unseen"] = threads, problem
        silent.remove(number)
        if not silent:
            then(list(stands.values()))
        elif waiting:
            loop.after(0.0, look_at_next)

    def look_at_next() -> None:
        if not waiting:  # the others that were begun at the start have ended at once
            return
        number = waiting.popleft()
        if time.monotonic() < until[0]:
            Dump(loop, ranks[number].pid, partial(saw, number))
        else:
            saw(number, [], f"other ranks that do not answer were looked at for {_DUMP_SECONDS:g} s")

    def heard(number: int, answer: Answer | None) -> None:
        answers[number] = answer
        if answer is not None:
            activities[number].hear(answer, time.monotonic())
        if len(answers) == len(ranks):
            now = time.monotonic()
            stands.update({one: _stand(ranks[one], activities[one], answers[one], now) for one in ranks})
            silent.extend(one for one in ranks if answers[one] is None and looks)
            waiting.extend(silent)
            until.append(now + _DUMP_SECONDS)
            for _ in silent[:_MOST_DUMPS]:
                loop.after(0.0, look_at_next)
            if not silent:
                then(list(stands.values()))

    for number, rank in ranks.items():
        Question(loop, rank, WHOLE, lambda answer, number=number: heard(number, answer), seconds)  # type: ignore[misc]


def _stand(rank: Asked, activity: Activity, answer: Answer | None, now: float) -> Stand:
    process, family = look(rank.pid), activity.family or look_at_children(rank.pid, Connections(()))
    return {
        "rank": rank.rank, "node": rank.node, "host": socket.gethostname(), "pid": rank.pid,
        "answer": answer, "still": activity.still(now), "idle": activity.idle(now), "state": process.state,
        "call": process.call, "file": process.file, "children": family.children, "seen": [], "unseen": "",
        "machine": {}, "device": rank.device,
    }  # fmt: skip
