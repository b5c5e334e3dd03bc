"""`paceline init`: a first job file, and the settings that hosts need, by three questions or by flags."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.backends import registry
from paceline.cli.flags.options import Count, Option, SectionedCommand, in_section
from paceline.cli.terminal.write import say
from paceline.job import settings_files
from paceline.job.errors import UserError, nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paceline.backends.base import Flag
    from paceline.job.settings import Settings

_SUFFIXES = (".yaml", ".yml")
_NO_SCRIPTS = re.compile(r"(setup|conftest|_.*|test_.*|.*_test)\.py")
_FIRST = ("train.py", "main.py")
_MOST_SHOWN = 8
_COLUMN = 34  # at which the comments begin
_FLAGS = {
    "script": "--script",
    "ranks": "-n",
    "devices": "--gpus",
    "image": "--image",
    "backend": "--on",
    "nodes": "-H",
}
# Key, the value of a line that is commented out, and the comment of each line.
_KEYS = (
    ("script", "train.py", "each rank runs this file"),
    ("args", "[--epochs, 10]", "its arguments"),
    ("ranks", "2", "processes on each machine: a number, gpu, cpu or auto"),
    ("nodes", "2", "machines; 2:4 where their number may change"),
    ("devices", "1", "GPUs of each machine, for this job alone"),
    ("backend", "local", "where it runs, as --on takes it"),
    ("image", "registry/training:1", "container image, where jobs run in containers"),
    ("code", "{mode: snapshot}", "the job gets a copy of this folder"),
    ("max_restarts", "3", "start again after a failure, from the last checkpoint"),
    ("time_limit", "12h", "how long it may run"),
    ("env", "{LR: 1e-3}", "variables of the ranks"),
    ("secrets", "[WANDB_API_KEY]", "variables of yours that the ranks get, never stored or shown"),
    ("data", '["training-data:/data"]', "volumes of the settings, and where the job sees them"),
    ("tensorboard", "true", "a TensorBoard goes with the job"),
    ("ttl", "7d", "how long it is kept after its end"),
)


def _init(**given: Any) -> int:
    """Write a job file with comments, after three questions: which script, where, how many ranks.

    Flags answer them beforehand. Hosts become a target in the project's paceline.toml, or in your own settings. No file
    is overwritten without --force; settings that exist get one more table, and keep all else.
    """
    from paceline.job.settings import load

    path, hosts = Path(given["file"]), _hosts(given["hosts"])
    _refuse_path(path, given["force"])
    settings = load()
    if given["ranks"] is not None:
        _ranks(given["ranks"])
    may_ask = _may_ask(given)

    def answer(name: str, question: str, suggested: str, read: Callable[[str], Any]) -> Any:
        if given[name] is not None:
            return read(given[name])
        return _ask(question, suggested, read) if may_ask else read(suggested)

    found = _scripts()
    shown = f" ({', '.join(found[:_MOST_SHOWN])}{' …' if len(found) > _MOST_SHOWN else ''})" if len(found) > 1 else ""
    fields = {"script": answer("script", f"Which script{shown}?", found[0] if found else "", _script)}
    kinds = sorted(registry.kinds_of_hosts())
    places = [*registry.BACKENDS, *(name for name in settings.targets if name not in registry.BACKENDS)]
    if hosts and given["on"] is None:
        given["on"] = kinds[0]
    where = {
        registry.HERE: "this machine",
        **dict.fromkeys(kinds, "hosts"),
        **dict.fromkeys(settings.targets, "target"),
    }
    listed = ", ".join(f"{name} ({where[name]})" if name in where else name for name in places)
    on = answer("on", f"Where does it run: {listed}?", registry.HERE, lambda text: _place(text, places))
    if hosts and (on not in kinds or on in settings.targets):
        raise UserError(f"-H names hosts, but --on {on} needs none; leave one of them out")
    needs_hosts = on in kinds and on not in settings.targets
    if needs_hosts and not hosts:
        if not may_ask:
            raise UserError(f"--on {on} needs hosts; name them with -H, for example -H node1,node2:4")
        hosts = _ask("Which hosts (for example node1,node2:4)?", "", _hosts)
    target = given["target"] if needs_hosts or given["settings"] else on
    suggested, devices = "1", ""
    if given["ranks"] is None and on == registry.HERE:
        suggested, devices = _of_this_machine()
    elif any(re.search(r":\d+$", host) for host in hosts):
        suggested = "slots"
    fields |= answer("ranks", f"How many ranks on each machine{devices}?", suggested, _ranks)
    fields |= {"backend": target, **({"nodes": len(hosts), "code": {"mode": "snapshot"}} if hosts else {})}
    fields |= {key: given[key] for key in ("devices", "image") if given[key] is not None}
    table = None if target == on else _target_table(given["settings"], target, on, hosts, settings)
    _write(path, fields, table)
    if table is not None:
        say(f"{table[0]} has the target {target} now")
    say(f"{path} is written; start it with: paceline submit {path}")
    return 0


# -- questions ---------------------------------------------------------------------------------------------------------


def _may_ask(given: Mapping[str, Any]) -> bool:
    """Whether there is somebody to ask; refuses a command that must ask and cannot."""
    if given["yes"]:
        return False
    if sys.stdin.isatty() and sys.stderr.isatty():
        return True
    answered = {**given, "on": given["on"] or given["hosts"]}
    missing = [_FLAGS[name] if name != "on" else "--on" for name in ("script", "on", "ranks") if answered[name] is None]
    if missing:
        raise UserError(f"there is no terminal to ask on; give {', '.join(missing)}, or -y for what would be suggested")
    return False


def _ask(question: str, suggested: str, read: Callable[[str], Any]) -> Any:
    """Ask until the answer can be read."""
    while True:
        click.echo(f"{question} [{suggested}] " if suggested else f"{question} ", err=True, nl=False)
        line = sys.stdin.readline()
        if not line:
            click.echo(err=True)
            raise click.Abort
        try:
            return read(line.strip() or suggested)
        except UserError as error:
            say(str(error))


def _scripts() -> list[str]:
    """Python files of this folder that may train something, or else of the folders in it."""
    here = Path()
    for pattern in ("*.py", "*/*.py"):
        found = sorted(str(path) for path in here.glob(pattern) if not _NO_SCRIPTS.fullmatch(path.name))
        if found:
            return sorted(found, key=lambda name: (Path(name).name not in _FIRST, name))
    return []


def _script(text: str) -> str:
    if not text:
        raise UserError("there is no Python file here; name the script with --script")
    if not Path(text).is_file():
        raise UserError(
            f"--script {text}: no such file; {nearest(text, found) if (found := _scripts()) else 'name one'}"
        )
    return text


def _place(text: str, places: list[str]) -> str:
    if text not in places:
        raise UserError(f"--on {text}: no such target; {nearest(text, places)}")
    return text


def _hosts(text: str | None) -> list[str]:
    from paceline.backends.hosts import in_list

    if text is None:
        return []
    return [host.name if host.slots is None else f"{host.name}:{host.slots}" for host in in_list("-H", text)]


def _ranks(text: str) -> dict[str, Any]:
    """`2`, `2 gpus` for as many GPUs, or a word."""
    found = re.fullmatch(r"([1-9]\d{0,3})(\s*gpus?)?", text)
    if found:
        count = int(found[1])
        return {"ranks": count, "devices": count} if found[2] else {"ranks": count}
    if text not in ("gpu", "cpu", "auto", "slots"):
        raise UserError(
            f"-n {text!r} is neither a number from 1 on nor gpu, cpu or auto; write for example 2, or '2 gpus'"
        )
    return {"ranks": text}


def _of_this_machine() -> tuple[str, str]:
    """How many ranks to suggest here, and what this machine has, in words."""
    from paceline.backends.base import Metered, able

    (node,) = able(registry.load(), Metered).nodes(say)
    has_gpus = bool(node.gpus and node.devices)
    has = f"{len(node.devices)} {'GPU' if has_gpus else 'device'}{'' if len(node.devices) == 1 else 's'}"
    cores = f"{node.cores:g} core{'' if node.cores == 1 else 's'}"
    return "gpu" if has_gpus else "1", f" (this one has {has if node.devices else 'no GPU'} and {cores})"


# -- files -------------------------------------------------------------------------------------------------------------


def _refuse_path(path: Path, force: bool) -> None:
    if path.suffix not in _SUFFIXES:
        raise UserError(f"--file {path}: a job file ends in .yaml; write for example --file {path.stem or 'job'}.yaml")
    if not path.parent.is_dir():
        raise UserError(f"--file {path}: there is no folder {path.parent}; name a file in one that exists")
    if path.is_dir() or (path.exists() and not force):
        raise UserError(f"{path} exists; name another one with --file, or overwrite it with --force")


def _job_file(path: Path, fields: Mapping[str, Any]) -> str:
    lines = [
        f"# What it would start:  paceline submit --dry-run {path}",
        f"# Start it:             paceline submit {path}",
        "# All keys:             paceline schema",
    ]
    for key, example, comment in _KEYS:
        line = f"{key}: {_yaml(fields[key])}" if key in fields else f"# {key}: {example}"
        lines.append(f"{line:{_COLUMN}}  # {comment}")
    return "\n".join(lines) + "\n"


def _yaml(value: Any) -> str:
    import yaml

    text: str = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=float("inf"))
    return text.removesuffix("...\n").strip()


def _write(path: Path, fields: Mapping[str, Any], table: tuple[Path, list[str]] | None) -> None:
    """Write the job file, and before it a table of the settings, if what is asked for can be read from it."""
    from paceline.job.reading import read
    from paceline.job.writing import replace_file

    def check(file: str) -> bool:
        asked = read(file, fields, lambda key_path: _FLAGS.get(str(key_path[0]), str(key_path[0])))
        is_right = read(file) == asked
        if is_right and table is not None:
            _add_table(*table)
        return is_right

    replace_file(path, _job_file(path, fields), check)


def _target_table(
    whose: str | None, name: str, kind: str, hosts: list[str], settings: Settings
) -> tuple[Path, list[str]]:
    """The settings file that gets a new target, and the lines of that."""
    if kind == registry.HERE:
        raise UserError("this machine needs no target; leave --settings out")
    if kind in settings.targets:
        raise UserError(f"{kind} is a target of the settings already; leave --settings out")
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,63}", name) or name == registry.HERE:
        raise UserError(f"--target {name!r} is no name for a target; write for example --target lab")
    if name in settings.targets:
        raise UserError(f"there is a target {name} already; name another one with --target, or use it with --on {name}")
    registry.load(name, {"hosts": hosts} if hosts else {}, kind=kind, given_by={"hosts": "-H"} if hosts else {})
    lines = [f"[targets.{name}]", f'backend = "{kind}"']
    if hosts:
        lines.append(f"hosts = {json.dumps(hosts, ensure_ascii=False)}")
    flags = [flag for flag in registry.flags().get(kind, ()) if flag.names_hosts is None and _is_of_target(flag)]
    lines += [f"{_example(flag):{_COLUMN}}  # {flag.help}" for flag in flags]
    file = settings_files.user_file() if whose == "user" else settings_files.project_file()
    if file is None and whose == "user":
        raise UserError("you have no home folder; leave --settings user out")
    return file or Path(settings_files.PROJECT_FILE), lines


def _is_of_target(flag: Flag) -> bool:
    return flag.repeats or not flag.job


def _example(flag: Flag) -> str:
    value = '{NAME = "VALUE"}' if flag.repeats else flag.metavar if flag.number else f'"{flag.metavar}"'
    return f"# {flag.option} = {value}"


def _add_table(file: Path, lines: list[str]) -> None:
    """Add a table to a settings file, which need not exist."""
    from paceline.job.settings import load
    from paceline.job.writing import replace_file

    try:
        before = file.read_bytes().decode("utf-8-sig").rstrip("\n") + "\n\n" if file.exists() else ""
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}; check its folder") from None
    text = before + "\n".join(lines) + "\n"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / settings_files.PROJECT_FILE).write_text(text, encoding="utf-8")
        try:
            load(Path(folder), is_trusted=True)  # so is what was there before
        except UserError:
            raise UserError(f"{file} can have no more tables; write the target there yourself: {lines[0]} …") from None
    replace_file(file, text)


init = SectionedCommand(
    "init",
    callback=_init,
    params=[
        *in_section(
            "Answers",
            Option(["--script"], metavar="FILE", help="Python file that each rank runs."),
            Option(["-n", "--nproc-per-node", "ranks"], metavar="N|gpu|cpu|auto", help="Ranks on each machine."),
            Option(
                ["--on", "--backend", "on"],
                metavar="WHERE",
                help=f"{', '.join(registry.BACKENDS)}, or a target of the settings.",
            ),
            Option(["-H", "--hosts"], metavar="HOST[:SLOTS],…", help="Hosts that ssh reaches."),
            Option(["--gpus", "devices"], type=Count(0), metavar="N", help="GPUs of each machine."),
            Option(["--image"], metavar="IMAGE", help="Container image, for Kubernetes and Slurm."),
            Option(["-y", "--yes"], is_flag=True, help="Ask nothing; take what would be suggested."),
        ),
        *in_section(
            "Files",
            Option(["--file"], default="job.yaml", metavar="FILE.yaml", help="The job file.  [default: job.yaml]"),
            Option(
                ["--settings"],
                type=click.Choice(["project", "user"]),
                help="Write a target: into paceline.toml, or your own settings.  [default: project, for hosts only]",
            ),
            Option(["--target"], default="lab", metavar="NAME", help="Its name.  [default: lab]"),
            Option(["--force"], is_flag=True, help="Overwrite the job file."),
        ),
    ],
)
