"""Folders of jobs as released versions have written them: later versions have to read them.

    python -m tests.stable.written     # writes written/VERSION.tar.gz; `make release` asks for it

A job of two ranks that has succeeded, with its checkpoint, and one that has failed twice.
"""

from __future__ import annotations

import io
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import paceline

if TYPE_CHECKING:
    from collections.abc import Callable

FOLDER = Path(__file__).with_name("written")
SCRIPT = Path(__file__).with_name("train.py")
VERSIONS = sorted(path.name.removesuffix(".tar.gz") for path in FOLDER.iterdir())
_PLACE, _HOST = "/home/you/project", "node1"  # in the place of where and on what machine they were written


def _replaced(data: bytes, *pairs: tuple[str, str]) -> bytes:
    for old, new in pairs:
        data = data.replace(old.encode(), new.encode())
    return data


def _copied(source: tarfile.TarFile, there: tarfile.TarFile, change: Callable[[bytes], bytes]) -> None:
    for it in source:
        file = source.extractfile(it) if it.isfile() else None
        data = b"" if file is None else file.read()
        if not it.name.endswith(".pt"):
            data = change(data)
        it.name = it.name.replace(f".{socket.gethostname()}.", f".{_HOST}.")
        it.size, it.uid, it.gid, it.uname, it.gname = len(data), 0, 0, "", ""
        there.addfile(it, io.BytesIO(data))


def unpack(version: str, project: Path) -> Path:
    """Put the jobs into a project's folder as if they had been written there; returns the home of paceline."""
    packed = io.BytesIO()
    with tarfile.open(FOLDER / f"{version}.tar.gz") as source, tarfile.open(fileobj=packed, mode="w") as there:
        _copied(source, there, lambda data: _replaced(data, (_PLACE, str(project))))
    packed.seek(0)
    with tarfile.open(fileobj=packed) as there:
        there.extractall(project)
    return project / "home"


def write() -> None:
    """Run the jobs and pack their folders."""
    with tempfile.TemporaryDirectory() as name:
        project = Path(name)
        shutil.copy(SCRIPT, project)
        env = {**os.environ, "PACELINE_HOME": str(project / "home"), "CUDA_VISIBLE_DEVICES": ""}
        run = [sys.executable, "-m", "paceline", "run", "-n", "2"]
        subprocess.run([*run, "--name", "done", "train.py", "2"], cwd=project, env=env, check=True)
        failing = [*run, "--name", "failed", "--max-restarts", "1", "train.py", "2", "fail"]
        assert subprocess.run(failing, cwd=project, env=env, check=False).returncode == 1
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as source:
            source.add(project, ".")
        packed.seek(0)
        root = str(Path(paceline.__file__).parents[1])
        pairs = (name, _PLACE), (root, "/usr/lib/python3/site-packages"), (f'"{socket.gethostname()}"', f'"{_HOST}"')
        out = FOLDER / f"{paceline.__version__}.tar.gz"
        with tarfile.open(fileobj=packed) as source, tarfile.open(out, "w:gz") as there:
            _copied(source, there, lambda data: _replaced(data, *pairs))


if __name__ == "__main__":
    write()
