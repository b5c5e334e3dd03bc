"""`paceline checkpoint`: what is in checkpoints, whether they are intact, their parts as files, and files as one."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from paceline.cli.flags.completion import jobs_and_folders
from paceline.cli.flags.option import Option, SectionedCommand, new_file, output_option
from paceline.cli.flags.selection import known
from paceline.cli.flags.where import OF_JOBS
from paceline.cli.terminal.tables import Column, if_known, show
from paceline.cli.terminal.write import say
from paceline.contract.checkpoint import MANIFEST, NAME, damage, listing, newest_first, part_files, piece_files
from paceline.job.errors import UserError
from paceline.job.quantities import show_size
from paceline.job.text import counted, printable

_KINDS = (".safetensors", ".pt")
# Runs in a process of its own, since this one imports no torch; nothing in the working directory hides its modules.
_WITH_TORCH = (
    "import sys; sys.path = [it for it in sys.path if it]; from paceline.train.checkpoint.{} import main; main()"
)


@dataclass(frozen=True)
class _File:
    """A file of a checkpoint."""

    name: str
    size: int
    crc32: str
    problem: str | None  # as far as its size shows


class _Saved:
    """A checkpoint as its manifest describes it, which is None if it cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path, self.manifest = path, listing(path)
        records = {} if self.manifest is None else self.manifest["files"]
        self.files = [
            _File(name, it["size"], it["crc32"], damage(path / name, it["size"], it["crc32"], reads=False) or None)
            for name, it in sorted(records.items())
        ]
        self.size = sum(file.size for file in self.files)
        self.shards = len(piece_files(records))
        self.problem = next((f"{file.name}: {file.problem}" for file in self.files if file.problem), None)
        if self.manifest is None:
            why = "damaged, or of another version" if (path / MANIFEST).exists() else "no such file"
            self.problem = f"{MANIFEST}: {why}"

    def of_manifest(self, key: str) -> Any:
        """A value of the manifest; None if there is none."""
        return None if self.manifest is None else self.manifest.get(key)

    def to_dict(self) -> dict[str, object]:
        """The stable keys of `-o json`."""
        about = {key: self.of_manifest(key) for key in ("step", "saved_at", "world_size", "weights_only")}
        files = [vars(file) for file in self.files]
        return {"path": str(self.path), **about, "size": self.size, "problem": self.problem, "files": files}


def _found(where: str) -> tuple[list[_Saved], bool]:
    """The checkpoints in a folder or of a job, newest first, and last those without a manifest; whether it is one."""
    folder = _folder(where)
    if NAME.fullmatch(folder.resolve().name) or (folder / MANIFEST).exists():
        return [_Saved(folder)], True
    try:
        names = sorted(path.name for path in folder.iterdir() if NAME.fullmatch(path.name))
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}; name a folder that you can read") from None
    if not names:
        raise UserError(f"{folder} has no checkpoints; name a folder with step-…, one of these, or a job")
    paths = dict.fromkeys([*(path for path, _ in newest_first(folder)), *(folder / name for name in names)])
    return [_Saved(path) for path in paths], False


def _folder(where: str) -> Path:
    """The folder that is meant: it is named itself, or a job that has its checkpoints there."""
    if os.path.isdir(where):
        return Path(where)
    if os.path.lexists(where) or "/" in where:
        raise UserError(f"{where} is no folder; name a folder with checkpoints, one checkpoint, or a job")
    try:
        (job,) = known([where])
    except UserError as error:
        raise UserError(f"there is no folder {where}, and {error}") from None
    folder = Path(job.checkpoint["folder"] if job.checkpoint else os.path.join(job.folder, "checkpoints"))
    if not folder.is_dir():
        if job.checkpoint is None:
            raise UserError(f"job {where} has saved no checkpoint; see paceline get {where}")
        raise UserError(
            f"the checkpoints of job {where} are in {folder}, which is not here; go to a machine that has it"
        )
    return folder


# -- show and verify ---------------------------------------------------------------------------------------------------


def _show(where: str, output: str) -> None:
    """List the checkpoints in DIR, the newest first, or the files of one; reads manifests and sizes alone.

    DIR is a folder with checkpoints, one checkpoint, or the name of a job.
    """
    found, is_one = _found(where)
    if not is_one or output in ("json", "yaml"):
        show(found, _COLUMNS, output, _Saved.to_dict)
        return
    (one,) = found
    if one.manifest is None:
        click.echo(printable(f"{one.path}: {one.problem}"))
        return
    what = f"step {one.manifest['step']} of {counted(one.manifest['world_size'], 'rank')}, saved"
    if one.of_manifest("weights_only"):
        what = "weights to begin with, imported"
    click.echo(f"{what} at {one.manifest['saved_at']}, {show_size(one.size)}")
    click.echo()
    show(one.files, _FILES, output, vars)


_COLUMNS: list[Column[_Saved]] = [
    Column("NAME", lambda one: one.path.name),
    Column("STEP", lambda one: if_known(str, one.of_manifest("step"))),
    Column("SAVED AT", lambda one: one.of_manifest("saved_at"), keep=1),
    Column("RANKS", lambda one: if_known(str, one.of_manifest("world_size")), keep=2),
    Column("SIZE", lambda one: show_size(one.size) if one.files else None, keep=4),
    Column("FILES", lambda one: str(len(one.files)) if one.files else None),
    Column("SHARDS", lambda one: str(one.shards) if one.shards else None, is_optional=True),
    Column("SIZES", lambda one: "right" if one.problem is None else f"wrong: {one.problem}", is_text=True, keep=5),
]
_FILES: list[Column[_File]] = [
    Column("FILE", lambda file: file.name),
    Column("SIZE", lambda file: show_size(file.size)),
    Column("CRC-32", lambda file: file.crc32, wide=True),
    Column("SIZES", lambda file: "right" if file.problem is None else f"wrong: {file.problem}", is_text=True, keep=5),
]


