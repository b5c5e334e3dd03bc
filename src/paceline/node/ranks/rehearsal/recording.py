"""The record of a rank, the line of the script that is at work, and the files that the rank opens."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

from paceline.contract.rehearsal import SAVED
from paceline.node.watching.typical import is_of_user

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import FrameType

_PROGRAM = os.path.join(os.path.dirname(os.path.dirname(__file__)), "program.py")
_NO_DATA = (".py", ".pyc", ".so", ".pyi", ".lock", ".egg-link", ".pth")


class Record:
    """What this rank does, a line for each event; a kill loses none of them."""

    def __init__(self, folder: str) -> None:
        """Begin the file."""
        self.folder = folder
        self.rank, self.local_rank, self.world, self.attempt = (
            int(os.environ[f"PACELINE_{name}"]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "ATTEMPT")
        )
        self.clock = 0  # how many collectives and steps there were: between two, a file is noted once
        self._pid = os.getpid()
        path = os.path.join(folder, f"{self.attempt}-{self.rank}.jsonl")
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._is_own: dict[str, bool] = {}
        self._is_noting = False
        self._opened: set[tuple[str, str, int]] = set()
        run = os.environ.get("PACELINE_RUN_DIR", "")
        roots = (sys.prefix, sys.base_prefix, "/proc", "/sys", "/dev", "/etc", "/usr", folder, run)
        self._elsewhere = tuple(os.path.join(os.path.realpath(it), "") for it in roots if it)

    @property
    def is_rank(self) -> bool:
        """Whether this process is the rank, and no child of it."""
        return os.getpid() == self._pid

    def note(self, what: str, **facts: Any) -> None:
        """Add a line."""
        os.write(self._file, json.dumps({"e": what, **facts}).encode() + b"\n")

    def where(self, frame: FrameType | None = None) -> str:
        """FILE:LINE of the script that is at work in this thread; "" if none is."""
        frame = frame or sys._getframe(1)
        while frame is not None:
            file = frame.f_code.co_filename
            if file == _PROGRAM:
                return ""
            if file not in self._is_own:
                self._is_own[file] = is_of_user(file)
            if self._is_own[file]:
                return f"{os.path.abspath(file)}:{frame.f_lineno}"
            frame = frame.f_back
        return ""

    # -- files ---------------------------------------------------------------------------------------------------------

    def watch_files(self) -> None:
        """Record files of the user's that are opened; what C code opens itself is not seen."""
        sys.addaudithook(self._audit)

    def _audit(self, event: str, args: Any) -> None:
        if self._is_noting:  # what this does itself
            return
        try:
            if event == "open":
                path, mode, flags = args
                if isinstance(path, (str, bytes)):
                    self.opened(os.fsdecode(path), _kind(mode, flags))
            elif event == "os.rename":
                self.opened(os.fsdecode(args[1]), "write")
        except Exception:  # a path of another kind; the script goes on
            return

    def opened(self, path: str, kind: str) -> None:
        """Note that a file is read or written, once for each kind between two collectives."""
        path = os.path.abspath(path)
        if (
            path.startswith(self._elsewhere)
            or f"-packages{os.sep}" in path
            or path.endswith(_NO_DATA)
            or _is_cache(path)
            or os.path.isdir(path)  # `tempfile` opens the folder of a file that gets a name of its own
        ):
            return
        key = (path, kind, self.clock)
        if key in self._opened or len(self._opened) >= 1000:
            return
        self._opened.add(key)
        self._is_noting = True
        try:
            at = self.where(sys._getframe(1))
        finally:
            self._is_noting = False
        if at:
            self.note("file", path=path, kind=kind, at=at, child=not self.is_rank,
                      existed=os.path.exists(path))  # fmt: skip

    def saved(self) -> None:
        """Note that a state was saved, for all ranks."""
        os.close(os.open(os.path.join(self.folder, SAVED), os.O_WRONLY | os.O_CREAT, 0o600))


def _kind(mode: str | None, flags: int) -> str:
    """How a file is opened; several ranks may append to one, or try who makes it first."""
    if flags & os.O_ACCMODE == os.O_RDONLY:
        return "read"
    if flags & (os.O_EXCL | os.O_APPEND) or (mode or "").startswith(("a", "x")):
        return "append"
    return "write" if flags & os.O_TRUNC or (mode or "").startswith("w") else "change"


def _is_cache(path: str) -> bool:
    """Whether a file is one of a hidden folder at home, or of a temporary folder of a library."""
    home = os.path.expanduser("~")
    inner = os.path.relpath(path, home) if path.startswith(home + os.sep) else ""
    temporary = path.startswith(os.path.join(os.environ.get("TMPDIR", "/tmp"), "torch"))
    return inner.startswith(".") or temporary or f"{os.sep}__pycache__{os.sep}" in path


def facts_of(tensor: Any) -> Mapping[str, Any]:
    """Shape and type of a tensor, or of the first of several."""
    first = tensor[0] if isinstance(tensor, (list, tuple)) and tensor else tensor
    if not hasattr(first, "shape") or not hasattr(first, "dtype"):
        return {}
    return {"shape": list(first.shape), "dtype": str(first.dtype).replace("torch.", "")}
