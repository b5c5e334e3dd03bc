"""Copies a folder as it is now."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from paceline.contract import found
from paceline.contract.code_folder import GITIGNORE
from paceline.job.errors import UserError
from paceline.job.paths import jobs_folder
from paceline.job.quantities import show_size

from . import git
from .ignore import Ignore
from .transfer import printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.contract.records import CodeRecord

    from .transfer import OnProgress

_SKIPPED = frozenset({".git", "__pycache__"})
_MANY_BYTES, _MANY_FILES = 10**9, 50_000
_TRIES = 3  # attempts to copy a file that changes meanwhile
_BLOCK = 1 << 24
_LEAVE_OUT = "or name it in .pacelineignore"
# Beside `code/train` is `code/.train.paceline`, which says that paceline made that folder; while the code is being
# copied, it is in `code/.train.paceline.1a2b3c4d`.
_OURS = re.compile(r"\..+\.paceline(\.[0-9a-f]{8})?", re.DOTALL)


def fetch(
    source: str, folder: Path, destination: Path, progress: OnProgress, warn: Callable[[str], None]
) -> CodeRecord:
    """Copy the files that git lists in a folder, or without git all but `.git` and `__pycache__`.

    Folders that paceline made there are left out.
    """
    root = existing_folder(source, folder)
    listing = Listing(root, progress)
    listing.add_what_git_lists("")
    listing.warn_if_huge(warn)
    destination.chmod(stat.S_IMODE(root.stat().st_mode) & 0o777 | 0o700)
    for name, mode in listing.folders.items():
        if name:
            os.mkdir(destination / name, mode & 0o777 | 0o700)
    copied = 0
    for number, (name, (_, mode)) in enumerate(listing.files.items()):
        progress("copying files", number, len(listing.files))
        if stat.S_ISLNK(mode):
            _copy_link(root, name, destination / name)
        else:
            copied += _copy_file(root / name, destination / name)
    progress("copying files", len(listing.files), len(listing.files))
    return {"source": str(root), "files": len(listing.files), "bytes": copied}


def existing_folder(source: str, folder: Path) -> Path:
    """A folder that the user named, absolute and without symbolic links."""
    path = folder / os.path.expanduser(source)
    if not os.path.isdir(path):
        what = "is a file, not a folder" if os.path.lexists(path) else "does not exist"
        raise UserError(f"--sync-source {printable(path)} {what}; name a folder")
    return Path(os.path.realpath(path))


class Listing:
    """What to copy of a folder."""

    def __init__(self, root: Path, progress: OnProgress) -> None:
        self.folders: dict[str, int] = {}  # path relative to the root → mode; parents come first
        # files and symbolic links: path relative to the root → (size, mode)
        self.files: dict[str, tuple[int, int]] = {}
        self._root = str(root)
        self._progress = progress
        self._ignore = Ignore.of_folder(root)
        self._is_ours = Ours()
        self._known: dict[str, bool] = {"": True}

    def add_what_git_lists(self, folder: str) -> None:
        """Add what git lists in a folder and in the repositories in it; everything if git lists nothing."""
        listed = git.list_files(self._path(folder), lambda name: self._has_folder(_join(folder, name)))
        if listed is None or (not listed and not folder):  # a folder that another repository ignores lists nothing
            self.add_everything(folder)
            return
        for name in listed:
            path = _join(folder, name.rstrip("/"))
            if not self._has_folder(os.path.dirname(path)):
                continue
            if os.path.isdir(self._path(path)) and not os.path.islink(self._path(path)):  # a repository in it
                if self._has_folder(path):
                    inner = os.path.lexists(self._path(path) + "/.git")
                    (self.add_what_git_lists if inner else self.add_everything)(path)
            else:
                self._add(path)

    def add_everything(self, folder: str) -> None:
        """Add everything in a folder but `.git` and `__pycache__`."""
        waiting = [folder]
        while waiting:
            parent = waiting.pop()
            try:
                with os.scandir(self._path(parent)) as entries:
                    names = sorted((e.name, e.is_dir(follow_symlinks=False)) for e in entries)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise UserError(_unreadable(self._path(parent), error)) from None
            for name, is_folder in names:
                path = _join(parent, name)
                if name in _SKIPPED:
                    continue
                if not is_folder:
                    self._add(path)
                elif self._has_folder(path):
                    waiting.append(path)
                    if not is_for_code(self._path(path)):
                        self._need(path)

    def warn_if_huge(self, warn: Callable[[str], None]) -> None:
        """Warn if this is too large to be only code, and say where most of it is."""
        total = sum(size for size, _ in self.files.values())
        if total <= _MANY_BYTES and len(self.files) <= _MANY_FILES:
            return
        weights = {path: size if total > _MANY_BYTES else 1 for path, (size, _) in self.files.items()}
        by_folder: dict[str, int] = {}
        for path, weight in weights.items():
            for parent in PurePosixPath(path).parents:
                by_folder[str(parent)] = by_folder.get(str(parent), 0) + weight
        half = sum(weights.values()) / 2
        biggest = max((name for name, weight in by_folder.items() if weight >= half), key=lambda n: (n.count("/"), n))
        if biggest == ".":
            biggest = max((name for name in by_folder if name != "."), key=by_folder.__getitem__, default=".")
        warn(
            f"copying {len(self.files):,} files, {show_size(total)}, of {printable(self._root)}; "
            f"the largest part is in {printable(biggest)}: to leave it out, name it in .pacelineignore"
        )

    # -- one by one ----------------------------------------------------------------------------------------------------

    def _path(self, relative: str) -> str:
        return f"{self._root}/{relative}" if relative else self._root

    def _add(self, path: str) -> None:
        name = os.path.basename(path)
        if self._ignore(path, is_folder=False) or is_our_name(name):
            return
        if name == ".gitignore" and is_for_code(self._path(os.path.dirname(path))):
            return
        try:
            status = os.lstat(self._path(path))
        except (FileNotFoundError, NotADirectoryError):  # git still lists deleted files
            return
        except OSError as error:
            raise UserError(_unreadable(self._path(path), error)) from None
        if stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
            self._need(os.path.dirname(path))
            self.files[path] = (status.st_size if stat.S_ISREG(status.st_mode) else 0, status.st_mode)
            self._progress("listing files", len(self.files), None)

    def _need(self, folder: str) -> None:
        if folder and folder not in self.folders:
            self._need(os.path.dirname(folder))
            try:
                self.folders[folder] = os.lstat(self._path(folder)).st_mode
            except OSError as error:
                raise UserError(_vanished(self._path(folder), error)) from None

    def _has_folder(self, path: str) -> bool:
        """Whether to copy a folder, if there is something in it; does not follow symbolic links."""
        if path not in self._known:
            self._known[path] = (
                self._has_folder(os.path.dirname(path))
                and not os.path.islink(self._path(path))
                and not self._ignore(path, is_folder=True)
                and not self._is_ours(self._path(path))
            )
        return self._known[path]


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _unreadable(path: str, error: OSError) -> str:
    return f"cannot read {printable(path)}: {error.strerror}; check its permissions, {_LEAVE_OUT}"


def _copy_link(root: Path, name: str, copy: Path) -> None:
    """Copy a symbolic link. A relative link that leads out of the folder is changed, so that its target is the same."""
    try:
        target = os.readlink(root / name)
    except OSError as error:
        raise UserError(_vanished(str(root / name), error)) from None
    parent = os.path.dirname(name)
    if not os.path.isabs(target) and os.path.normpath(os.path.join(parent, target)).split("/")[0] == "..":
        target = os.path.join(root, parent, target)
    os.symlink(target, copy)


def _copy_file(original: Path, copy: Path) -> int:
    """Copy a file with its permissions and time; returns its size."""
    for _ in range(_TRIES):
        try:
            source = os.open(original, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise UserError(_vanished(str(original), error)) from None
        try:
            before = os.fstat(source)
            if not stat.S_ISREG(before.st_mode):
                break
            target = os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                copied = _copy_bytes(source, target, before.st_size)
                after = os.fstat(source)
                os.fchmod(target, stat.S_IMODE(before.st_mode) & 0o777)
                os.utime(target, ns=(before.st_atime_ns, before.st_mtime_ns))
            finally:
                os.close(target)
        finally:
            os.close(source)
        if copied == before.st_size == after.st_size and before.st_mtime_ns == after.st_mtime_ns:
            return copied
    raise UserError(f"{printable(original)} changes while it is copied; stop what writes it, {_LEAVE_OUT}")


def _copy_bytes(source: int, target: int, size: int) -> int:
    """Copy up to `size` bytes, within the file system if it can; returns the number of bytes copied."""
    done = 0
    in_kernel = True
    while done < size:
        block = min(_BLOCK, size - done)
        if in_kernel:
            try:
                count = os.copy_file_range(source, target, block)
            except OSError:  # not possible between these file systems; another error is raised again below
                in_kernel = False
                continue
        else:
            data = os.read(source, block)
            count = len(data)
            while data:
                data = data[os.write(target, data) :]
        if count == 0 and not in_kernel:
            break
        in_kernel = in_kernel and count > 0
        done += count
    return done


def _vanished(path: str, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{printable(path)} disappeared while the folder was copied; stop what removes it, {_LEAVE_OUT}"
    return _unreadable(path, error)


# -- what paceline writes into a user's folders, which is left out -----------------------------------------------------


def is_for_code(folder: str) -> bool:
    """Whether paceline made a folder for the code of jobs."""
    try:
        return found.read_of_anyone(Path(folder, ".gitignore")) == GITIGNORE
    except (OSError, ValueError):
        return False


def is_our_name(name: str) -> bool:
    """Whether a file or folder has a name that paceline uses beside the code of jobs."""
    return _OURS.fullmatch(name) is not None


class Ours:
    """Recognises paceline's folders: the folder of jobs, run directories, and the code of jobs."""

    def __init__(self) -> None:
        try:
            jobs = jobs_folder()
        except UserError:  # no home: no jobs in it
            self._homes = frozenset[str]()
        else:
            self._homes = frozenset(os.path.realpath(path) for path in (jobs, jobs.parent))

    def __call__(self, path: str) -> bool:
        """Whether a folder is paceline's. The path is absolute and goes through no symbolic link."""
        parent, name = os.path.split(path)
        if path in self._homes or is_our_name(name) or os.path.lexists(f"{parent}/.{name}.paceline"):
            return True
        files = set(os.listdir(path)) if os.path.isfile(f"{path}/spec.json") else set[str]()
        return files >= {"status.json", "journal.jsonl"}