def _verify(where: str) -> int:
    """Read every file of the checkpoints in DIR, and compare it with its checksum; the exit code is 1 if one differs.

    DIR is a folder with checkpoints, one checkpoint, or the name of a job.
    """
    found, _ = _found(where)
    code = 0
    for one in found:
        if one.manifest is None:
            click.echo(printable(f"{one.path}: damaged: {one.problem}"))
            code = 1
        for file in one.files:
            why = damage(one.path / file.name, file.size, file.crc32)
            if why and not one.path.exists():
                say(f"{one.path} has been removed meanwhile")
                break
            click.echo(printable(f"{one.path / file.name}: {f'damaged: {why}' if why else 'intact'}"))
            code = 1 if why else code
    return code


# -- export ------------------------------------------------------------------------------------------------------------


def _export(where: str, *, file: str, part: str, force: bool) -> int:
    """Write a part of a checkpoint, as a rule the model, into one file, which is whole also if the model was sharded.

    A .safetensors file is written tensor by tensor; a .pt file is for torch.load, and takes memory for the whole part.
    If DIR has several checkpoints, it is the newest intact one.
    """
    target = Path(file)
    if target.suffix not in _KINDS:
        raise UserError(f"-o {file}: of which kind is it? let its name end in {' or '.join(_KINDS)}")
    if os.path.lexists(new_file("-o", file)) and not force:
        raise UserError(f"-o {file} exists; choose another file, or replace it with --force")
    _check_torch()
    for one in _found(where)[0]:
        problem = one.problem if one.manifest is None else _problem(one, part)
        if problem is None:
            _go_on("export", str(one.path), part, file, "force" * force)
        say(f"{one.path} is damaged and not used: {problem}")
    return 1


def _check_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise UserError(f"torch is not installed for {sys.executable}; use the paceline that is installed beside it")


def _go_on(module: str, *words: str) -> None:
    """Go on with torch, in place of this process."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-c", _WITH_TORCH.format(module), *words])


def _problem(one: _Saved, part: str) -> str | None:
    """What is damaged of the files that a part is in; None if they are intact."""
    records = {file.name: file for file in one.files}
    parts = part_files(records)
    if part not in parts:
        raise UserError(f"--part {part}: {one.path} has no such part; choose one of {', '.join(parts)}")
    for name in (parts[part], *piece_files(records)):
        if why := damage(one.path / name, records[name].size, records[name].crc32):
            return f"{name}: {why}"
    return None


# -- import ------------------------------------------------------------------------------------------------------------


def _import(files: tuple[str, ...], *, folder: str, force: bool) -> None:
    """Make a checkpoint of the weights in FILEs, with which a new run begins: paceline run --checkpoint-dir DIR ….

    FILEs are of safetensors, or of torch.save with a state_dict; several make up one model. The model that the script
    sets up first gets the weights; everything else begins anew.
    """
    for file in files:
        if not os.path.isfile(file):
            raise UserError(f"{file} is no file; name files of safetensors, or of torch.save with a state_dict")
    target = Path(folder)
    is_there = target.is_dir()
    if not is_there and (os.path.lexists(target) or not target.absolute().parent.is_dir()):
        what = "is no folder" if os.path.lexists(target) else f"there is no folder {target.absolute().parent}"
        raise UserError(f"-o {folder}: {what}; choose another folder")
    if (target / MANIFEST).exists():
        raise UserError(f"-o {folder} is a checkpoint; name the folder that it is in, or another one")
    try:
        has_any = is_there and any(NAME.fullmatch(path.name) for path in target.iterdir())
    except OSError as error:
        raise UserError(f"-o {folder}: {error.strerror}; choose another folder") from None
    if has_any and not force:
        raise UserError(f"-o {folder} has checkpoints; choose another folder, or add a newer one to them with --force")
    _check_torch()
    _go_on("import_weights", folder, "force" * force, *files)


@click.group()
def checkpoint() -> None:
    """Show, verify, export and import checkpoints (saved states to go on from), on this machine.

    No training needs to run.
    """


def _where() -> click.Argument:
    return click.Argument(["where"], metavar="DIR", **{**OF_JOBS, "shell_complete": jobs_and_folders})


_verbs = [
    SectionedCommand("show", callback=_show, short_help="List checkpoints.", params=[_where(), output_option()]),
    SectionedCommand("verify", callback=_verify, short_help="Compare all files with checksums.", params=[_where()]),
    SectionedCommand(
        "export",
        callback=_export,
        short_help="Write the model into one file.",
        params=[
            _where(),
            Option(
                ["-o", "--output", "file"], metavar="FILE", required=True, help="Write FILE.safetensors or FILE.pt."
            ),
            Option(["--part"], metavar="PART", default="model", help="Part to write.  [default: model]"),
            Option(["--force"], is_flag=True, help="Replace FILE if it exists."),
        ],
    ),
    SectionedCommand(
        "import",
        callback=_import,
        short_help="Begin with the weights in files.",
        params=[
            click.Argument(["files"], metavar="FILE…", nargs=-1, required=True),
            Option(["-o", "--output", "folder"], metavar="DIR", required=True, help="Where the checkpoint is written."),
            Option(["--force"], is_flag=True, help="Add it as the newest one if DIR has checkpoints."),
        ],
    ),
]
for _verb in _verbs:
    checkpoint.add_command(_verb)
