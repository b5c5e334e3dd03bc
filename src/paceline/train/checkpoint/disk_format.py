"""A checkpoint on disk: written, made durable, verified, committed by one rename, found again, removed.

A checkpoint is a folder `step-000123` with one `torch.save` file for each part of the state, one for each rank's own
state, and `manifest.json`, which lists them. The folder gets its name, by an atomic rename, after everything in it is
durable. A folder without such a name, without a manifest, or with other bytes than the manifest says is no checkpoint.

The checksum is CRC-32 (`zlib.crc32`): it is in the standard library of every Python, the same everywhere, finds every
burst of damage up to 32 bits for certain and any other with a probability of 1 - 2**-32, releases the GIL, and runs at
1.9 GB/s; SHA-256 runs at 1.1 GB/s with hardware support and at 0.3 GB/s without. It protects from accidents, not from
attacks.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
import time
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from paceline.contract.checkpoint import (
    FORMAT,
    MANIFEST,
    MARK,
    MARKER,
    NAME,
    STATE_FILE,
    crc_of_json,
    damage,
    part_files,
    piece_files,
)

from .errors import CheckpointError, DamagedCheckpoint
from .plain_state import unsafe_names, why_refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

LEFTOVER = re.compile(r"\.(saving|removing)-step-\d{6,}(-\d+)?-([0-9a-f]{8})")
_OLD = 3600.0  # seconds after which no rank uses a probe any more
OURS = re.compile(rf"{STATE_FILE.pattern}|manifest\.json(\.new)?")
PROBE = re.compile(r"\.meeting-[0-9a-f]{32}")  # the file that ranks try to create, see `consensus`
PROBE_TEXT = "paceline: made by rank "


@dataclass(frozen=True)
class FileRecord:
    """The expected file of a checkpoint: its size in bytes, and its CRC-32 as eight hexadecimal digits."""

    size: int
    crc32: str


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint. `serial` counts the commits into a folder: the newest has the largest.

    `weights_only` is of one that was imported: training begins with its model, and goes on from nothing.
    """

    id: str
    serial: int
    step: int
    world_size: int
    paceline: str
    torch: str
    saved_at: str
    files: dict[str, FileRecord]
    weights_only: bool = False

    def to_json(self) -> str:
        """The text of `manifest.json`, with a checksum of its own."""
        checkpoint = asdict(self)
        whole = {"format": "paceline-checkpoint", "version": FORMAT, "checkpoint": checkpoint}
        return json.dumps({**whole, "crc32": crc_of_json(whole)}, indent=1) + "\n"

    @staticmethod
    def from_json(text: bytes) -> Manifest:
        """Read what `to_json` wrote."""
        try:
            whole = json.loads(text)
            crc = whole.pop("crc32")
            if crc != crc_of_json(whole):
                raise DamagedCheckpoint(f"{MANIFEST}: its checksum is wrong")
            if whole["version"] != FORMAT:
                raise CheckpointError(
                    f"the checkpoint is of format {whole['version']} and this paceline reads format {FORMAT}: "
                    "use the version of paceline that wrote it"
                )
            fields = whole["checkpoint"]
            files = {name: FileRecord(**record) for name, record in fields.pop("files").items()}
            manifest = Manifest(files=files, **fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DamagedCheckpoint(f"{MANIFEST}: not a manifest") from error
        manifest._check()
        return manifest

    def _check(self) -> None:
        """Check that names and numbers are such as `to_json` writes: no name leads out of the checkpoint's folder."""
        numbers = [self.serial, self.step, self.world_size, *(record.size for record in self.files.values())]
        if not all(isinstance(number, int) and 0 <= number < 2**63 for number in numbers):
            raise DamagedCheckpoint(f"{MANIFEST}: a field that must be a number is not")
        if not isinstance(self.weights_only, bool):
            raise DamagedCheckpoint(f"{MANIFEST}: weights_only is neither true nor false")
        if not (isinstance(self.id, str) and re.fullmatch(r"[0-9a-f]{32}", self.id)):
            raise DamagedCheckpoint(f"{MANIFEST}: {self.id!r} is not an id")
        for name in self.files:
            if not STATE_FILE.fullmatch(name):
                raise DamagedCheckpoint(f"{MANIFEST}: {name!r} cannot be a file of a checkpoint")


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint on disk. `damage` says why it cannot be used, as far as names and sizes show."""

    path: Path
    manifest: Manifest
    damage: str = ""

    @property
    def step(self) -> int:
        """The number of optimizer steps it was saved after."""
        return self.manifest.step


def rank_file(rank: int) -> str:
    """The name of the file with a rank's own state."""
    return f"rank-{rank:05d}.pt"


def shard_file(rank: int) -> str:
    """The name of the file with a rank's pieces of what is sharded."""
    return f"shard-{rank:05d}.pt"


def shared_files(manifest: Manifest) -> dict[str, str]:
    """The parts of the shared state, and the file of each."""
    return part_files(manifest.files)


def shard_files(manifest: Manifest) -> list[str]:
    """The files with pieces of what is sharded, in the order of ranks."""
    return piece_files(manifest.files)


class _Summing:
    """A file for `torch.save` that computes a checksum. It keeps errors for later: the C++ writer must not get them."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.size = 0
        self.crc = 0
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Write the data and add it to the checksum; returns success even after an error."""
        view = memoryview(data).cast("B")
        self.crc = zlib.crc32(view, self.crc)
        self.size += len(view)
        rest = view
        while rest and self.error is None:
            try:
                rest = rest[os.write(self.descriptor, rest) :]
            except OSError as error:
                self.error = error
        return len(view)

    def flush(self) -> None:
        """Do nothing: data is not buffered here."""


def write_file(path: Path, content: object) -> FileRecord:
    """Write a new file with `torch.save`, or as it is if `content` is bytes; make it durable, and read it back."""

    def save(summing: _Summing) -> None:
        torch.save(content, summing)  # type: ignore[arg-type]  # all it calls is write and flush

    record = write_stream(path, [content]) if isinstance(content, bytes) else _write(path, save)
    if path.suffix == ".pt":
        names = unsafe_names(path)
        if names:
            state = None if isinstance(content, bytes) else content
            raise CheckpointError(f"{path.name}: {why_refused(state, names)}")
    return record


def write_stream(path: Path, chunks: Iterable[bytes | memoryview]) -> FileRecord:
    """Write a new file from chunks; make it durable, and read it back."""

    def pass_on(summing: _Summing) -> None:
        for chunk in chunks:
            summing.write(chunk)
            if summing.error is not None:
                return

    return _write(path, pass_on)


def _write(path: Path, fill: Callable[[_Summing], None]) -> FileRecord:
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
    try:
        summing = _Summing(descriptor)
        fill(summing)
        if summing.error is not None:
            raise summing.error
        os.fsync(descriptor)
        if hasattr(os, "posix_fadvise"):  # so that it is read back from the disk, not from the page cache
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    record = FileRecord(summing.size, f"{summing.crc:08x}")
    verify_file(path, record)
    return record


def verify_file(path: Path, record: FileRecord) -> None:
    """Read a file and compare it with its record."""
    if why := damage(path, record.size, record.crc32):
        raise DamagedCheckpoint(f"{path.name}: {why}")


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system without this operation
            raise
    finally:
        os.close(descriptor)


def make_temporary(path: Path, needed: int = 0) -> None:
    """Make the folder in which a checkpoint is written, with the marker that paceline made it."""
    # A disk that lacks the bytes is not filled: logs and other jobs may need it.
    disk = shutil.disk_usage(path.parent)
    if disk.free < needed and disk.total:  # 0: the file system does not say
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    path.mkdir()
    (path / MARKER).write_bytes(MARK)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the last file of a checkpoint that has no name yet, and make the checkpoint durable."""
    write_file(folder / f"{MANIFEST}.new", manifest.to_json().encode())
    (folder / f"{MANIFEST}.new").rename(folder / MANIFEST)
    (folder / MARKER).unlink()  # from now on, the manifest shows that paceline made the folder
    sync_folder(folder)


def commit(temporary: Path, folder: Path, step: int) -> Path:
    """Give a complete checkpoint its name, which commits it. If a name is taken, -2, -3, … is appended."""
    number = 1
    while True:
        target = folder / (f"step-{step:06d}" + (f"-{number}" if number > 1 else ""))
        number += 1
        if target.exists():  # a rename would replace it, were it an empty folder
            continue
        try:
            temporary.rename(target)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                continue
            raise
        sync_folder(folder)
        return target


def look(path: Path) -> SavedCheckpoint:
    """The checkpoint in a folder."""
    try:
        manifest = Manifest.from_json((path / MANIFEST).read_bytes())
    except OSError as error:
        raise DamagedCheckpoint(f"{MANIFEST}: {error.strerror}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return SavedCheckpoint(path, manifest, _damage(path, manifest))


def scan(folder: Path) -> tuple[list[SavedCheckpoint], dict[Path, str]]:
    """The checkpoints of a folder, newest first, and folders named like a checkpoint without a valid manifest."""
    found: list[SavedCheckpoint] = []
    unreadable: dict[Path, str] = {}
    try:
        paths = [path for path in sorted(folder.iterdir()) if NAME.fullmatch(path.name)]
    except FileNotFoundError:
        return [], {}
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoints in {folder}: {error.strerror}") from error
    for path in paths:
        try:
            found.append(look(path))
        except DamagedCheckpoint as error:
            unreadable[path] = str(error)
    found.sort(key=lambda saved: (saved.manifest.serial, saved.manifest.step, saved.manifest.id), reverse=True)
    return found, unreadable


def remove(saved: SavedCheckpoint) -> None:
    """Remove a checkpoint: first its name, atomically, then its files.

    A checkpoint with other files in it is kept, and so is one that is elsewhere and only linked to.
    """
    if saved.path.is_symlink() or {path.name for path in saved.path.iterdir()} - set(saved.manifest.files) - {MANIFEST}:
        return
    hidden = saved.path.with_name(f".removing-{saved.path.name}-{saved.manifest.id[:8]}")
    saved.path.rename(hidden)
    _remove_folder(hidden)


def remove_leftovers(folder: Path) -> None:
    """Remove what failed or killed saves and removals have left, and nothing else."""
    for path in folder.iterdir():
        if LEFTOVER.fullmatch(path.name):
            discard(path)
        elif PROBE.fullmatch(path.name) and _is_old_probe(path):
            path.unlink(missing_ok=True)


def discard(path: Path) -> None:
    """Remove a checkpoint that was not committed, if there is one."""
    if _is_leftover(path):
        _remove_folder(path)


def _is_leftover(path: Path) -> bool:
    """Whether paceline made a folder: it has paceline's marker, or the manifest of the checkpoint in its name."""
    match = LEFTOVER.fullmatch(path.name)
    if match is None or path.is_symlink() or not path.is_dir():
        return False
    try:
        if not any(path.iterdir()) or MARK.startswith((path / MARKER).read_bytes()):
            return True  # or its maker was killed before it had written that
    except FileNotFoundError:
        pass
    try:
        return Manifest.from_json((path / MANIFEST).read_bytes()).id.startswith(match[3])
    except (OSError, DamagedCheckpoint, CheckpointError):
        return False


def _is_old_probe(path: Path) -> bool:
    try:
        status = path.lstat()
        is_old = stat.S_ISREG(status.st_mode) and time.time() - status.st_mtime > _OLD
        return is_old and path.read_text().startswith(PROBE_TEXT)
    except (OSError, ValueError):
        return False


def describe(error: OSError, folder: Path, needed: int) -> str:
    """Why a checkpoint of `needed` bytes could not be written to a folder, in one line."""
    if error.errno == errno.ENOSPC:
        free = shutil.disk_usage(folder).free
        return f"no space left: the checkpoint needs {needed / 1e6:.1f} MB and {free / 1e6:.1f} MB are free"
    if error.errno == errno.EFBIG:
        return "a file grew past the limit on the size of files (ulimit -f)"
    return error.strerror or type(error).__name__


def _damage(path: Path, manifest: Manifest) -> str:
    for name, record in manifest.files.items():
        try:
            size = (path / name).stat().st_size
        except OSError as error:
            return f"{name}: {error.strerror}"
        if size != record.size:
            return f"{name}: {size} bytes instead of {record.size}"
    return ""


def _remove_folder(path: Path) -> None:
    """Remove the files that checkpoints have; then the manifest, the marker and the folder."""
    files = [file for file in path.iterdir() if not file.is_dir()]
    for file in files:
        if OURS.fullmatch(file.name) and file.name != MANIFEST:
            file.unlink()
    if {file.name for file in path.iterdir()} <= {MARKER, MANIFEST}:
        for name in (MANIFEST, MARKER):  # in this order: with the marker, the manifest may be of another checkpoint
            (path / name).unlink(missing_ok=True)
        path.rmdir()
