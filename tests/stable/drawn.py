"""What is stable, drawn from the code: a line for each thing that a script, a job file or a program may rely on."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from tests.typed import typed

from paceline.cli.main import VERBS, cli
from paceline.job.settings import Defaults, LocalSettings, Settings, Target

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import Paceline

ROOT = Path(__file__).parents[2]
OPTIONS = ("ssh.target", "slurm.options", "kubernetes.options")  # of a target, by its backend
LOOKS = ("list", "get done", "events done", "why done", "checkpoint show done", "data list", "get failed")


def _default(value: object) -> str:
    """A default, without what differs from run to run; functions by their names."""
    return getattr(value, "__qualname__", None) or re.sub(r" at 0x\w+", "", repr(value))


def _signature(name: str, function: Any) -> Iterator[str]:
    for it in inspect.signature(function).parameters.values():
        if it.name != "self":
            default = "" if it.default is it.empty else f" = {_default(it.default)}"
            yield f"{name}({it.name}{default}) {it.kind.description}"


def names() -> set[str]:
    """Public names of Python, with their parameters, attributes and bases."""
    found = set()
    for module in ("paceline", "paceline.jobs", "paceline.horovod", "paceline.horovod.torch"):
        public = importlib.import_module(module)
        for name in public.__all__:
            thing, full = getattr(public, name), f"{module}.{name}"
            found.add(full)
            if not isinstance(thing, type):
                found.update(_signature(full, thing) if inspect.isroutine(thing) else ())
            elif issubclass(thing, BaseException):
                found.add(f"{full} is a {next(it.__name__ for it in thing.__mro__ if it.__module__ == 'builtins')}")
            elif fields := getattr(thing, "__struct_fields__", ()) or getattr(thing, "_fields", ()):
                found.update(f"{full}.{field}" for field in fields)
            elif dataclasses.is_dataclass(thing) and "__init__" in vars(thing):
                found.update(_signature(full, thing))
            else:
                for member, value in inspect.getmembers(thing):
                    if not member.startswith("_") and not hasattr(list, member):
                        found.add(f"{full}.{member}")
                        found.update(_signature(f"{full}.{member}", value) if inspect.isfunction(value) else ())
    return found


def _of_verb(path: str, command: click.Command, above: click.Context) -> Iterator[str]:
    yield path
    context = click.Context(command, info_name=path, parent=above)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _of_verb(f"{path} {name}", inner, context)
    for it in command.params:
        if isinstance(it, click.Option):
            takes = (
                ""
                if it.is_flag or it.count
                else f" {it.nargs if it.nargs != 1 else ''}VALUE".replace(" VALUE", " VALUE")
            )
            chosen = f" ({'|'.join(map(str, it.type.choices))})" if isinstance(it.type, click.Choice) else ""
            for flag in (*it.opts, *it.secondary_opts):
                yield f"{path} {flag}{takes}{chosen}"
            for variable in [it.envvar] if isinstance(it.envvar, str) else it.envvar or ():
                yield f"{path} {it.opts[0]} from {variable}"
        else:
            yield f"{path} {it.make_metavar(context)}"


def flags() -> set[str]:
    """Verbs, their flags with what they take, their arguments, and the variables in the place of flags."""
    found = set()
    with click.Context(cli, info_name="paceline") as outer:
        for verb in VERBS:
            command = cli.get_command(outer, verb)
            assert command is not None
            found.update(_of_verb(f"paceline {verb}", command, outer))
    return found


def keys() -> set[str]:
    """Keys of job files with their types and defaults, and of settings."""
    found: set[str] = set()

    def of(name: str, schema: dict[str, Any]) -> None:
        rest = {
            key: value for key, value in schema.items() if key not in ("description", "properties", "title", "$defs")
        }
        found.add(f"job file: {name}: {json.dumps(rest, sort_keys=True)}")
        for inner, its in schema.get("properties", {}).items():
            of(f"{name}.{inner}", its)

    schema = json.loads((ROOT / "docs" / "job.schema.json").read_text())
    for name, its in (*schema["properties"].items(), *schema.get("$defs", {}).items()):
        of(name, its)
    for table, model in {"": Settings, "local.": LocalSettings, "targets.NAME.": Target, "defaults.": Defaults}.items():
        found.update(f"settings: {table}{field}" for field in model.__struct_fields__)
    for home in OPTIONS:
        options = importlib.import_module(f"paceline.backends.{home}").Options
        found.update(
            f"settings: targets.NAME.{field} of {home.partition('.')[0]}" for field in options.__struct_fields__
        )
    return found


def codes() -> set[str]:
    """Exit codes, and variables that users set and ranks get, as the pages list them."""
    run, variables = ((ROOT / "docs" / page).read_text() for page in ("run.md", "variables.md"))
    found = {f"exit code {code}" for code in re.findall(r"^\| (\d+(?: \+ N)?) \|", run, re.MULTILINE)}
    return found | {f"variable {name}" for name in re.findall(r"(?<!_)PACELINE_[A-Z_]+", variables)}


def _paths(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _paths(f"{name}.{key}" if re.fullmatch(r"[a-z_]+", key) else f"{name}.NAME", inner)
    elif isinstance(value, list):
        yield f"{name}[]"
        for inner in value:
            yield from _paths(f"{name}[]", inner)
    else:
        kind = "number" if isinstance(value, (int, float)) and not isinstance(value, bool) else type(value).__name__
        yield f"{name}: {kind}"


def output(paceline: Paceline) -> set[str]:
    """What `-o json` has for recorded jobs: the path of each value, and its type."""
    found = set()
    for look in LOOKS:
        done = typed(paceline, *look.split(), "-o", "json")
        assert done.stdout, done.stderr
        found.update(_paths(look.replace(" done", " JOB").replace(" failed", " JOB"), json.loads(done.stdout)))
    return found


def files(folder: Path) -> set[str]:
    """The files of jobs and checkpoints, and the keys of those that other programs read."""
    found = set()
    for path in sorted(folder.rglob("*")):
        name = re.sub(r"\d{2,}", "N", re.sub(r"events\.out\.tfevents.*", "events.out.tfevents", path.name))
        where = (path.parent / name).relative_to(folder).parts[1:]
        shown = "JOB/" + re.sub(r"step-\d+", "step-N", "/".join(where))
        if path.is_dir() or not where:
            continue
        found.add(shown)
        if path.name in ("journal.jsonl", "metrics.jsonl"):
            for line in filter(None, path.read_text().splitlines()):
                record = json.loads(line)
                kind = record.get("event", "") if path.name == "journal.jsonl" else ""
                found.update(f"{shown}: {kind} {key}".replace("  ", " ") for key in record)
        elif path.name in ("job.json", "manifest.json"):
            found.update(f"{shown}: {key}" for key in json.loads(path.read_text()))
    return found
