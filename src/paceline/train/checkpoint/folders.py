"""Which ranks see the same folder, and which one of them writes there.

Whether nodes share a folder is not configured but tested. Ranks of one machine with the same path see the same folder;
if that holds for all ranks, nothing is tested. Otherwise every rank tries to create the same new file. In each folder,
however it is mounted, exactly one rank succeeds; this also holds on NFS, and does not depend on its caches.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from .disk_format import PROBE, PROBE_TEXT

if TYPE_CHECKING:
    from .consensus import Agreement

_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


def find_writers(folder: Path, rank: int, agreement: Agreement) -> list[int]:
    """The writer of each rank's folder: the lowest rank that sees it. All ranks must call this; it makes the folder."""
    failed = f"cannot write checkpoints to {folder}"

    def rule(places: list[bytes]) -> bytes:
        return (f"{len(places)}" if len(set(places)) == 1 else f".meeting-{secrets.token_hex(16)}").encode()

    answer = agreement.decide(_place(folder), rule).decode()
    if not PROBE.fullmatch(answer):
        agreement.together(failed, lambda: _try(folder) if rank == 0 else None)
        return [0] * int(answer)
    probe = folder / answer
    try:
        refused = agreement.together(failed, lambda: _make(probe, rank))
        maker = agreement.together(failed, lambda: _maker(probe, refused))
        writers: list[int] = json.loads(agreement.decide(maker.encode(), _lowest))
    finally:
        with contextlib.suppress(OSError):
            if probe.read_text() == f"{PROBE_TEXT}{rank}":
                probe.unlink()
    return writers


def _place(folder: Path) -> bytes:
    """Identifies the folder: equal on two ranks only if it is certainly the same folder."""
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        mounts, root = os.stat("/proc/self/ns/mnt"), os.stat("/")
    except OSError:
        kernel, mounts, root = secrets.token_hex(16), os.stat("/"), os.stat("/")
    return json.dumps([kernel, mounts.st_ino, root.st_dev, root.st_ino, str(folder)]).encode()


def _try(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def _make(probe: Path, rank: int) -> OSError | None:
    """Create the file, unless another rank was faster. Returns the error if this rank may not write, only read."""
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in _READ_ONLY:
            return error
        raise
    try:
        with probe.open("x") as file:
            file.write(f"{PROBE_TEXT}{rank}")
    except FileExistsError:
        return None
    except OSError as error:
        with contextlib.suppress(OSError):
            probe.unlink()
        if error.errno in _READ_ONLY:
            return error
        raise
    return None


def _maker(probe: Path, refused: OSError | None) -> str:
    try:
        return probe.read_text()
    except FileNotFoundError:
        raise refused or FileNotFoundError(errno.ENOENT, f"{probe.name}, just made there, is not found") from None


def _lowest(makers: list[bytes]) -> bytes:
    return json.dumps([makers.index(maker) for maker in makers]).encode()
