"""What a job leaves for one that goes on from it on other machines: its code and its newest checkpoint.

The machine that has them says what there is (`inventory`) and writes it (`write`); the client
takes it to the machine of the new job, which puts the checkpoint in place (`place`). A script with several runs has a
folder of checkpoints for each, so the archive (tar) of a checkpoint has `1/step-000123/model.pt`,
`2/step-000100/model.pt` and so on. Other files in the job's own folder for checkpoints come along; those in a folder of
the user stay there.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from paceline.contract import checkpoint
from paceline.contract.nodejob import StoredJob
from paceline.node.errors import Refused
from paceline.node.files import read_json
from paceline.node.rundir.directory import SAVED, RunDirectory, job_around

from .code_folder import code_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from typing import BinaryIO, Literal, Protocol

    from paceline.contract.records import CheckpointRecord, CodeRecord, DataRecord, Inventory, KeptCheckpoint

    from .code_folder import Readable

    class Writable(Protocol):
        """Takes bytes."""

        def write(self, data: bytes, /) -> int:
            """Take them all."""


_DURABLE = 256 * 1024 * 1024  # bytes between two flushes to the disk, so that none of them takes long
_RUN = re.compile(r"[1-9]\d{0,5}")
_SAFE = re.compile(r"[A-Za-z0-9_][^/\0]*")
_NOTHING: dict[str, object] = {"spec": {}, "framework": None, "created": 0.0}  # of a job whose file is gone


class _Kept(NamedTuple):
    """The folder for checkpoints of a script's n-th run, and its newest whole checkpoint."""

    number: int
    folder: Path
    newest: Path | None
    listing: checkpoint.Listing | None


# -- where they are ----------------------------------------------------------------------------------------------------


def inventory(run: RunDirectory) -> Inventory:
    """What a job has here. Reads the newest checkpoint, to be sure that it is whole."""
    job, saved, base, kept = _found(run)
    code = job.code
    place, path = _place(run, base, code)
    newest = [it for it in kept if it.listing is not None]
    leading = max(newest, key=lambda it: it.listing["serial"] if it.listing else 0, default=None)
    for it in newest:
        if saved is not None and it.folder.name == Path(str(saved.get("folder"))).name:
            leading = it
    found: KeptCheckpoint | None = None
    if leading is not None and leading.listing is not None:
        found = {
            "serial": leading.listing["serial"],
            "step": leading.listing["step"],
            "folder": str(leading.folder),
            "ids": {str(it.number): it.listing["id"] for it in newest if it.listing is not None},
        }
    sizes = [size for _, size, _ in _files(run, kept)]
    return {
        "code": code,
        "checkpoint_dir": job.spec.checkpoint_dir,
        "saved": saved,
        "checkpoint": found,
        "bytes": sum(sizes),
        "files": len(sizes),
        "place": place,
        "path": path,
        "volume": _volume(base, job.data),
        "has_others": place == "folder" and found is None and _is_filled(base),
    }


class _Found(NamedTuple):
    """What a job has noted, the folder of its first run's checkpoints, and all runs with their newest whole ones."""

    job: StoredJob
    saved: CheckpointRecord | None
    base: Path
    kept: list[_Kept]


def _places(
    run: RunDirectory,
) -> tuple[StoredJob, CheckpointRecord | None, list[tuple[Path, list[tuple[int, Path]]]]]:
    """A job, what it has saved last, and where it may have checkpoints: folders, each with those of its runs."""
    job, node = StoredJob.from_json({**_NOTHING, **(read_json(run.job) or {})}), read_json(run.spec) or {}
    saved: CheckpointRecord | None = read_json(run.path / SAVED)  # type: ignore[assignment]  # as the library writes it
    work = Path(str(node.get("working_dir", "/")))
    given = node.get("env", {}).get("PACELINE_CHECKPOINT_DIR")
    usual = _outside(Path(os.path.normpath(work / given)) if given else run.path / "checkpoints", job.data)
    bases = {usual: None}
    if saved is not None:  # the script may have chosen another one
        bases[_outside(Path(os.path.normpath(work / str(saved.get("folder", "")))), job.data)] = None
    return job, saved, [(base, _runs(base, saved if base == usual else None)) for base in bases]


def _found(run: RunDirectory, ids: Mapping[str, str] | None = None) -> _Found:
    """What a job has; of each run the checkpoint with its id of `ids`, if they are given."""
    job, saved, places = _places(run)
    found = [(base, [_kept(*it, ids) for it in runs]) for base, runs in places]
    return _Found(job, saved, *next((it for it in found if any(kept.newest for kept in it[1])), found[0]))


def _kept(number: int, folder: Path, ids: Mapping[str, str] | None) -> _Kept:
    for path, listing in checkpoint.newest_first(folder):
        if checkpoint.is_whole(path, listing) if ids is None else listing["id"] == ids.get(str(number)):
            return _Kept(number, folder, path, listing)
    return _Kept(number, folder, None, None)


