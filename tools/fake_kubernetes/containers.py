"""One run of a container: from its specification to its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import defaults, machine

if TYPE_CHECKING:
    from .errors import Object
    from .logs import Log

_SANDBOX = Path(__file__).with_name("sandbox.py")
_ROOM = 4096  # bytes of a termination message


class Container:
    """A process with its own files, pids and host name; must be made in the thread of the event loop."""

    def __init__(self, folder: Path, log: Log, spec: Object, message: Path, fall_back: bool) -> None:
        self.id = f"containerd://{uuid.uuid4().hex}"
        self.log = log
        self.pid: int | None = None  # of its first process
        self.env: dict[str, str] = spec["env"]
        self.cwd: str = spec["cwd"]
        self.ended = asyncio.Event()
        self.started = asyncio.Event()  # or it could not
        self.code: int | None = None
        self.cpus = 0.0  # that it uses
        self.measured: tuple[float, float] | None = None  # when that was, and its CPU seconds then
        self.reason = ""  # of its end, where it is not its own
        self.begun = self.finished = ""
        self._error = ""
        self._message, self._fall_back = message, fall_back
        folder.mkdir(parents=True, exist_ok=True)
        self._scratch = folder / f"root-{uuid.uuid4().hex[:6]}"
        self._scratch.mkdir()
        message.write_bytes(b"")
        message.chmod(0o666)
        self._spec = {**spec, "scratch": str(self._scratch), "starter": os.getpid()}

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        path = self._scratch.with_suffix(".json")
        path.write_text(json.dumps(self._spec))
        read_status, write_status = os.pipe()
        read_output, write_output = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-IS", str(_SANDBOX), str(path), str(write_status)],
            stdin=subprocess.DEVNULL, stdout=write_output, stderr=write_output, pass_fds=[write_status],
            env={"PATH": os.environ["PATH"], machine.MARK: self._spec["mark"]},
        )  # fmt: skip
        os.close(write_status)
        os.close(write_output)
        self._open = {read_status, read_output}
        self._lines = b""
        for fd, receive in ((read_status, self._status), (read_output, self.log.write)):
            os.set_blocking(fd, False)
            loop.add_reader(fd, self._receive, fd, receive)

    def _receive(self, fd: int, receive: Any) -> None:
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return
        if data:
            receive(data)
            return
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)
        self._open.discard(fd)
        if not self._open:
            self._finish()

    def _status(self, data: bytes) -> None:
        *lines, self._lines = (self._lines + data).split(b"\n")
        for line in lines:
            word, _, rest = line.decode().partition(" ")
            if word == "pid":
                self.pid = int(rest)
                self.begun = defaults.now()
            elif word == "started" and not self._error:
                self.started.set()
            elif word == "error":
                self._error = self._error or rest
            elif word == "exit":
                code = int(rest)
                self.code = 128 - code if code < 0 else code
                self.pid = None

    def _finish(self) -> None:
        with contextlib.suppress(OSError):
            self._process.wait()
        self.finished = defaults.now()
        if self.code is None:
            self.code = 128 if self._error else 137
        if self._error and self.code == 128:
            self.reason = "StartError"
        self.log.end()
        with contextlib.suppress(OSError):
            self._scratch.with_suffix(".json").unlink(missing_ok=True)
            self._scratch.rmdir()
        self.started.set()
        self.ended.set()

    def kill(self, number: int = signal.SIGKILL, reason: str = "") -> None:
        """Send its first process a signal; SIGKILL ends all of it."""
        self.reason = reason or self.reason
        with contextlib.suppress(ProcessLookupError):
            if self.pid is not None:
                os.kill(self.pid, number)
            elif number == signal.SIGKILL and not self.ended.is_set():
                self._process.kill()

    def state(self) -> Object:
        """As a pod's status shows it."""
        if not self.ended.is_set():
            return {"running": {"startedAt": self.begun}} if self.started.is_set() else {}
        state: Object = {"exitCode": self.code, "reason": self.reason or ("Completed" if self.code == 0 else "Error")}
        message = self._words()
        if message:
            state["message"] = message
        begun = "1970-01-01T00:00:00Z" if self.reason == "StartError" else self.begun or self.finished
        return {"terminated": {**state, "startedAt": begun, "finishedAt": self.finished, "containerID": self.id}}

    def _words(self) -> str:
        if self.reason == "StartError":
            start = "failed to create containerd task: failed to create shim task: OCI runtime create failed"
            return f"{start}: runc create failed: unable to start container process: {self._error}: unknown"
        text = self._message.read_bytes()[:_ROOM].decode(errors="replace")
        if not text and self._fall_back and self.code:
            text = self.log.tail(2048)
        return text
