"""Sends what a node has written of a job, for those who cannot see its disk; a task of srun.

It sends what is there, then, unless it is to end at once, what comes, until the job has ended on this node or its stdin
ends: whoever reads it is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import sys
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.node.rundir.directory import MARKER

from .parcel import OUTPUT, Sender, begun_at

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .folder import Life

OVER = "over"  # a file in the folder of a life: on this node nothing more is written
GATHERED = "gathered"  # a file in the part of another node: it was sent to this node at the end
READERS = "readers"  # a file in the folder of a life, locked by those that send it
DIGEST = f"{OUTPUT} digest"  # beside the sizes of files
_LOOK = 0.3  # seconds between two looks at what has been written
_READ = 20.0  # seconds that the end of a job waits for those that send it
_BEGINNING = 20.0  # seconds until a batch script has made the folder
_NONE = 3  # the exit code if there are no files of the job
_CHUNK = 1 << 18
_GROWING = (".log", ".jsonl", ".out")
_LEFT_OUT = ("lock", "spare", "checkpoints", "users", "followed", READERS, OVER, GATHERED, "complete")


def main(path: str, life: str, mode: str) -> int:
    """Send the files of a life; returns the exit code.

    Args:
        path: the job's folder.
        life: the life; files of others are not sent.
        mode: "follow", "now" for what is there, "all" for that and what other nodes have sent here, "others" for that
            of a node that is not the first, "last" for what is there at the end of the job, after which those that
            follow are waited for.

    The first line of stdin says whose files these are to be, and how much of them is known, see `have`.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # meant for the ranks
        signal.signal(number, signal.SIG_IGN)
    folder = Path(path)
    place = folder / "lives" / life
    known = json.loads(sys.stdin.buffer.readline() or b"{}")
    if not _is_of(folder, known.pop("job_id", ""), 0.0 if mode in ("all", "others") else _BEGINNING):
        print(f"{socket.gethostname()} has no files of the job in {folder} any more", file=sys.stderr, flush=True)
        return _NONE
    place.mkdir(parents=True, exist_ok=True)
    if mode == "last":
        (place / OVER).touch()
    with open(place / READERS, "ab") as readers:
        if mode != "last":
            fcntl.flock(readers, fcntl.LOCK_SH)
        try:
            _Files(folder, life, known, mode).send(follow=mode == "follow")
        except BrokenPipeError:
            os._exit(0)
    if mode == "last":
        wait_for_readers(place)
    return 0


def _is_of(folder: Path, job_id: str, seconds: float) -> bool:
    """Whether a folder is that of a job; a batch script that has just begun is waited for so long."""
    until = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            if (folder / "id").read_text().strip() == job_id:
                return True
        if time.monotonic() >= until:
            return False
        time.sleep(_LOOK)


