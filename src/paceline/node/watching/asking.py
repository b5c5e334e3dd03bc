"""Asks ranks where they are (`contract/stands.py`), many at once."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

from paceline.contract.stands import WHOLE, address, is_of_this_user

from .connections import Connections
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


# -- frames of a process that cannot say them itself: py-spy reads them, if it is installed here -----------------------

_SECONDS = 10.0  # that py-spy may take; it stops the process for a part of that
_PROGRAM = "py-spy"


class Dump:
    """Reads the threads of one process, without waiting.

    `then` is called once, with the threads, the main one first, and why there are none; both empty without py-spy.
    """

    def __init__(self, loop: Loop, pid: int, then: Callable[[list[Thread], str], None]) -> None:
        self._loop, self._pid, self._then, self._text = loop, pid, then, b""
        folders = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)))
        program = shutil.which(_PROGRAM, path=folders)
        if program is None:
            then([], "")
            return
        try:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
            self._process = subprocess.Popen(
                [program, "dump", "--pid", str(pid), "--native", "--json"],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._errors,
            )  # fmt: skip
        except OSError as error:  # of a full disk, or of the program; the agent goes on
            then([], f"{_PROGRAM} cannot be started: {error.strerror}")
            return
        assert self._process.stdout is not None
        self._output = self._process.stdout
        loop.watch(self._output, self._receive)
        loop.after(_SECONDS, lambda: self._end(f"does not see it within {_SECONDS:g} s"))

    def _receive(self) -> None:
        data = os.read(self._output.fileno(), 1 << 20)
        self._text += data
        if not data:
            self._end("cannot read it")

    def _end(self, problem: str) -> None:
        if self._output.closed:
            return
        self._loop.forget(self._output)
        self._output.close()
        self._process.kill()
        self._process.wait()
        threads: list[Thread] = []
        try:
            threads = [
                _thread(it) for it in sorted(json.loads(self._text), key=lambda it: it["os_thread_id"] != self._pid)
            ]
        except (ValueError, LookupError, TypeError, AttributeError):  # an error, in words
            self._errors.seek(0)
            if b"ermission" in self._errors.read():
                problem = "may not look at it (ptrace is not permitted)"
        self._errors.close()
        self._then(threads, "" if threads else f"{_PROGRAM} {problem}")


def _thread(it: Any) -> Thread:
    """Of what py-spy says; frames of C code have a module, and of these the line does not matter."""
    frames = [
        (
            frame["module"] or frame["filename"],
            0 if frame["module"] else frame["line"],
            frame["name"].rpartition(".")[2],
        )
        for frame in it["frames"]
    ]
    return {"name": it["thread_name"] or str(it["os_thread_id"]), "frames": frames}
