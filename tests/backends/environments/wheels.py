"""Wheels of small distributions, made without a build backend."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def wheel(
    folder: Path, name: str, version: str = "1.0", needs: tuple[str, ...] = (), tag: str = "py3-none-any"
) -> Path:
    """Write a wheel whose module `name` has its version, and whose command `say-NAME` prints it; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path, info = folder / f"{name}-{version}-{tag}.whl", f"{name}-{version}.dist-info"
    metadata = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    files = {
        f"{name}.py": f"VERSION = {version!r}\ndef main():\n    print({name!r}, VERSION)\n",
        f"{info}/METADATA": "\n".join([*metadata, *(f"Requires-Dist: {it}" for it in needs), ""]),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: {tag}\n",
        f"{info}/entry_points.txt": f"[console_scripts]\nsay-{name} = {name}:main\n",
    }
    rows = [f"{it},sha256={_hash(text)},{len(text)}" for it, text in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""])
    with zipfile.ZipFile(path, "w") as file:
        for it, text in files.items():
            file.writestr(it, text)
    return path


def _hash(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
