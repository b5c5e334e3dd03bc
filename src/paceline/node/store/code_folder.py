"""A job's copy of its code, in a folder that several machines may share: it is complete, or not there.

Beside `code/train` is `code/.train.paceline/<id of the job>`, with a file for each machine that needs the code; the
machine that removes the last of these files removes the code. Each machine builds the code in a folder beside these
files; the first that moves it to its place succeeds. What tells it from any other folder is in
`code/.train.paceline/made`, so that nothing else is removed that a user has put there meanwhile.

A link beside it has the name of the repository or folder that was copied, for programs that know it under that name: it
goes to the code of the newest job, but never changes under a job that has not ended.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.contract.code_folder import GITIGNORE
from paceline.node.errors import Refused
from paceline.node.files import read_json

if TYPE_CHECKING:
    import tarfile
    from collections.abc import Callable, Iterator
    from typing import Protocol

    from paceline.contract.records import CodeRecord
    from paceline.node.rundir.directory import RunDirectory

    class Readable(Protocol):
        """A stream of bytes."""

        def read(self, size: int, /) -> bytes:
            """The next bytes, at most `size`; b"" at the end."""


_MADE = "made"  # beside the folders of jobs, whose names are identifiers
_ATTRIBUTE = "user.paceline"  # of a job's code: a random value
_MARKER = ".paceline-made"  # in a job's code, in a file system without attributes
_BUILDING = "building."  # begins the names of folders that become the code, or that a killed process has left


def check_free(destination: Path, job_id: str) -> None:
    """Check that a job's code may be put there; changes nothing."""
    marks = _marks(destination)
    present = (path for path in (destination, marks) if os.path.lexists(path) and not _is_second_name(path))
    found = next(present, None)
    if found is not None and not (job_id and (marks / job_id).is_dir()) and not _is_abandoned(destination):
        raise Refused(_taken(found))


def claim(destination: Path, job_id: str) -> int:
    """Note that this machine's part of a job needs its code there, until `discard`."""
    marks = _marks(destination)
    _is_abandoned(destination, remove=True)
    if _is_second_name(destination):
        destination.unlink()
    if not os.path.lexists(destination):
        new = _hidden(destination)
        (new / job_id).mkdir(parents=True)
        lock = _mark(new / job_id)
        try:
            new.rename(marks)
        except OSError:  # another process was faster
            shutil.rmtree(new)
            os.close(lock)
        else:
            return lock
    try:
        return _mark(marks / job_id)
    except (FileNotFoundError, NotADirectoryError):  # no other machine of this job has claimed it
        raise Refused(_taken(destination if os.path.lexists(destination) else marks)) from None


