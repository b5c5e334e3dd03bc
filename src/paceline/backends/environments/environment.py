"""The packages of a job, wherever they are named; see `source`."""

from __future__ import annotations

import codecs
import hashlib
import os
import re
import zipfile
from typing import TYPE_CHECKING, NamedTuple

from paceline.job.errors import UserError
from paceline.job.paths import jobs_folder

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Literal

    # how `text` is read: as a requirements file, pylock.toml, uv.lock, or environment.yml of conda
    Form = Literal["requirements", "pylock", "uv", "conda"]

_INDEXES = (
    "PIP_INDEX_URL",
    "PIP_EXTRA_INDEX_URL",
    "UV_INDEX_URL",
    "UV_DEFAULT_INDEX",
    "UV_INDEX",
    "UV_EXTRA_INDEX_URL",
)
_URL = re.compile(r"(\w+=)?https?:")  # of an index, which uv may have a name for
_USED = re.compile(r"\$\{([A-Z0-9_]+)\}")  # a variable in a line, as pip and uv read it
_CREDENTIALS = re.compile(r"(?<=://)[^/\s]*@")


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
        """What it is kept under; another index may have other packages of the same names, such as those for CPUs."""
        parts = [self.form, self.text, self.requires, str(self.is_closed), str(self.is_complete)]
        parts += sorted(f"{wheel.name} {_content(wheel, self.source)}" for wheel in self.wheels)
        named = {} if self.is_closed else variables(_CREDENTIALS.sub("", self.text))
        parts += [f"{name}={_CREDENTIALS.sub('', value)}" for name, value in sorted(named.items())]
        return hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()[:16]


def variables(text: str) -> dict[str, str]:
    """The variables that name indexes, or that lines use; those of pip's files are this machine's own."""
    used = {name: os.environ[name] for name in _USED.findall(text) if name in os.environ}
    return {**{name: os.environ[name] for name in _INDEXES if _URL.match(os.environ.get(name, ""))}, **used}


def _content(wheel: Path, source: str) -> str:
    """A digest of what a wheel has; when it was made makes no difference."""
    try:
        with zipfile.ZipFile(wheel) as file:
            parts = sorted(f"{it.filename} {it.CRC} {it.file_size}" for it in file.infolist())
    except (OSError, zipfile.BadZipFile):
        raise UserError(f"--environment {source}: {wheel} is no wheel, or damaged; get it anew") from None
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def sources_folder() -> Path:
    """Where what users have named is kept."""
    return jobs_folder().parent / "environment-sources"


def decoded(data: bytes) -> str:
    """A text in UTF-8, or in UTF-16 as PowerShell writes `pip freeze > requirements.txt`."""
    is_wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return "\n".join(data.decode("utf-16" if is_wide else "utf-8-sig").splitlines())
