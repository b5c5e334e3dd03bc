"""Files that travel over the output of srun: how they are cut into lines on a node, and put together elsewhere.

srun mixes the output of its tasks line by line, and keeps lines whole that are shorter than 1024 bytes. So each line
has the number of its task, and a piece of that task's compressed stream. In the stream an object in a line comes before
the bytes of a file: its `path` in the job's folder, and `at`, from where on it has grown; a file without that is
replaced. What batch scripts print is a file on each first node that the job has had; here one follows the other.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import zlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import BinaryIO

OUTPUT = "slurm.out"
_BEGUN = ".slurm.out.begun"  # beside it, where it was put together: from where on it is that of the last first node
_PIECE = 720  # bytes; 960 in base64
_PLACE = re.compile(r"slurm\.out|lives(/[\w.+-]+)+")  # what a node may send


class Sender:
    """Writes files to a stream of lines."""

    def __init__(self, out: BinaryIO, task: str) -> None:
        """Nothing is sent yet.

        Args:
            out: where the lines go.
            task: the number of this task.
        """
        self._out, self._head = out, f"{task} ".encode()
        self._pack = zlib.compressobj()
        self._rest = b""

    def say(self, **what: Any) -> None:
        """Send an object without a file."""
        self._add(json.dumps(what).encode() + b"\n")

    def send(self, path: str, data: bytes, at: int | None = None, *, is_other: bool = False) -> None:
        """Send a file, or what it has grown by; `is_other`: it is that of another node than what there is."""
        more = {**({} if at is None else {"at": at}), **({"other": True} if is_other else {})}
        self.say(path=path, bytes=len(data), **more)
        self._add(data)

    def flush(self) -> None:
        """Let all arrive that was sent.

        Raises:
            OSError: nobody reads it any more.
        """
        self._put(self._rest + self._pack.flush(zlib.Z_SYNC_FLUSH), is_all=True)
        self._out.flush()

    def _add(self, data: bytes) -> None:
        self._put(self._rest + self._pack.compress(data), is_all=False)

    def _put(self, data: bytes, *, is_all: bool) -> None:
        end = len(data) if is_all else len(data) - len(data) % _PIECE
        for start in range(0, end, _PIECE):
            self._out.write(self._head + base64.b64encode(data[start : min(end, start + _PIECE)]) + b"\n")
        self._rest = data[end:]


class _Stream:
    """What one task has sent."""

    def __init__(self) -> None:
        self._unpack = zlib.decompressobj()
        self._data = b""
        self._head: dict[str, Any] | None = None

    def add(self, piece: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
        """The objects that are complete now, each with the bytes of its file."""
        self._data += self._unpack.decompress(base64.b64decode(piece))
        while True:
            if self._head is None:
                line, newline, rest = self._data.partition(b"\n")
                if not newline:
                    return
                self._head, self._data = json.loads(line), rest
            size = int(self._head.get("bytes", 0))
            if len(self._data) < size:
                return
            head, self._head = self._head, None
            data, self._data = self._data[:size], self._data[size:]
            yield head, data


class Receiver:
    """Writes what the tasks of one srun send into the folder of a job.

    That a node or the job has ended is written at the end, when there is nothing left to come: who sees it need not
    look for more.

    Attributes:
        ended: how many tasks have sent all that there will be.
        tasks: how many there are; 0 if that is not known yet.
    """

    def __init__(self, folder: Path, final: tuple[str, ...]) -> None:
        """Nothing is written yet.

        Args:
            folder: of the job.
            final: the states of a node that has ended.
        """
        self._folder, self._final = folder, final
        self._streams: dict[bytes, _Stream] = {}
        self._held: dict[str, bytes] = {}
        self.ended, self.tasks = 0, 0

    def add(self, line: bytes) -> None:
        """Take a line of srun's output; other lines than those of the tasks are passed over.

        Raises:
            OSError: it cannot be written.
        """
        task, space, piece = line.strip().partition(b" ")
        if not space or not task.isdigit():
            return
        try:
            found = list(self._streams.setdefault(task, _Stream()).add(piece))
        except (ValueError, zlib.error):  # it is no piece
            return
        for head, data in found:
            self.tasks = int(head.get("tasks", self.tasks))
            self.ended += bool(head.get("end"))
            if "path" in head and _PLACE.fullmatch(head["path"]) and ".." not in head["path"].split("/"):
                self._take(head["path"], data, head.get("at"), is_other=bool(head.get("other")))

    def _take(self, path: str, data: bytes, at: int | None, *, is_other: bool) -> None:
        if path == OUTPUT:
            if is_other:
                end = (self._folder / OUTPUT).stat().st_size if (self._folder / OUTPUT).exists() else 0
                write(self._folder / _BEGUN, str(end).encode(), None)
            at = (at or 0) + begun_at(self._folder)
        name = path.rpartition("/")[2]
        if name == "outcome.json" or (name == "status.json" and self._is_final(data)):
            self._held[path] = data
            return
        self._held.pop(path, None)
        write(self._folder / path, data, at)

    def _is_final(self, data: bytes) -> bool:
        with contextlib.suppress(ValueError, AttributeError):
            return json.loads(data).get("state") in self._final
        return False

    def close(self) -> None:
        """Write what was held back: nodes first, then the job.

        Raises:
            OSError: it cannot be written.
        """
        for path in sorted(self._held, key=lambda path: path.endswith("outcome.json")):
            write(self._folder / path, self._held[path], None)
        self._held.clear()


def begun_at(folder: Path) -> int:
    """From where on the output in a folder is that of the job's last first node."""
    with contextlib.suppress(OSError, ValueError):
        return int((folder / _BEGUN).read_text())
    return 0


def write(path: Path, data: bytes, at: int | None) -> None:
    """Write a file, or what it has grown by from a position on.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if at is not None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            left = memoryview(data)
            while left:
                done = os.pwrite(fd, left, at)
                left, at = left[done:], at + done
        finally:
            os.close(fd)
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(data)
    temporary.chmod(0o600)
    temporary.replace(path)
