"""The working folder of a rehearsal: its ranks see their own writes, and the files themselves stay as they are.

An overlay (Documentation/filesystems/overlayfs.rst) in the mount namespace of the fork server. Not all systems let
users make one; then `unprotected` says why, and files are really written.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
from typing import TYPE_CHECKING

from paceline.contract.rehearsal import FOLDER, PLAN, UNPROTECTED, UPPER, WORK
from paceline.node.machine import volumes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.node.spec import NodeSpec

_MS_BIND, _MS_REC = 0x1000, 0x4000


def protect(spec: NodeSpec, run: str) -> None:
    """Lay an overlay over the working folder, if this is a rehearsal; `run` is the run directory, which stays."""
    folder = spec.env.get(FOLDER)
    if folder is None:
        return
    here = os.getcwd()
    try:
        if any(character in path for path in (here, folder) for character in ",:\\"):
            raise OSError(0, "its path has a character that an overlay cannot have")
        if (inner := _mounted_below(here)) is not None:
            raise OSError(0, f"another file system is mounted at {inner}")
        volumes.enter([(here, here)])  # a namespace of its own
        kept = [os.open(path, os.O_PATH) for path in (run, folder)]
        options = f"lowerdir={here},upperdir={folder}/{UPPER},workdir={folder}/{WORK}"
        options += ",userxattr" if os.geteuid() else ""  # a user namespace has no trusted attributes
        _mount("overlay", here, "overlay", 0, options)
        for path, descriptor in zip((run, folder), kept):
            if path.startswith(os.path.join(here, "")):
                _mount(f"/proc/self/fd/{descriptor}", path, None, _MS_BIND | _MS_REC, None)
            os.close(descriptor)
    except OSError as error:
        with contextlib.suppress(OSError), open(os.path.join(folder, UNPROTECTED), "w") as file:
            file.write((error.strerror or str(error)).lower())
    os.chdir(here)


def differ(env: Mapping[str, str]) -> None:
    """Give a rank that is about to be started by exec a hash seed of its own, as ranks of other machines have."""
    folder = env.get(FOLDER) or os.environ.get(FOLDER)
    if folder is None or "PYTHONHASHSEED" in env:
        return
    with contextlib.suppress(OSError, ValueError), open(os.path.join(folder, PLAN), "rb") as file:
        if json.load(file)["differ"]:
            os.environ["PYTHONHASHSEED"] = str(int(env.get("RANK", "0")) + 1)


def _mounted_below(folder: str) -> str | None:
    """What is mounted in a folder, and would be missing in an overlay of it."""
    with open("/proc/self/mountinfo", errors="replace") as file:
        points = (line.split(" ")[4].encode().decode("unicode_escape") for line in file)
        return next((it for it in points if it.startswith(os.path.join(folder, ""))), None)


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    encoded = [None if it is None else os.fsencode(it) for it in (source, target, kind, options)]
    if libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3]) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)
