"""The frames of a process that cannot say them itself: py-spy reads them from outside, if it is installed here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Any, Callable

if TYPE_CHECKING:
    from paceline.contract.stands import Thread
    from paceline.node.eventloop.loop import Loop

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
            threads = [_thread(it) for it in sorted(json.loads(self._text), key=self._is_other)]
        except (ValueError, LookupError, TypeError, AttributeError):  # an error, in words
            self._errors.seek(0)
            if b"ermission" in self._errors.read():
                problem = "may not look at it (ptrace is not permitted)"
        self._errors.close()
        self._then(threads, "" if threads else f"{_PROGRAM} {problem}")

    def _is_other(self, thread: Any) -> bool:
        return bool(thread["os_thread_id"] != self._pid)


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
