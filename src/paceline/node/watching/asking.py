"""Asks ranks where they are (`contract/stands.py`), many at once; and py-spy and NCCL, what they know of them."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from functools import partial
from typing import IO, TYPE_CHECKING, Any, Callable, NamedTuple

from paceline.contract.stands import WHOLE, address, is_of_this_user

from .outside import Moment, look, look_at_children
from .typical import ENDED

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from paceline.contract.stands import Answer, Stand, Thread
    from paceline.node.eventloop.loop import Loop

    from .outside import Activity

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


def question(
    loop: Loop, rank: Asked, what: bytes, then: Callable[[Answer | None], None], seconds: float = _ANSWER_SECONDS
) -> None:
    """Ask one rank, without waiting; `then` is called once, with None if there is no answer."""
    asked = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    asked.setblocking(False)
    try:
        asked.connect(address(rank.job_id, rank.attempt, rank.rank))
        if not is_of_this_user(asked):
            raise OSError
        asked.send(what)
    except OSError:  # it has no socket, or many questions wait there
        asked.close()
        then(None)
        return

    def read(data: bytes, is_all: bool) -> None:
        answer = None
        with contextlib.suppress(ValueError):
            answer = json.loads(data) if is_all else None
        then(answer)

    _read(loop, asked, seconds, read)


def _read(loop: Loop, file: socket.socket | IO[bytes], seconds: float, then: Callable[[bytes, bool], None]) -> None:
    """Read to the end, without waiting, and close it; `then` is called once, with the data, and whether that is all."""
    parts: list[bytes] = []
    is_open = True

    def end(is_all: bool) -> None:
        nonlocal is_open
        if is_open:
            is_open = False
            loop.forget(file)
            file.close()
            then(b"".join(parts), is_all)

    def receive() -> None:
        try:
            parts.append(os.read(file.fileno(), 1 << 20))
        except OSError:
            end(False)
            return
        if not parts[-1]:
            end(True)

    loop.watch(file, receive)
    loop.after(seconds, lambda: end(False))


def ask(
    loop: Loop, ranks: Mapping[int, Asked], activities: Mapping[int, Activity], then: Callable[[list[Stand]], None],
    seconds: float = _ANSWER_SECONDS, *, looks: bool = True,
) -> None:  # fmt: skip
    """Ask ranks for all that they know; `then` is called once with where they are, when all have answered or cannot."""
    answers: dict[int, Answer | None] = {}
    stands: dict[int, Stand] = {}
    closed: list[int] = []
    silent: list[int] = []  # ranks that have not answered, and are not seen yet
    waiting: collections.deque[int] = collections.deque()  # those of them that are not looked at yet
    until: list[float] = []
    began = time.monotonic()

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
            dump(loop, ranks[number].pid, partial(saw, number))
        else:
            saw(number, [], f"other ranks that do not answer were looked at for {_DUMP_SECONDS:g} s")

    def heard(number: int, answer: Answer | None) -> None:
        answers[number] = answer
        if answer is not None:
            activities[number].hear(answer, time.monotonic())
        elif not looks and time.monotonic() < began + seconds:  # its socket is closed, as of one that ends
            closed.append(number)
        if len(answers) == len(ranks):
            now = time.monotonic()
            stands.update({one: _stand(ranks[one], activities[one], answers[one], now) for one in ranks})
            for one in closed:
                stands[one]["unseen"] = ENDED
            silent.extend(one for one in ranks if answers[one] is None and looks)
            waiting.extend(silent)
            until.append(now + _DUMP_SECONDS)
            for _ in silent[:_MOST_DUMPS]:
                loop.after(0.0, look_at_next)
            if not silent:
                then(list(stands.values()))

    for number, rank in ranks.items():
        question(loop, rank, WHOLE, lambda answer, number=number: heard(number, answer), seconds)  # type: ignore[misc]


def _stand(rank: Asked, activity: Activity, answer: Answer | None, now: float) -> Stand:
    process, family = look(rank.pid), activity.family or look_at_children(rank.pid, Moment(()))
    return {
        "rank": rank.rank, "node": rank.node, "host": socket.gethostname(), "pid": rank.pid,
        "answer": answer, "still": activity.still(now), "idle": activity.idle(now), "state": process.state,
        "call": process.call, "file": process.file, "children": family.children, "seen": [], "unseen": "",
        "machine": {}, "device": rank.device,
    }  # fmt: skip


# -- frames of a process that cannot say them itself: py-spy reads them, if it is installed here -----------------------

_SECONDS = 10.0  # that py-spy may take; it stops the process for a part of that
_PROGRAM = "py-spy"


def dump(loop: Loop, pid: int, then: Callable[[list[Thread], str], None]) -> None:
    """Read the threads of one process, without waiting.

    `then` is called once, with the threads, the main one first, and why there are none; both empty without py-spy.
    """
    folders = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)))
    program = shutil.which(_PROGRAM, path=folders)
    if program is None:
        then([], "")
        return
    try:
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        process = subprocess.Popen(
            [program, "dump", "--pid", str(pid), "--native", "--json"],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors,
        )  # fmt: skip
    except OSError as error:  # of a full disk, or of the program; the agent goes on
        then([], f"{_PROGRAM} cannot be started: {error.strerror}")
        return
    assert process.stdout is not None

    def read(text: bytes, is_all: bool) -> None:
        process.kill()
        process.wait()
        threads: list[Thread] = []
        problem = "cannot read it" if is_all else f"does not see it within {_SECONDS:g} s"
        try:
            threads = [_thread(it) for it in sorted(json.loads(text), key=lambda it: it["os_thread_id"] != pid)]
        except (ValueError, LookupError, TypeError, AttributeError):  # an error, in words
            errors.seek(0)
            if b"ermission" in errors.read():
                problem = "may not look at it (ptrace is not permitted)"
        errors.close()
        then(threads, "" if threads else f"{_PROGRAM} {problem}")

    _read(loop, process.stdout, _SECONDS, read)


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


# -- what NCCL says of a job that hangs: from version 2.24 on, its RAS service listens on each machine of a job --------

# https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html
PORT = 28028
_RAS_SECONDS = 3.0  # that it has to answer; it gives the other machines two
_CONNECT_SECONDS = 0.2
_MOST_LINES = 6
_PROCESS = re.compile(r"\b[Pp]rocess (\d+)\b")


def ask_nccl(loop: Loop, pids: Collection[int], then: Callable[[list[str]], None], port: int = PORT) -> None:
    """Ask the service of this machine, without waiting; `then` is called once, with its lines, if it has any."""
    try:
        asked = socket.create_connection(("127.0.0.1", port), _CONNECT_SECONDS)
        asked.sendall(b"TIMEOUT 2\nSTATUS\n")
    except OSError:
        then([])
        return
    asked.setblocking(False)
    _read(loop, asked, _RAS_SECONDS, lambda data, _: then(problems(data.decode(errors="replace"), pids)))


def problems(status: str, pids: Collection[int]) -> list[str]:
    """The lines of its errors and warnings, if they name one of these processes; the service may be another job's."""
    _, _, found = status.partition("\nErrors\n")
    lines = [line.strip() for line in found.splitlines() if line.strip(" =") and line != "Warnings"]
    return lines[:_MOST_LINES] if any(int(pid) in pids for pid in _PROCESS.findall(found)) else []