def _runs(base: Path, saved: CheckpointRecord | None) -> list[tuple[int, Path]]:
    """The folders of a script's runs: `checkpoints`, `checkpoints-2`, … up to the one that has saved last."""
    last = re.fullmatch(re.escape(base.name) + r"-(\d{1,4})", Path(str(saved.get("folder")) if saved else "").name)
    numbers = range(1, (int(last[1]) if last else 1) + 1)
    return [(number, folder) for number in numbers if (folder := of_run(base, number)).is_dir()]


def _place(run: RunDirectory, base: Path, code: CodeRecord | None) -> tuple[Literal["run", "code", "folder"], str]:
    if code is not None and base.is_relative_to(code["path"]):
        return "code", str(base.relative_to(code["path"]))
    if base.is_relative_to(run.path):
        return "run", str(base.relative_to(run.path))
    return "folder", str(base)


def _outside(path: Path, data: Iterable[DataRecord]) -> Path:
    """The path outside of the job's mounts of a path that its ranks used."""
    for source in data:
        if source.get("mount") and path.is_relative_to(source["wanted"]):
            return Path(source["path"], path.relative_to(source["wanted"]))
    return path


def _volume(path: Path, data: Iterable[DataRecord]) -> list[str] | None:
    for source in data:
        if path.is_relative_to(source["path"]):
            return [str(source["volume"]), str(path.relative_to(source["path"]))]
    return None


def _is_filled(folder: Path) -> bool:
    try:
        return any(not path.name.startswith(".") for path in folder.iterdir())
    except OSError:
        return False


# -- the machine that has them -----------------------------------------------------------------------------------------


def own_checkpoints(run: RunDirectory) -> Callable[[str, Iterable[str]], list[str]]:
    """For `shutil.copytree`: which names of a folder are checkpoints of this job."""
    folders = {str(folder) for _, runs in _places(run)[2] for _, folder in runs}
    return lambda folder, names: [name for name in names if folder in folders and checkpoint.NAME.fullmatch(name)]


def check_fresh(run: RunDirectory) -> None:
    """Check that a job that begins anew does not find checkpoints where the script of this job keeps them."""
    job, _, base, kept = _found(run)
    place, _ = _place(run, base, job.code)
    in_a_job = job_around(base.parent) is not None
    if place == "folder" and not in_a_job and any(it.newest for it in kept):
        raise Refused(
            f"--fresh: there are checkpoints in {base}, and the job would resume from them; name another folder with "
            "--checkpoint-dir, or move them away if the script names this one"
        )


def write(
    run: RunDirectory, what: Literal["code", "checkpoint"], ids: Mapping[str, str], out: Writable, *, fresh: bool
) -> None:
    """Write the job's code, or its checkpoints with these ids, as an archive (tar)."""
    try:
        with run.kept():
            if what == "code":
                write_code(run, out, fresh=fresh)
            else:
                write_checkpoint(run, ids, out)
    except FileNotFoundError:
        raise Refused(f"job {run.path.name} was just deleted") from None