def wait_for_readers(place: Path, seconds: float = _READ) -> None:
    """Wait until all who send the files of a life have done so."""
    until = time.monotonic() + seconds
    with contextlib.suppress(OSError), open(place / READERS, "ab") as readers:
        while time.monotonic() < until:
            try:
                fcntl.flock(readers, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(_LOOK / 3)


def is_growing(name: str) -> bool:
    """Whether a file is only appended to."""
    return name.endswith(_GROWING) or name == "times"


class _Files:
    """The files of a life on this node, and how much of each the other side has."""

    def __init__(self, folder: Path, life: str, known: Mapping[str, int], mode: str) -> None:
        self._folder, self._place, self._is_all = folder, folder / "lives" / life, mode == "all"
        self._is_seen = (folder / "batch.sh").exists()  # the reader's own folder, which this node sees
        self._sizes = dict(known)
        is_first = os.environ.get("SLURM_PROCID", "0") == "0" and mode not in ("last", "others")
        self._output = folder / OUTPUT if is_first else None  # others may have one of an earlier life
        self._is_other = self._has_other_output()
        self._seen: dict[str, tuple[int, int, int]] = {}
        self._sender = Sender(sys.stdout.buffer, os.environ.get("SLURM_PROCID", "0"))

    def send(self, *, follow: bool) -> None:
        """Send what is there; then, if it is to follow, what comes.

        Raises:
            OSError: nobody reads it any more.
        """
        self._sender.say(tasks=int(os.environ.get("SLURM_STEP_NUM_TASKS") or os.environ.get("SLURM_NTASKS") or 1))
        while True:
            is_over = not follow or self._is_over()  # before the last look
            self._look()
            if is_over:
                break
            self._sender.flush()
            if select.select([0], [], [], _LOOK)[0] and not os.read(0, 4096):
                return
        self._sender.say(end=True)
        self._sender.flush()

    def _has_other_output(self) -> bool:
        """Whether the output that the other side has is that of another node, where the job was before."""
        digest = self._sizes.pop(DIGEST, None)
        if self._output is None or digest is None:
            return False
        size, known = self._sizes.get(OUTPUT, 0), b""
        with contextlib.suppress(OSError), open(self._output, "rb") as file:
            known = file.read(size)
        if len(known) == size and zlib.crc32(known) == digest:
            return False
        self._sizes[OUTPUT] = 0
        return True

    def _is_over(self) -> bool:
        return (self._place / OVER).exists() or (self._place / "outcome.json").exists()

    def _look(self) -> None:
        """Send what is new: logs before what says that they have ended, and the state last."""
        if self._is_seen:
            return
        paths = list(self._paths())
        late = [found for path in paths if not self._is_log(path) for found in self._changed(path)]
        logs = [(path, path.stat().st_size) for path in paths if self._is_log(path)]
        late += [found for path in self._paths() if "/errors/" in str(path) for found in self._changed(path)]
        for name, data, at in sorted((it for it in late), key=lambda it: _order(it[0])):
            if logs and _order(name):
                self._send_logs(logs)
                logs = []
            self._sender.send(name, data, at)
        self._send_logs(logs)

    def _paths(self) -> Iterator[Path]:
        """The files, as far as they can be listed."""
        if self._output is not None and self._output.exists():
            yield self._output
        for where, folders, names in os.walk(self._place):
            if not self._is_all and Path(where).parent == self._place and GATHERED in names:
                folders.clear()
                continue
            folders[:] = [name for name in folders if name not in _LEFT_OUT and not name.startswith(".")]
            for name in names:
                if name == MARKER or (name not in _LEFT_OUT and not name.startswith(".")):
                    yield Path(where, name)

    def _is_log(self, path: Path) -> bool:
        return path.suffix in (".log", ".out")

    def _changed(self, path: Path) -> Iterator[tuple[str, bytes, int | None]]:
        """What is new of a small file: its name, bytes and position."""
        name = str(path.relative_to(self._folder))
        with contextlib.suppress(OSError):
            if is_growing(path.name):
                at = self._sizes.get(name, 0)
                with open(path, "rb") as file:
                    file.seek(at)
                    data = file.read()
                if data or name not in self._sizes:
                    self._sizes[name] = at + len(data)
                    yield name, data, at
                return
            status = path.stat()
            sign = (status.st_ino, status.st_size, status.st_mtime_ns)
            if self._seen.get(name) != sign:
                data = path.read_bytes()
                self._seen[name] = sign
                yield name, data, None

    def _send_logs(self, logs: list[tuple[Path, int]]) -> None:
        for path, size in logs:
            name = str(path.relative_to(self._folder))
            at = self._sizes.get(name, 0)
            if path == self._output and self._is_other:
                self._sender.send(name, b"", 0, is_other=True)
                self._is_other = False
            elif name not in self._sizes:
                self._sender.send(name, b"", 0)
                self._sizes[name] = 0
            with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
                file.seek(at)
                while at < size and (data := file.read(min(_CHUNK, size - at))):
                    self._sender.send(name, data, at)
                    at += len(data)
            self._sizes[name] = max(at, self._sizes[name])


def _order(name: str) -> int:
    """When a file is sent in a look, logs being sent before 1."""
    last = name.rpartition("/")[2]
    if "/errors/" in name:
        return 0
    return {"times": 1, "events.jsonl": 2, "status.json": 4, "outcome.json": 5}.get(last, 3)


def have(folder: Path, life: Life) -> dict[str, Any]:
    """How much is here of the files that only grow, and the digest of what the last first node has printed."""
    printed = b""
    with contextlib.suppress(OSError), open(folder / OUTPUT, "rb") as file:
        file.seek(begun_at(folder))
        printed = file.read()
    found = {OUTPUT: len(printed), DIGEST: zlib.crc32(printed)}
    for path in (folder / "lives" / str(life)).rglob("*"):
        with contextlib.suppress(OSError):
            if is_growing(path.name) and path.is_file():
                found[str(path.relative_to(folder))] = path.stat().st_size
    return found
