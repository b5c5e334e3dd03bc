"""The code of a new job: from an archive, or a copy of another job's."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

from paceline.node.errors import Refused

from . import code_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from typing import Protocol

    # Puts a job's code at a path that does not exist yet, completely or not at all, and notes that it has made it
    # (`code_folder.record_made`); returns the record of the code.
    Code = Callable[[Path], dict[str, Any]]

    class Readable(Protocol):
        """A stream of bytes."""

        def read(self, size: int, /) -> bytes:
            """The next bytes, at most `size`; b"" at the end."""


def unpacked(archive: Readable, record: Mapping[str, Any]) -> Code:
    """Code from an archive (tar).

    Args:
        archive: the archive; it is read as a stream, to its end.
        record: the record of the code.
    """

    def unpack(destination: Path) -> dict[str, Any]:
        import tarfile

        with code_folder.building(destination) as building:
            with tarfile.open(fileobj=archive, mode="r|") as tar:  # type: ignore[call-overload]  # it has all that is used
                tar.extraction_filter = lambda member, _: member  # the user's own code, with all its links
                tar.extractall(building)
            while archive.read(1 << 16):
                pass
        return dict(record)

    return unpack


def taken(folder: Path, record: Mapping[str, Any]) -> Code:
    """Code that is in a folder, which is removed afterwards as far as this user may.

    Args:
        folder: the folder.
        record: the record of the code.
    """

    def take(destination: Path) -> dict[str, Any]:
        with code_folder.building(destination) as building:
            shutil.copytree(folder, building, symlinks=True, dirs_exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        return dict(record)

    return take


def linked(code: Mapping[str, Any]) -> Code:
    """The code of another job in folders of its own, with the same files: each may be removed without the other."""
    return copy_of(code, copy=link)


def link(source: str, target: str) -> None:
    """Give a file a second name, or copy it where that is impossible."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target)


def copy_of(
    code: Mapping[str, Any],
    without: Callable[[str, list[str]], list[str]] | None = None,
    copy: Callable[[str, str], object] = shutil.copy2,
) -> Code:
    """The code of another job in its current state, with the files that the job wrote there.

    Args:
        code: the record of that code, with its `path`.
        without: which names of a folder to leave out.
        copy: copies a file.
    """

    def copy_all(destination: Path) -> dict[str, Any]:
        with code_folder.building(destination) as building:
            try:
                shutil.copytree(
                    code["path"], building, symlinks=True, dirs_exist_ok=True, ignore=without, copy_function=copy
                )
            except shutil.Error as error:
                source, _, why = error.args[0][0]
                raise Refused(f"cannot copy {source}: {why}; submit the job again") from None
        return dict(code)

    return copy_all