def _is_abandoned(destination: Path, *, remove: bool = False) -> bool:
    """Whether only clients of this machine have claimed a destination, and were killed before the code was there."""
    marks = _marks(destination)
    found = 0
    try:
        for job_id in os.listdir(marks):
            if job_id.startswith(_BUILDING):
                continue
            if os.listdir(marks / job_id) != [socket.gethostname()]:
                return False
            mark = marks / job_id / socket.gethostname()
            lock = os.open(mark, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.lexists(destination) or not os.path.samestat(os.fstat(lock), mark.lstat()):
                    return False
                if remove:
                    discard(destination, job_id)
            finally:
                os.close(lock)
            found += 1
    except OSError:  # another process has locked it, or it is not a claim
        return False
    return found > 0


@contextlib.contextmanager
def claimed(destination: Path, job_id: str) -> Iterator[None]:
    """Claim a destination permanently; if the block fails, what was made for it is removed."""
    folder = destination.parent
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        try:
            for path in reversed(missing):
                path.mkdir(exist_ok=True)
            if missing:  # only paceline uses it: git can ignore it, also if another job is the first to claim a place
                with contextlib.suppress(FileExistsError), (folder / ".gitignore").open("xb") as file:
                    file.write(GITIGNORE)
            lock = claim(destination, job_id)
        except OSError as error:
            raise Refused(
                f"cannot write the job's code to {destination}: {error.strerror}; "
                "check that there is space and that you may write there, or choose another --working-dir"
            ) from None
        try:
            yield
        except BaseException:
            discard(destination, job_id)
            raise
        finally:
            os.close(lock)
    except BaseException:
        with contextlib.suppress(OSError):  # another job uses the folder by now
            ignore = folder / ".gitignore"
            if missing and os.listdir(folder) == [ignore.name] and ignore.read_bytes() == GITIGNORE:
                ignore.unlink()
            for path in missing:
                path.rmdir()
        raise


@contextlib.contextmanager
def building(destination: Path) -> Iterator[Path]:
    """A folder that becomes `destination` at the end of the block, unless another machine was faster."""
    marks = _marks(destination)
    # The code in a job's own folder, which nobody claims, has no marks.
    new = marks / f"{_BUILDING}{os.urandom(4).hex()}" if marks.is_dir() else _hidden(destination)
    new.mkdir(mode=0o700, parents=True)
    try:
        yield new
        made = _marked(new) if marks.is_dir() else ""
        try:
            if os.path.lexists(destination):  # a rename would replace an empty folder
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(destination))
            new.rename(destination)
        except OSError:
            if not destination.is_dir():
                raise
        else:
            with contextlib.suppress(OSError):
                (marks / _MADE).write_text(made)  # so that `discard` may remove it
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _marked(folder: Path) -> str:
    """Mark a folder; returns its identity, or "" if it cannot be marked."""
    marker = folder / _MARKER
    try:
        marker.unlink(missing_ok=True)  # it came with a copy of another job's code, and may be the same file
        try:
            os.setxattr(folder, _ATTRIBUTE, os.urandom(16).hex().encode())
        except OSError:
            marker.touch()
        return _identity(folder)
    except OSError:
        return ""


def _identity(folder: Path) -> str:
    """What a rename does not change, and no other folder has: a new one often has the inode of a removed one."""
    inode = folder.lstat().st_ino
    try:
        return f"{inode} {os.getxattr(folder, _ATTRIBUTE, follow_symlinks=False).decode()}"
    except OSError:
        found = (folder / _MARKER).lstat()
        return f"{inode} {found.st_ino} {found.st_mtime_ns}"


def name_too(link: Path, destination: Path) -> None:
    """Give a job's code a second name, unless something else has it."""
    with contextlib.suppress(OSError):  # a file system without links
        if not os.path.lexists(link) or _is_second_name(link):
            new = _hidden(link)
            new.symlink_to(destination.name)
            new.replace(link)


def named(link: Path) -> str | None:
    """The job whose code has this second name; None if none has it."""
    return os.readlink(link) if _is_second_name(link) else None


def is_being_made(destination: Path) -> bool:
    """Whether a process of this machine is about to make the job that has claimed a destination."""
    for claim in _marks(destination).glob(f"*/{socket.gethostname()}"):
        with contextlib.suppress(OSError), claim.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    return False


def _is_second_name(path: Path) -> bool:
    return path.is_symlink() and os.sep not in (target := os.readlink(path)) and _marks(path.with_name(target)).is_dir()


def is_claimed(destination: Path, job_id: str) -> bool:
    """Whether this machine's part of a job has its code there."""
    return os.path.lexists(_marks(destination) / job_id / socket.gethostname())


def discard(destination: Path, job_id: str) -> None:
    """Remove a job's code, unless another machine needs it. Code in a job's own folder is removed with that.

    A folder that was not claimed for this job, or is not the one that was made there, is kept.
    """
    marks = _marks(destination)
    try:
        (marks / job_id / socket.gethostname()).unlink()
        (marks / job_id).rmdir()
    except OSError:  # there are other marks, or none: this was not the last one
        return
    made = None
    with contextlib.suppress(OSError):
        made = (marks / _MADE).read_text()
        (marks / _MADE).unlink()
    with contextlib.suppress(OSError):
        if made and made == _identity(destination):
            shutil.rmtree(destination, ignore_errors=True)
            for path in destination.parent.iterdir():
                if path.is_symlink() and os.readlink(path) == destination.name:
                    path.unlink()
    for left in marks.glob(f"{_BUILDING}*"):
        shutil.rmtree(left, ignore_errors=True)
    with contextlib.suppress(OSError):
        marks.rmdir()


