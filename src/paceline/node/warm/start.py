"""Starts the agent of a job from a warm server, if one fits."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from typing import TYPE_CHECKING, cast

from . import folder

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path
    from typing import Literal

    from paceline.contract.messages import WarmRecord

    from .messages import Message

_ANSWER_SECONDS = 5.0  # for a server to answer; one that is suspended or starved does not


class WarmAgent:
    """The agent of a job, which a warm server has forked: what is used of `subprocess.Popen`."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._connection = connection

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            poll = select.poll()  # `select` knows no descriptor above 1023
            poll.register(self._connection, select.POLLIN)
            if poll.poll(0):
                self.wait()
        return self.returncode

    def wait(self) -> int:
        """Wait until it has ended; returns its exit code."""
        if self.returncode is None:
            status = folder.receive(self._connection).get("status", int(signal.SIGKILL))  # else it was killed itself
            folder.receive(self._connection)  # its end of the connection closes when it has ended
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def start_agent(
    run: str, env: Mapping[str, str], descriptors: list[int], mask: Collection[int]
) -> tuple[WarmAgent | None, str]:
    """The agent of a settled job, started by a warm server; or None, and why none has started it."""
    where = folder.folder(env.get(folder.HOME))
    if not folder.is_private(where):
        return None, folder.unusable(where)
    reasons = []
    for key in folder.keys(where):
        connection = folder.connect(where, key, _ANSWER_SECONDS)
        if connection is None:
            continue
        answer: Message = {}
        try:
            folder.send(connection, {"do": "start", "run": run, "env": dict(env), "mask": [int(it) for it in mask]})
            answer = folder.receive(connection)
            if "ready" in answer:
                socket.send_fds(connection, [b"go"], descriptors)
                connection.settimeout(None)
                return WarmAgent(answer["ready"], connection), ""
        except OSError as error:
            answer["refused"] = str(error)
        connection.close()
        reasons.append(answer.get("refused", "the warm process does not answer"))
    return None, "; ".join(dict.fromkeys(reasons))


def ask(do: Literal["describe", "stop"], where: Path | None = None) -> list[WarmRecord]:
    """What each warm server of this user answers to "describe" or "stop"; those that do not answer are left out."""
    answers: list[WarmRecord] = []
    where = folder.folder() if where is None else where
    for key in folder.keys(where) if folder.is_private(where) else ():
        connection = folder.connect(where, key, _ANSWER_SECONDS)
        if connection is not None:
            with connection, contextlib.suppress(OSError):
                folder.send(connection, {"do": do})
                if answer := folder.receive(connection):
                    answers.append(cast("WarmRecord", answer))
    return answers
