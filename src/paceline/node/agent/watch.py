"""Looks from time to time where the ranks of this node are, and says it when none of them has gone on for long."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import TYPE_CHECKING, Callable

from paceline.node.watching.activity import Activity
from paceline.node.watching.outside import look
from paceline.node.watching.stand import NUMBERS, STACKS, address, is_of_this_user

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.node.eventloop.loop import Loop
    from paceline.node.ranks.launcher import Rank
    from paceline.node.watching.stand import Answer, Stand

_TICK = 5.0  # seconds between two looks; less if ranks hang after less
_MOST_TICKS = 4.0  # between two looks
_ANSWER_SECONDS = 2.0  # that a rank has to answer


class Watch:
    """Watches the ranks of this node, while they run.

    It asks each rank for the numbers of its collectives, and once none has gone on for long enough, for its stacks.
    """

    def __init__(self, loop: Loop, job_id: str, after: float, found: Callable[[list[Stand]], None]) -> None:
        """Watch nothing yet.

        Args:
            loop: of the agent.
            job_id: of the job here.
            after: seconds without a collective after which `found` is called with where the ranks are; again and again,
                less and less often, and with nothing once they go on.
            found: see `after`.
        """
        self._loop, self._job_id, self._after, self._found = loop, job_id, after, found
        self._tick = min(_TICK, after / 4)
        self._ranks: Mapping[int, Rank] = {}
        self._activities: dict[int, Activity] = {}
        self._looked = 0.0  # when the ranks were looked at last
        self._turn = 0  # counts the calls of `start`: timers of an attempt before do nothing
        self._said_at: float | None = None  # when the ranks' places were said last, in this stall

    def start(self, ranks: Mapping[int, Rank]) -> None:
        """Watch these ranks of a new attempt."""
        self._ranks, self._said_at = ranks, None
        self._activities = {}
        self._turn += 1
        self._after_a_while(self._look)

    def _after_a_while(self, then: Callable[[], None]) -> None:
        turn = self._turn
        self._loop.after(self._tick, lambda: then() if turn == self._turn else None)

    def _live(self) -> dict[int, Rank]:
        return {number: rank for number, rank in self._ranks.items() if rank.status is None and rank.pid}

    def _look(self) -> None:
        """See and ask each rank; what they answer is judged a tick later."""
        live, now = self._live(), time.monotonic()
        if now - self._looked > _MOST_TICKS * self._tick:  # this process did not run meanwhile, and saw nothing
            self._activities = {}
        self._looked = now
        if not live:
            if any(rank.status is None for rank in self._ranks.values()):  # they have not started
                self._after_a_while(self._look)
            return
        for number, rank in live.items():
            activity = self._activities.setdefault(number, Activity(now))
            activity.see(look(rank.pid), now)
            Question(self._loop, rank, self._job_id, NUMBERS, lambda answer, it=activity: self._heard(it, answer))  # type: ignore[misc]
        self._judge(live, now)
        self._after_a_while(self._look)

    def _heard(self, activity: Activity, answer: Answer | None) -> None:
        if answer is not None:
            activity.hear(answer, time.monotonic())

    def _judge(self, live: Mapping[int, Rank], now: float) -> None:
        stands_still = all(self._activities[number].still(now) >= self._after for number in live)
        if not stands_still:
            if self._said_at is not None:
                self._said_at = None
                self._found([])
            return
        shortest = min(self._activities[number].still(now) for number in live)
        if self._said_at is not None and now - self._said_at < shortest / 4:
            return
        self._said_at = now
        ask(self._loop, live, self._job_id, self._activities, self._found)


class Question:
    """Asks one rank, without waiting; `then` is called once, with None if there is no answer."""

    def __init__(self, loop: Loop, rank: Rank, job_id: str, what: bytes, then: Callable[[Answer | None], None]) -> None:
        self._loop, self._then, self._data = loop, then, b""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._is_open = True
        try:
            self._socket.connect(address(job_id, rank.placement.attempt, rank.placement.rank))
            if not is_of_this_user(self._socket):
                raise OSError
            self._socket.send(what)
        except OSError:  # it has no socket, or many questions wait there
            self._end(None)
            return
        loop.watch(self._socket, self._receive)
        loop.after(_ANSWER_SECONDS, lambda: self._end(None))

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
    loop: Loop, ranks: Mapping[int, Rank], job_id: str, activities: Mapping[int, Activity],
    then: Callable[[list[Stand]], None],
) -> None:  # fmt: skip
    """Ask ranks for all that they know; `then` is called once with where they are, when all have answered or cannot."""
    answers: dict[int, Answer | None] = {}

    def heard(number: int, answer: Answer | None) -> None:
        answers[number] = answer
        if len(answers) == len(ranks):
            now = time.monotonic()
            then([_stand(ranks[one], activities[one], answers[one], now) for one in ranks])

    for number, rank in ranks.items():
        Question(loop, rank, job_id, STACKS, lambda answer, number=number: heard(number, answer))  # type: ignore[misc]


def _stand(rank: Rank, activity: Activity, answer: Answer | None, now: float) -> Stand:
    process = look(rank.pid)
    return {
        "rank": rank.placement.rank, "node": rank.placement.node_rank, "host": socket.gethostname(), "pid": rank.pid,
        "answer": answer, "still": activity.still(now), "idle": activity.idle(now), "state": process.state,
        "call": process.call, "file": process.file, "children": process.children,
    }  # fmt: skip
