"""The verbs for job files: `init` writes a first one, and `schema` prints their keys for editors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click

from paceline.cli.flags.option import Option, SectionedCommand, new_file
from paceline.cli.terminal.write import say
from paceline.job.errors import UserError

_SUFFIXES = (".yaml", ".yml")
_NO_SCRIPTS = re.compile(r"(setup|conftest|_.*|test_.*|.*_test)\.py")
_FIRST = ("train.py", "main.py")
_COLUMN = 34  # at which the comments begin
# Each line of the file and its comment.
_LINES = (
    ("# args: [--epochs, 10]", "its arguments"),
    ("# ranks: 2", "processes on each machine: a number, gpu, cpu or auto"),
    ("# nodes: 2", "machines; 2:4 where their number may change"),
    ("# devices: 1", "GPUs of each machine, for this job alone"),
    ("# backend: local", "where it runs, as --on takes it"),
    ("# image: registry/training:1", "container image, where jobs run in containers"),
    ("# code: {mode: snapshot}", "the job gets a copy of this folder"),
    ("# max_restarts: 3", "start again after a failure, from the last checkpoint"),
    ("# time_limit: 12h", "how long it may run"),
    ("# env: {LR: 1e-3}", "variables of the ranks"),
    ("# secrets: [WANDB_API_KEY]", "variables of yours that the ranks get, never stored or shown"),
    ('# data: ["training-data:/data"]', "volumes of the settings, and where the job sees them"),
    ("# tensorboard: true", "a TensorBoard goes with the job"),
    ("# ttl: 7d", "how long it is kept after its end"),
)


def _init(file: str, force: bool) -> int:
    """Write a job file with a script of this folder, and all else that a job can say as comments."""
    import yaml

    from paceline.job.writing import replace_file

    path = Path(file)
    _refuse_path(path, force)
    script = yaml.safe_dump({"script": _script()}, allow_unicode=True, width=float("inf")).strip()
    lines = [
        f"# What it would start:  paceline submit --dry-run {path}",
        f"# Start it:             paceline submit {path}",
        "# All keys:             paceline schema",
        *(f"{line:{_COLUMN}}  # {text}" for line, text in ((script, "each rank runs this file"), *_LINES)),
    ]
    replace_file(path, "\n".join(lines) + "\n")
    say(f"{path} is written; edit it, and start it with: paceline submit {path}")
    return 0


def _script() -> str:
    """Return the Python file here, or else one folder below, that is the most likely to train something."""
    here = Path()
    for pattern in ("*.py", "*/*.py"):
        found = [path for path in here.glob(pattern) if not _NO_SCRIPTS.fullmatch(path.name)]
        if found:
            return str(min(found, key=lambda path: (path.name not in _FIRST, path)))
    return _FIRST[0]


def _refuse_path(path: Path, force: bool) -> None:
    if path.suffix not in _SUFFIXES:
        raise UserError(f"--file {path}: a job file ends in .yaml; write for example --file {path.stem or 'job'}.yaml")
    if new_file("--file", str(path)).exists() and not force:
        raise UserError(f"{path} exists; name another one with --file, or overwrite it with --force")


init = SectionedCommand(
    "init",
    callback=_init,
    params=[
        Option(["--file"], default="job.yaml", metavar="FILE.yaml", help="The job file.  [default: job.yaml]"),
        Option(["--force"], is_flag=True, help="Overwrite the file if it is there."),
    ],
)


@click.command(cls=SectionedCommand)
def schema() -> None:
    """Print the JSON schema of job files.

    Editors complete and check job files with it; a file that begins with this line finds it itself:

    # yaml-language-server: $schema=job.schema.json
    """
    from paceline.job.spec import JobSpec

    click.echo(json.dumps(JobSpec.schema(), indent=2))
