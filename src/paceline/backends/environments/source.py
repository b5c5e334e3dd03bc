"""What `--environment SOURCE` names, in a form that does not change any more: it is kept under a digest of its content.

It is kept below the user's state folder, so that `resubmit` finds the same packages whatever has happened to SOURCE.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.job.errors import UserError

from .environment import Environment, decoded, sources_folder

if TYPE_CHECKING:
    from .environment import Form

_RECORD = "source.json"
# What a project has, the most exact first.
_USUAL = (
    "uv.lock",
    "pylock.toml",
    "environment.yml",
    "environment.yaml",
    "requirements.txt",
    "pyproject.toml",
    ".venv",
)
_KINDS = "uv.lock, pylock.toml, requirements.txt, pyproject.toml, environment.yml, a folder of wheels or a .venv"


def kept(source: str, digest: str | None, folder: Path) -> tuple[Environment, str]:
    """The environment that a user names, and its digest; with a digest, that of a job which has been submitted."""
    if digest is not None:
        found = _read(digest, source)
        return found if source == "auto" else found._replace(source=source), digest
    with tempfile.TemporaryDirectory() as made:
        try:
            found = _find(source, folder, Path(made))
            digest = found.digest
            place = _place(digest)
            if not (place / _RECORD).exists():
                _keep(found, place)
        except OSError as error:
            raise UserError(
                f"--environment {source}: {error.filename}: {error.strerror}; make room there, or set PACELINE_HOME"
            ) from None
    return _read(digest, source)._replace(source=found.source), digest


def _place(digest: str) -> Path:
    return sources_folder() / digest


def _keep(found: Environment, place: Path) -> None:
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".new-") as folder:
        new = Path(folder, "new")
        new.mkdir()
        for wheel in found.wheels:
            _link(wheel, new / wheel.name)
        record = {**found._asdict(), "wheels": [wheel.name for wheel in found.wheels]}
        (new / _RECORD).write_text(json.dumps(record))
        with contextlib.suppress(FileExistsError, OSError):  # another process was faster
            new.rename(place)


def _link(wheel: Path, to: Path) -> None:
    """Keep a wheel; one that lies here already, made of an installed distribution, takes no space again."""
    if sources_folder() in wheel.parents:
        with contextlib.suppress(OSError):  # some file systems have no such links
            to.hardlink_to(wheel)
            return
    shutil.copyfile(wheel, to)


def _read(digest: str, source: str) -> Environment:
    place = _place(digest)
    try:
        record = json.loads((place / _RECORD).read_text())
    except (OSError, ValueError):
        raise UserError(
            f"the packages of --environment {source} are not kept here any more ({place}); give --environment again"
        ) from None
    with contextlib.suppress(OSError):
        os.utime(place)  # it counts as used now
    wheels = tuple(place / name for name in record["wheels"])
    return Environment(**{**record, "wheels": wheels})


def sources() -> list[tuple[str, str, int, float]]:
    """What is kept here: its digest, what the user called it, its bytes, and when it was used last."""
    found = []
    for place in sources_folder().glob("[!.]*"):
        with contextlib.suppress(OSError, ValueError, KeyError):  # another process deletes it
            source = json.loads((place / _RECORD).read_text())["source"]
            size = sum(path.stat().st_size for path in place.iterdir())
            found.append((place.name, str(source), size, place.stat().st_mtime))
    return found


def forget(digest: str) -> bool:
    """Delete what is kept under a digest; returns whether it is gone."""
    shutil.rmtree(_place(digest), ignore_errors=True)
    return not _place(digest).exists()


def _find(source: str, folder: Path, made: Path) -> Environment:
    """Read what a user names; wheels that are made go into the folder `made`."""
    from . import installed, requirements

    if source == "here":
        return installed.of(sys.executable, source, made)
    if source == "auto":
        name = next((it for it in _USUAL if (folder / it).exists()), None)
        if name is None:
            raise UserError(f"--environment auto: {folder} has none of {', '.join(_USUAL)}; name a file or folder")
        source = name
    path = folder / os.path.expanduser(source)
    if not path.exists():
        raise UserError(f"--environment {source}: no such file or folder; name {_KINDS}, or here or auto")
    if path.is_dir():
        if (path / "pyvenv.cfg").exists():
            return installed.of(str(path / "bin/python"), source, made)
        wheels = tuple(sorted(path.glob("*.whl")))
        if wheels:
            return requirements.of_wheels(source, wheels)
        raise UserError(
            f"--environment {source}: the folder has no wheels and is no virtual environment; name {_KINDS}"
        )
    text = _text(path, source)
    if path.suffix == ".lock":
        return _lock(source, "uv", text)
    if path.suffix == ".toml" and path.name.startswith("pylock"):
        return _lock(source, "pylock", text)
    if path.suffix == ".toml":
        return requirements.of_project(source, text)
    if path.suffix in (".yml", ".yaml"):
        return Environment(source, "conda", text, "")
    return requirements.of_file(source, path, made)


def _text(path: Path, source: str) -> str:
    try:
        return decoded(path.read_bytes())
    except (OSError, UnicodeDecodeError) as error:
        why = "is no text" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise UserError(f"--environment {source}: {why}; name {_KINDS}") from None


def _lock(source: str, form: Form, text: str) -> Environment:
    """A lock, once it has been read for this machine."""
    from paceline.node.machine.environments import platform_here

    from . import locks

    requires = str(locks.toml(text, source).get("requires-python", ""))
    found = Environment(source, form, text, requires, is_complete=True)
    locks.lines(found, {**platform_here(), "version": platform.python_version()})
    return found
