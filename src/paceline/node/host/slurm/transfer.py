"""The step of srun that sends what the nodes of a job have written, and what is here of that.

One process of this machine brings the files of a job at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from paceline.node import ENTRY
from paceline.node.store import records

from .commands import batch_environment, found
from .parcel import Receiver
from .sender import have

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .folder import JobFolder, Life

SECONDS = 30.0  # that a step may take
_LOOK = 0.5
_LAST_WORDS = 20.0  # seconds for which something else may hold the errors of a step that has ended
COMPLETE = "complete"  # a file in the folder of a life: all that the nodes have of it is here
# The node may not have what this is to run yet: its batch script has just begun.
_WHEN_THERE = (
    'i=0; while [ ! -e "$2" ] && [ "$i" -lt 100 ]; do i=$((i+1)); sleep 0.2; done; [ -e "$2" ] || exit 9; exec "$@"'
)


def program(folder: JobFolder) -> list[str]:
    """What runs paceline's node side on the nodes of a job: they have what was sent to them when it was submitted."""
    found = folder.read().get("program")
    return list(found) if found else [sys.executable, ENTRY]


def command(folder: JobFolder, life: Life, mode: str, *srun: str) -> list[str]:
    """The step that sends what nodes have of a life; see `sender.main`."""
    task = ["sh", "-c", _WHEN_THERE, "sh", *program(folder), "slurm-send", str(folder.path), str(life), mode]
    return [found("srun"), *srun, "--chdir=/", "--cpu-bind=none", "--kill-on-bad-exit=0", "--quiet", *task]


def pull(folder: JobFolder, life: Life, argv: Sequence[str], lifeline: Lifeline | None = None, **options: Any) -> str:
    """Run a step that sends files, and write these; returns why that did not work, or "".

    Args:
        folder: of the job.
        life: of it.
        argv: the step.
        lifeline: ends it; without it, it ends after `seconds`.
        options: `env` of the step; `seconds` that it may take.
    """
    known = {"job_id": folder.read()["job_id"], **have(folder.path, life)}
    receiver = Receiver(folder.path, tuple(records.FINAL))
    process = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        env=options.get("env") or batch_environment({}, None),
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    said: list[bytes] = []
    reader = threading.Thread(target=lambda: said.append(process.stderr.read()), daemon=True)  # type: ignore[union-attr]
    reader.start()
    timer = threading.Timer(options.get("seconds", SECONDS), _kill, [process])
    if lifeline is None:
        timer.start()
    else:
        lifeline.holds(process)
    try:
        with contextlib.suppress(BrokenPipeError, ValueError):  # it has ended, or the lifeline is cut
            process.stdin.write(json.dumps(known).encode() + b"\n")
            process.stdin.flush()
            if lifeline is None:
                process.stdin.close()
        for line in process.stdout:
            receiver.add(line)
        receiver.close()
    finally:
        timer.cancel()
        code = process.wait()
        reader.join(_LAST_WORDS)
    if receiver.tasks and receiver.ended >= receiver.tasks:
        if folder.outcome(life) is not None:
            (folder.of(life) / COMPLETE).touch()
        return ""
    lines = b"".join(said).decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"srun ended with {code}"


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a step and all that it has started here, which may hold its output."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class Lifeline:
    """Ends the step that it holds when it is cut."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self.is_cut = threading.Event()

    def holds(self, process: subprocess.Popen[bytes]) -> None:
        """Take a step; it ends at once if this is cut already."""
        with self._lock:
            self._process = process
        if self.is_cut.is_set():
            self.cut()

    def cut(self) -> None:
        """End the step."""
        with self._lock:
            self.is_cut.set()
            if self._process is not None and self._process.stdin is not None:
                with contextlib.suppress(OSError):
                    self._process.stdin.close()  # those who send see it


@contextlib.contextmanager
def alone(folder: JobFolder, seconds: float = 0.0) -> Iterator[bool]:
    """Whether no other process or thread of this machine brings the files of a job; it is waited for so long."""
    try:
        fd = os.open(folder.path / "mirror.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:  # it was removed
        yield False
        return
    try:
        yield _locked(fd, seconds)
    finally:
        os.close(fd)


def _locked(fd: int, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(_LOOK / 5)
        except OSError:  # a file system without locks
            return True