def _taken(found: Path) -> str:
    return f"{found} is there already; remove it, or choose another --name or --working-dir"


def _marks(destination: Path) -> Path:
    return destination.with_name(f".{destination.name}.paceline")


def _hidden(destination: Path) -> Path:
    return destination.with_name(f".{destination.name}.paceline.{os.urandom(4).hex()}")


def _mark(folder: Path) -> int:
    """Make this machine's mark in a folder; returns a descriptor that locks it, if the file system has locks."""
    lock = os.open(folder / socket.gethostname(), os.O_RDWR | os.O_CREAT, 0o666)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return lock


# -- what puts code there: from an archive, from a folder, or as a copy of another job's; all of it, or nothing --------


def unpack(archive: Readable, destination: Path) -> None:
    """Unpack an archive (tar), which is read as a stream, to its end."""
    import tarfile

    with building(destination) as new:
        with tarfile.open(fileobj=archive, mode="r|") as tar:  # type: ignore[call-overload]  # it has all that is used
            tar.extraction_filter = lambda member, _: member  # Python's would refuse links to the user's data
            tar.extractall(new, _inside(tar, new))
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
        # Root would give the files to who owns them on another machine; git refuses a folder of somebody else.
        member.uid, member.gid, member.uname, member.gname = os.geteuid(), os.getegid(), "", ""
        member.mode &= 0o777
        yield member


def _is_inside(name: str, folder: Path) -> bool:
    above = Path(name).parents
    return (
        not os.path.isabs(name) and ".." not in name.split("/") and not any((folder / it).is_symlink() for it in above)
    )


def pack(folder: Path, left_out: Callable[[str, list[str]], list[str]]) -> bytes:
    """An archive (tar) of a folder in which ranks may write meanwhile; what they have removed is left out."""
    import io
    import tarfile

    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.add(folder, ".", recursive=False)
        for above, folders, files in os.walk(folder):
            names = {*folders, *files}.difference(left_out(above, [*folders, *files]))
            folders[:] = [name for name in folders if name in names]
            for path in (Path(above, name) for name in sorted(names)):
                with contextlib.suppress(FileNotFoundError):
                    content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
                    info = tar.gettarinfo(path, f"./{path.relative_to(folder)}")
                    if info is not None:  # no socket
                        info.size = len(content) if info.isreg() else 0  # it may be longer or shorter by now
                        tar.addfile(info, io.BytesIO(content))
    return archive.getvalue()


def take(folder: Path, destination: Path) -> None:
    """Copy a folder, and remove it afterwards as far as this user may."""
    with building(destination) as new:
        shutil.copytree(folder, new, symlinks=True, dirs_exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def link(source: str, target: str) -> None:
    """Give a file a second name, or copy it where that is impossible."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def code_of(run: RunDirectory) -> CodeRecord:
    """The record of a job's code, with its `path`."""
    code: CodeRecord | None = (read_json(run.job) or {}).get("code")
    if code is None or not os.path.isdir(code["path"]):
        raise Refused(f"the code of job {run.path.name} is gone; submit the job again")
    return code


def copy_of(
    code: CodeRecord,
    destination: Path,
    without: Callable[[str, list[str]], list[str]] | None = None,
    copy: Callable[[str, str], object] = shutil.copy2,
) -> None:
    """Copy the code of another job in its current state, with the files that the job wrote there."""
    with building(destination) as new:
        try:
            shutil.copytree(code["path"], new, symlinks=True, dirs_exist_ok=True, ignore=without, copy_function=copy)
        except shutil.Error as error:
            source, _, why = error.args[0][0]
            raise Refused(f"cannot copy {source}: {why}; submit the job again") from None
