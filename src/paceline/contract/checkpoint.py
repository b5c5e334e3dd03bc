"""How checkpoints lie on a disk, as far as it is known without torch: their names, and the manifest with its checksums.

docs/checkpoints-format.md describes the format. `train/checkpoint/disk_format.py` writes it; a machine that sends a
checkpoint to another one, or gets one, needs no torch.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

FORMAT = 1
MANIFEST = "manifest.json"
NAME = re.compile(r"step-(\d{6,})(-\d+)?")
STATE_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.pt")
_OF_RANK = re.compile(r"(rank|shard)-\d+\.pt")
MARKER = ".paceline-saving"  # in a folder that is being written: says that paceline made it
MARK = b"A checkpoint that paceline has begun to write.\n"
CHUNK = 8 * 1024 * 1024  # bytes read at once


class FileRecord(TypedDict):
    """What a manifest says of a file."""

    size: int
    crc32: str


class Listing(TypedDict):
    """What a manifest says of its checkpoint: this, and more."""

    id: str
    serial: int
    step: int
    world_size: int
    saved_at: str
    weights_only: bool
    files: dict[str, FileRecord]


def temporary_name(folder: Path, step: int, checkpoint: str) -> Path:
    """The folder in which a checkpoint with this id is written until it gets its name."""
    return folder / f".saving-step-{step:06d}-{checkpoint[:8]}"


def crc_of_json(value: object) -> str:
    """The checksum of a value in JSON."""
    return f"{zlib.crc32(json.dumps(value, sort_keys=True).encode()):08x}"


def listing(path: Path) -> Listing | None:
    """What the manifest in a folder says; None if it is damaged, missing, or of a format that is not known here."""
    try:
        whole = json.loads((path / MANIFEST).read_bytes())
        crc = whole.pop("crc32")
        found: Listing = whole["checkpoint"]
        is_valid = (
            crc == crc_of_json(whole) and whole["version"] == FORMAT and all(map(STATE_FILE.fullmatch, found["files"]))
        )
        numbers = [found["serial"], found["step"], *(it["size"] for it in found["files"].values())]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    is_valid = is_valid and re.fullmatch(r"[0-9a-f]{32}", str(found["id"])) is not None
    return found if is_valid and all(isinstance(number, int) for number in numbers) else None


def newest_first(folder: Path) -> Iterator[tuple[Path, Listing]]:
    """The checkpoints of a folder that have a valid manifest, and what it says; their files may be damaged."""
    try:
        paths = [path for path in folder.iterdir() if NAME.fullmatch(path.name)]
    except OSError:
        return
    found = [(path, manifest) for path in paths if (manifest := listing(path)) is not None]
    yield from sorted(found, key=lambda it: (it[1]["serial"], it[1]["step"], it[1]["id"]), reverse=True)


def part_files(files: Iterable[str]) -> dict[str, str]:
    """The parts of the shared state among the files of a checkpoint, and the file of each."""
    return {name[: -len(".pt")]: name for name in files if not _OF_RANK.fullmatch(name)}


def piece_files(files: Iterable[str]) -> list[str]:
    """The files with pieces of what is sharded, in the order of ranks."""
    return sorted(name for name in files if name.startswith("shard-") and _OF_RANK.fullmatch(name))


def is_whole(path: Path, manifest: Listing) -> bool:
    """Whether all files of a checkpoint are as its manifest says; reads them."""
    return not any(damage(path / name, it["size"], it["crc32"]) for name, it in manifest["files"].items())


def damage(file: Path, size: int, crc32: str, *, reads: bool = True) -> str:
    """Why a file is not as a manifest says, "" if it is; without `reads`, as far as its size shows."""
    crc = 0
    try:
        with open(file, "rb", buffering=0) as opened:
            there = os.fstat(opened.fileno()).st_size
            if there != size:
                return f"{there} bytes instead of {size}"
            while reads and (chunk := opened.read(CHUNK)):
                crc = zlib.crc32(chunk, crc)
    except OSError as error:
        return error.strerror or type(error).__name__
    is_other = reads and f"{crc:08x}" != crc32
    return f"its checksum is {crc:08x} instead of {crc32}" if is_other else ""
