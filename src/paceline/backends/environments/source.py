"""What `--environment SOURCE` names, in a form that does not change any more: it is kept under a digest of its content.

It is kept below the user's state folder, so that `resubmit` finds the same packages whatever has happened to SOURCE.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from paceline.job.errors import UserError
from paceline.job.paths import jobs_folder

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Literal

    # how `text` is read: as a requirements file, pylock.toml, uv.lock, or environment.yml of conda
    Form = Literal["requirements", "pylock", "uv", "conda"]

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


class Environment(NamedTuple):
    """The packages of a job."""

    source: str  # as the user calls it
    form: Form
    text: str
    requires: str  # the versions of Python that it is for, as in `requires-python`; "" if it does not say
    wheels: tuple[Path, ...] = ()  # that go along
    is_closed: bool = False  # whether all packages are among them
    is_complete: bool = False  # whether the lines name all packages, also those that others need

    @property
    def digest(self) -> str:
        """What it is kept under."""
        parts = [self.form, self.text, self.requires, str(self.is_closed), str(self.is_complete)]
        parts += sorted(f"{wheel.name} {_hash(wheel)}" for wheel in self.wheels)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    def lines(self, platform: Mapping[str, str]) -> list[str]:
        """The lines of a requirements file, or of environment.yml, for a machine; see `machine/environments.py`."""
        if self.form in ("requirements", "conda"):
            return self.text.splitlines()
        from . import locks

        return locks.lines(self, platform)


def kept(source: str, digest: str | None, folder: Path) -> tuple[Environment, str]:
    """The environment that a user names, and its digest; with a digest, that of a job which has been submitted."""
    if digest is not None:
        return _read(digest, source), digest
    with tempfile.TemporaryDirectory() as made:
        found = _find(source, folder, Path(made))
        digest = found.digest
        place = _place(digest)
        if not (place / _RECORD).exists():
            _keep(found, place)
    return _read(digest, source), digest


def _place(digest: str) -> Path:
    return jobs_folder().parent / "environment-sources" / digest


def _keep(found: Environment, place: Path) -> None:
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".new-") as folder:
        new = Path(folder, "new")
        new.mkdir()
        for wheel in found.wheels:
            shutil.copyfile(wheel, new / wheel.name)
        record = {**found._asdict(), "wheels": [wheel.name for wheel in found.wheels]}
        (new / _RECORD).write_text(json.dumps(record))
        with contextlib.suppress(FileExistsError, OSError):  # another process was faster
            new.rename(place)


def _read(digest: str, source: str) -> Environment:
    place = _place(digest)
    try:
        record = json.loads((place / _RECORD).read_text())
    except (OSError, ValueError):
        raise UserError(
            f"the packages of --environment {source} are not kept here any more ({place}); give --environment again"
        ) from None
    wheels = tuple(place / name for name in record["wheels"])
    return Environment(**{**record, "wheels": wheels})


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


def decoded(data: bytes) -> str:
    """A text in UTF-8, or in UTF-16 as PowerShell writes `pip freeze > requirements.txt`."""
    is_wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return "\n".join(data.decode("utf-16" if is_wide else "utf-8-sig").splitlines())


def _lock(source: str, form: Form, text: str) -> Environment:
    """A lock, once it has been read for this machine."""
    from paceline.node.machine.environments import platform_here

    from . import locks

    requires = str(locks.toml(text, source).get("requires-python", ""))
    found = Environment(source, form, text, requires, is_complete=True)
    locks.lines(found, {**platform_here(), "version": platform.python_version()})
    return found


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while data := file.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()
