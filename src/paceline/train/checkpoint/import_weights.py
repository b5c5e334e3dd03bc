"""Files with the weights of a model as a checkpoint of these alone, with which a run begins to train.

`paceline checkpoint import` runs this in a process of its own. The files are mapped into memory, so that as much of
them is in it at a time as the system likes.
"""

from __future__ import annotations

import collections
import contextlib
import os
import sys
import uuid
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from paceline.contract.checkpoint import temporary_name
from paceline.contract.folder_lock import FolderLock, FolderTaken
from paceline.train.torch_types import StateDict

from .errors import CheckpointError
from .export import Refused, complete, say

_EXTRA = "_extra_state"  # the names of what modules keep beside tensors end so in torch


def main() -> None:
    """Import the files that the command line names: FOLDER, "force" or "", FILE…."""
    folder, force, *files = sys.argv[1:]
    target = Path(folder).absolute()
    new = uuid.uuid4().hex
    locks: list[FolderLock] = []
    made: list[Path] = []

    def undo() -> None:
        from . import disk_format

        with contextlib.suppress(OSError):
            disk_format.discard(temporary_name(target, 0, new))
        while locks:
            locks.pop().release()
        for each in made:
            with contextlib.suppress(OSError):  # it has the checkpoint
                each.rmdir()

    def work() -> None:
        state = _state(files)
        try:
            target.mkdir()
            made.append(target)
        except FileExistsError:
            pass
        try:
            locks.append(FolderLock(target, 0))
        except FolderTaken as error:
            raise Refused(f"-o {folder}: held by {error}; stop that first, or choose another folder") from None
        name, size = _write(target, new, state, folder, force=bool(force))
        say(f"model of {', '.join(files)}, {size} bytes")
        print(os.path.join(folder, name))

    complete(work, undo, f"cannot import into {folder}", Path(folder))


def _write(target: Path, new: str, state: StateDict, folder: str, *, force: bool) -> tuple[str, int]:
    """Write and commit the checkpoint; returns its name, and the bytes of its only part."""
    import torch

    from paceline._version import __version__

    from . import disk_format

    found, _ = disk_format.scan(target)
    if found and not force:
        raise Refused(f"-o {folder} has checkpoints since a moment ago; choose another folder, or use --force")
    disk_format.remove_leftovers(target)
    temporary = temporary_name(target, 0, new)
    needed = sum(each.nbytes for each in state.values() if isinstance(each, torch.Tensor))
    try:
        disk_format.make_temporary(temporary, needed)
        record = disk_format.write_file(temporary / "model.pt", state)
        manifest = disk_format.Manifest(
            id=new,
            serial=1 + max((saved.manifest.serial for saved in found), default=0),
            step=0,
            world_size=1,
            paceline=__version__,
            torch=torch.__version__,
            saved_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            files={"model.pt": record},
            weights_only=True,
        )
        disk_format.write_manifest(temporary, manifest)
        return disk_format.commit(temporary, target, 0).name, record.size
    except OSError as error:
        raise CheckpointError(disk_format.describe(error, target, needed)) from error


def _state(files: list[str]) -> StateDict:
    """The state of the model that is in the files, with tensors that are mapped into memory."""
    import torch

    from paceline.train.group.sharded import is_dtensor
    from paceline.train.parallel.weights import read_state

    state: collections.OrderedDict[str, Any] = collections.OrderedDict()
    metadata: StateDict = {}
    of: dict[str, str] = {}
    left: list[str] = []
    for file in files:
        try:
            found = read_state(file)
        except ValueError as error:
            raise Refused(str(error)) from None
        except OSError as error:
            raise Refused(f"{file}: {error.strerror}") from None
        if not any(isinstance(each, torch.Tensor) for each in found.values()) or not all(
            isinstance(name, str) for name in found
        ):
            names = ", ".join(map(repr, [*found][:3])) or "nothing"
            raise Refused(f"{file} is no flat dict of tensors, as model.state_dict() is: it has {names}")
        for name, value in found.items():
            if name in of:
                raise Refused(f"{name} is in both {of[name]} and {file}; leave out one of them")
            of[name] = file
            if not isinstance(value, torch.Tensor):
                if name.endswith(_EXTRA):
                    state[name] = value
                else:
                    left.append(name)
                continue
            if value.layout is not torch.strided or value.is_meta or is_dtensor(value):
                what = (
                    "has no numbers" if value.is_meta else "is sharded" if is_dtensor(value) else f"is {value.layout}"
                )
                raise Refused(f"{name} in {file} {what}; weights are whole, dense tensors")
            state[name] = value.detach()
        metadata.update(getattr(found, "_metadata", {}))
    if metadata:
        state._metadata = metadata  # type: ignore[attr-defined]  # as modules have it, with the versions of their states
    if left:
        say(f"left out, because they are no tensors: {', '.join(map(repr, left))}")
    return state
