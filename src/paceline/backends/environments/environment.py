"""The packages of a job, wherever they are named; see `source`."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Literal

    # how `text` is read: as a requirements file, pylock.toml, uv.lock, or environment.yml of conda
    Form = Literal["requirements", "pylock", "uv", "conda"]


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


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while data := file.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()
