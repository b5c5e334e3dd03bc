"""Packs what a node needs of paceline into one file that Python can run (`python3 FILE agent …`)."""

from __future__ import annotations

import functools
import hashlib
import io
import zipfile
from pathlib import Path
from typing import NamedTuple

_ROOMS = ("contract", "node", "train", "horovod")
_MAIN = b"from paceline.node.__main__ import main\n\nmain()\n"


class Archive(NamedTuple):
    """A zip archive; its name contains the hash of its contents."""

    name: str
    data: bytes


@functools.lru_cache(maxsize=1)
def archive() -> Archive:
    """The package without its client rooms; the same files give the same bytes."""
    package = Path(__file__).parents[1]
    files = [
        package / "__init__.py",
        package / "_version.py",
        *(path for room in _ROOMS for path in (package / room).rglob("*.py")),
    ]
    contents = {f"paceline/{path.relative_to(package).as_posix()}": path.read_bytes() for path in sorted(files)}
    contents["__main__.py"] = _MAIN
    digest = hashlib.sha256()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as packed:
        for name, data in contents.items():
            digest.update(b"%s\0%d\0" % (name.encode(), len(data)) + data)
            packed.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    return Archive(f"paceline-{digest.hexdigest()[:16]}.pyz", buffer.getvalue())
