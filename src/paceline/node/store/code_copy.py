"""Puts the code of a new job at a path: from an archive, from a folder, or as a copy of another job's.

The path does not exist yet. Afterwards it has all of the code, or there is nothing.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.node.errors import Refused
from paceline.node.files import read_json

from . import code_folder

if TYPE_CHECKING:
    import tarfile
    from collections.abc import Callable, Iterator, Mapping
    from typing import Protocol

    from paceline.node.rundir.directory import RunDirectory

    class Readable(Protocol):
        """A stream of bytes."""

        def read(self, size: int, /) -> bytes:
            """The next bytes, at most `size`; b"" at the end."""


def unpack(archive: Readable, destination: Path) -> None:
    """Unpack an archive (tar), which is read as a stream, to its end."""
    import tarfile

    with code_folder.building(destination) as building:
        with tarfile.open(fileobj=archive, mode="r|") as tar:  # type: ignore[call-overload]  # it has all that is used
            tar.extraction_filter = lambda member, _: member  # Python's would refuse links to the user's data
            tar.extractall(building, _inside(tar, building))
        while archive.read(1 << 16):
            pass


def _inside(tar: tarfile.TarFile, folder: Path) -> Iterator[tarfile.TarInfo]:
    """The members of an archive, each checked when those before it are unpacked: nothing is written outside.

    The archive may come from a host that somebody else has taken over. Links may lead anywhere, but nothing is written
    through them.
    """
    for member in tar:
        path = folder / member.name
        is_taken = os.path.lexists(path) and not (member.isdir() and path.is_dir() and not path.is_symlink())
        is_outside = member.islnk() and not _is_inside(member.linkname, folder)
        if member.ischr() or member.isblk() or not _is_inside(member.name, folder) or is_taken or is_outside:
            raise Refused(f"{member.name!r} cannot be in the code of a job; try again, or copy it another way")
        yield member


def _is_inside(name: str, folder: Path) -> bool:
    above = Path(name).parents
    return (
        not os.path.isabs(name) and ".." not in name.split("/") and not any((folder / it).is_symlink() for it in above)
    )


def take(folder: Path, destination: Path) -> None:
    """Copy a folder, and remove it afterwards as far as this user may."""
    with code_folder.building(destination) as building:
        shutil.copytree(folder, building, symlinks=True, dirs_exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def link(source: str, target: str) -> None:
    """Give a file a second name, or copy it where that is impossible."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def code_of(run: RunDirectory) -> dict[str, Any]:
    """The record of a job's code, with its `path`."""
    code: dict[str, Any] | None = (read_json(run.job) or {}).get("code")
    if code is None or not os.path.isdir(code["path"]):
        raise Refused(f"the code of job {run.path.name} is gone; submit the job again")
    return code


def copy_of(
    code: Mapping[str, Any],
    destination: Path,
    without: Callable[[str, list[str]], list[str]] | None = None,
    copy: Callable[[str, str], object] = shutil.copy2,
) -> None:
    """Copy the code of another job in its current state, with the files that the job wrote there."""
    with code_folder.building(destination) as building:
        try:
            shutil.copytree(
                code["path"], building, symlinks=True, dirs_exist_ok=True, ignore=without, copy_function=copy
            )
        except shutil.Error as error:
            source, _, why = error.args[0][0]
            raise Refused(f"cannot copy {source}: {why}; submit the job again") from None
