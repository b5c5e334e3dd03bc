"""Code that is too large for ConfigMaps, before it is sent."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import BinaryIO

BLOCK = 1 << 18


@dataclass(frozen=True)
class Packed:
    """Code to be sent.

    Attributes:
        file: its archive (tar.gz).
        size: of it, in bytes.
        sha256: of it, in hexadecimal digits.
    """

    file: BinaryIO
    size: int
    sha256: str

    @property
    def shown_size(self) -> str:
        """The size in words."""
        return f"{self.size / (1 << 20):.1f} MiB"


def packed(file: BinaryIO) -> Packed:
    """The code in an archive."""
    file.seek(0)
    digest, size = hashlib.sha256(), 0
    while data := file.read(BLOCK):
        digest.update(data)
        size += len(data)
    return Packed(file, size, digest.hexdigest())
