"""Packs what a node needs of paceline into one file that Python can run (`python3 FILE agent …`)."""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import threading
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_ROOMS = ("contract", "node", "train", "horovod")
_MAIN = b"""\
import sys

if sys.version_info < (3, 9):
    found = sys.executable + " is Python " + ".".join(map(str, sys.version_info[:3]))
    sys.exit("paceline: " + found + ", too old; choose an image or a Python with 3.9 or newer")
from paceline.node.__main__ import main

main()
"""


_once = threading.Lock()  # of many threads that need it, one makes it


class Archive:
    """A zip archive of these files.

    Attributes:
        name: it contains the hash of the files.
    """

    def __init__(self, contents: Mapping[str, bytes]) -> None:
        """Only hash the files: most hosts have the archive already, and to compress them takes long."""
        self._contents = contents
        digest = hashlib.sha256()
        for name, data in contents.items():
            digest.update(b"%s\0%d\0" % (name.encode(), len(data)) + data)
        self.name = f"paceline-{digest.hexdigest()[:16]}.pyz"

    @property
    def data(self) -> bytes:
        """The archive."""
        with _once:
            return self._packed

    @functools.cached_property
    def _packed(self) -> bytes:
        return self._zipped(zipfile.ZIP_DEFLATED)

    @property
    def solid(self) -> bytes:
        """The archive in gzip, which is a quarter smaller: its files are compressed together."""
        return gzip.compress(self._zipped(zipfile.ZIP_STORED), 5, mtime=0)

    def _zipped(self, compression: int) -> bytes:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as packed:
            for name, data in self._contents.items():
                packed.writestr(zipfile.ZipInfo(name), data, compression)
        return buffer.getvalue()


def archive() -> Archive:
    """The package without its client rooms; the same files give the same bytes."""
    with _once:
        return _archive()


@functools.lru_cache(maxsize=1)
def _archive() -> Archive:
    package = Path(__file__).parents[1]
    files = [
        package / "__init__.py",
        package / "_version.py",
        *(path for room in _ROOMS for path in (package / room).rglob("*.py")),
    ]
    contents = {f"paceline/{path.relative_to(package).as_posix()}": path.read_bytes() for path in sorted(files)}
    return Archive({**contents, "__main__.py": _MAIN})