def write_code(run: RunDirectory, out: Writable, *, fresh: bool = False) -> None:
    """Write the job's copy of its code, as it is now, as an archive (tar)."""
    code = code_of(run)
    is_own = own_checkpoints(run) if fresh else lambda folder, names: []

    def without(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        path = Path(code["path"], member.name)
        return None if is_own(str(path.parent), [path.name]) else member

    with tarfile.open(fileobj=out, mode="w|") as tar:  # type: ignore[call-overload]  # it has all that is used
        tar.add(code["path"], arcname=".", filter=without)


def write_checkpoint(run: RunDirectory, ids: Mapping[str, str], out: Writable) -> None:
    """Write the checkpoints with these ids, one for each run of the script, as an archive (tar)."""
    kept = _found(run, ids).kept
    if {str(it.number): it.listing["id"] for it in kept if it.listing is not None} != dict(ids):
        raise Refused(f"the checkpoints of job {run.path.name} have changed meanwhile; try again")
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar:  # type: ignore[call-overload]
        for path, _, name in _files(run, kept):
            with open(path, "rb") as file:
                info = tar.gettarinfo(arcname=name, fileobj=file)
                tar.addfile(info, file)


def _files(run: RunDirectory, kept: list[_Kept]) -> Iterator[tuple[Path, int, str]]:
    """The files to send, with their sizes, and their names in the archive."""
    for number, folder, newest, listing in kept:
        if newest is not None and listing is not None:
            for name in (*listing["files"], checkpoint.MANIFEST):
                path = newest / name
                yield path, path.stat().st_size, f"{number}/{newest.name}/{name}"
        if folder.is_relative_to(run.path):
            for path in _others(folder):
                yield path, path.stat().st_size, f"{number}/{path.relative_to(folder)}"


def _others(folder: Path) -> Iterator[Path]:
    """The files that are neither paceline's checkpoints nor hidden."""
    for root, folders, names in os.walk(folder):
        below = Path(root)
        folders[:] = [
            name for name in sorted(folders)
            if not name.startswith(".") and not (below == folder and checkpoint.NAME.fullmatch(name))
        ]  # fmt: skip
        for name in sorted(names):
            if not name.startswith(".") and (below / name).is_file() and not (below / name).is_symlink():
                yield below / name


# -- the machine that gets them ----------------------------------------------------------------------------------------


def holds(base: Path, ids: Mapping[str, str]) -> bool:
    """Whether a folder has these checkpoints already: a disk that both machines see, or a copy."""
    there = 0
    for number, wanted in ids.items():
        folder = of_run(base, int(number))
        found = {listing["id"] for _, listing in checkpoint.newest_first(folder)}
        if wanted in found:
            there += 1
        elif found or any(folder.glob("step-*")):
            raise Refused(f"{folder} has checkpoints of something else; name another folder with --checkpoint-dir")
    return there == len(ids)


def of_run(base: Path, number: int) -> Path:
    """The folder of a script's n-th run."""
    return base if number == 1 else base.with_name(f"{base.name}-{number}")


class Placed(NamedTuple):
    """What `place` has made: checkpoints, complete or not; and other files and folders in the order of creation."""

    checkpoints: list[Path]
    others: list[Path]


def place(stream: Readable, base: Path) -> Placed:
    """Put the checkpoints of an archive in place: durable, whole, each with one rename; all or none."""
    made = Placed([], [])
    try:
        _unpack(stream, base, made)
    except BaseException:
        take_back(made)
        raise
    return made


def take_back(made: Placed) -> None:
    """Remove what `place` has made, for a job that does not start after all."""
    for path in made.checkpoints:
        shutil.rmtree(path, ignore_errors=True)
    for path in reversed(made.others):
        with contextlib.suppress(OSError):
            (path.rmdir if path.is_dir() else path.unlink)()


def _unpack(stream: Readable, base: Path, made: Placed) -> None:
    hidden: dict[Path, Path] = {}  # where a checkpoint will be → where it is written
    with tarfile.open(fileobj=stream, mode="r|") as tar:  # type: ignore[call-overload]  # it has all that is used
        for member in tar:
            number, *names = member.name.split("/")
            if not (member.isreg() and _RUN.fullmatch(number) and names and all(map(_SAFE.fullmatch, names))):
                raise Refused(f"{member.name!r} cannot be in a checkpoint; try again")
            folder = of_run(base, int(number))
            target = folder.joinpath(*names)
            _make_folders(folder, made)
            if len(names) == 2 and checkpoint.NAME.fullmatch(names[0]):
                final = folder / names[0]
                if final not in hidden:
                    hidden[final] = _begin(final, made)
                target = hidden[final] / names[1]
            else:
                _make_folders(target.parent, made)
            _write(target, tar.extractfile(member), made)
    while stream.read(1 << 16):
        pass
    for final, temporary in hidden.items():
        listing = checkpoint.listing(temporary)
        if listing is None or not checkpoint.is_whole(temporary, listing):
            raise Refused("the checkpoint arrived damaged; try again")
        (temporary / checkpoint.MARKER).unlink()
        _sync(temporary)
        if os.path.lexists(final):
            raise Refused(f"{final} is there already; name another folder with --checkpoint-dir")
        temporary.rename(final)
        made.checkpoints.append(final)
        _sync(final.parent)


def _begin(final: Path, made: Placed) -> Path:
    """A hidden folder beside a checkpoint that is coming; the library removes it if this process is killed."""
    match = checkpoint.NAME.fullmatch(final.name)
    assert match is not None
    temporary = checkpoint.temporary_name(final.parent, int(match[1]), os.urandom(4).hex())
    temporary.mkdir()
    made.checkpoints.append(temporary)
    (temporary / checkpoint.MARKER).write_bytes(checkpoint.MARK)
    return temporary


def _make_folders(folder: Path, made: Placed) -> None:
    for path in reversed([folder, *folder.parents]):
        if not path.is_dir():
            path.mkdir(exist_ok=True)
            made.others.append(path)


def _write(path: Path, content: BinaryIO, made: Placed) -> None:
    try:
        file = open(path, "xb", buffering=0)  # noqa: SIM115 - closed below
    except FileExistsError:
        raise Refused(f"{path} is there already; name another folder with --checkpoint-dir") from None
    with file:
        made.others.append(path)  # not before: a file of the user stays
        unsynced = 0
        while chunk := content.read(checkpoint.CHUNK):
            rest = memoryview(chunk)
            while rest:
                rest = rest[file.write(rest) :]
            unsynced += len(chunk)
            if unsynced > _DURABLE:
                os.fsync(file.fileno())
                unsynced = 0
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # a file system without this operation
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
