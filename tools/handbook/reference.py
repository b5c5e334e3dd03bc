"""The pages of the reference that the source is read for, and llms.txt: `python -m tools.handbook` writes them."""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import yaml

import paceline
from paceline import jobs
from paceline.cli.main import DIALECTS, VERBS, cli

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
WIDTH = 120
_GUIDES = {  # where a verb is described at length
    "attach": "jobs.md", "check": "check.md", "checkpoint": "checkpoints.md", "data": "job-files.md#data",
    "delete": "jobs.md#deleting-jobs", "get": "agents.md#facts", "init": "job-files.md",
    "plan": "sharding.md#will-it-fit", "profile": "profile.md", "prune": "jobs.md#deleting-jobs",
    "notify": "notify.md", "report": "web.md#the-report", "resubmit": "resume.md#starting-a-job-again", "run": "run.md",
    "scalein": "elastic.md", "scaleout": "elastic.md",
    "skill": "agents.md", "submit": "jobs.md", "tensorboard": "jobs.md#tensorboard",
    "trust": "security.md#nobody-elses-files",
    "tune": "communication.md#chosen-by-trying-paceline-tune", "warm": "run.md#what-is-started", "web": "web.md",
    "why": "why.md", "logs": "jobs.md#logs", "explain": "migrating.md", "torchrun": "from-torchrun.md",
    "torch-launch": "from-torchrun.md", "horovodrun": "from-horovod.md", "mpirun": "from-horovod.md",
    "srun": "from-horovod.md", "paddle-launch": "from-paddle.md", "paddlecloud": "from-paddle.md",
    "arena": "from-arena.md", "accelerate": "from-others.md",
}  # fmt: skip


def pages() -> dict[Path, str]:
    """Each file that is made from the source, and its text."""
    made = {DOCS / "verbs.md": verbs(), DOCS / "api.md": api()}
    return {**made, DOCS / "llms.txt": llms(made)}


def verbs() -> str:
    """docs/verbs.md: all verbs, with what their help says first."""
    text = """\
# Verbs

All verbs of `paceline`, as their help has them. `paceline VERB --help` and `man paceline-VERB` have the flags; those of
`run`, `submit`, `resubmit` and `tune` are in [reference.md](reference.md) too.

```console
$ paceline run --help
$ paceline list --help
```
"""
    for heading, names in (
        ("Jobs and machines", [it for it in VERBS if it not in DIALECTS]),
        ("Lines of other launchers", list(DIALECTS)),
    ):
        text += f"\n## {heading}\n\n"
        for name in names:
            command = cli.commands.get(name) or cli.get_command(None, name)  # type: ignore[arg-type]
            assert command is not None
            line = f"`{name}`: {VERBS[name][1] if name in DIALECTS else command.get_short_help_str(500)}"
            guide = _GUIDES.get(name, "")
            text += _item(line + (f" ([{guide.partition('#')[0]}]({guide}))" if guide else ""))
    return text


def api() -> str:
    """docs/api.md: the public names, with the first sentences of their docstrings."""
    text = """\
# Python

What `import paceline` gives, and `paceline.jobs`. Each entry is the beginning of the docstring; `help()` has the whole:
arguments, shapes, units, errors and sources. Guides: [the library](library.md), [jobs from Python](python.md).

```python
from paceline import jobs

help(jobs.submit)
```
"""
    names = [(name, getattr(paceline, name)) for name in paceline.__all__ if not name.startswith("_")]
    errors = [it for it in names if inspect.isclass(it[1]) and issubclass(it[1], BaseException)]
    others = [it for it in names if it not in errors and not inspect.ismodule(it[1])]
    members = inspect.getmembers(paceline.Run, lambda it: inspect.isfunction(it) or isinstance(it, property))
    run = [(name, it) for name, it in members if not name.startswith("_")]
    for heading, listed in (
        ("paceline", others),
        ("Run", run),
        ("Errors", errors),
        ("paceline.jobs", [(name, getattr(jobs, name)) for name in jobs.__all__]),
    ):
        text += f"\n## {heading}\n\n"
        for name, value in listed:
            text += _item(f"`{name}{_arguments(value)}`: {_summary(value)}")
    return text


def llms(made: dict[Path, str]) -> str:
    """docs/llms.txt: what the pages are, for programs that read the documentation (https://llmstxt.org)."""
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    text = f"# {settings['site_name']}\n\n> {settings['site_description']}\n"
    for section in settings["nav"]:
        ((heading, entries),) = section.items()
        if heading == "中文":
            continue  # a program reads the English pages, which are all there
        text += f"\n## {heading}\n\n"
        for entry in entries:
            name = next(iter(entry.values())) if isinstance(entry, dict) else entry
            page = made.get(DOCS / name) or (DOCS / name).read_text()
            title = page.partition("\n")[0].removeprefix("# ").replace("`", "")
            text += f"- [{title}]({name}): {_first(page)}\n"
    return text


def _first(page: str) -> str:
    """The first sentence of a page, without its links."""
    page = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    paragraph = next(it for it in re.split(r"\n\n+", page)[1:] if re.match(r"[A-Za-z`\"\[]", it))
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
    return re.split(r"(?<=[.:]) (?=[A-Z`])", words)[0].rstrip(":")


def _arguments(value: Any) -> str:
    """The names of the arguments, as in a call."""
    if inspect.isclass(value) or not callable(value):
        return ""
    parameters = [it for it in inspect.signature(value).parameters.values() if it.name not in {"self", "_"}]
    stars: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    shown = [f"{stars.get(it.kind, '')}{it.name}{'' if it.default is it.empty else '='}" for it in parameters]
    return f"({', '.join(shown)})"


def _summary(value: Any) -> str:
    return " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())


def _item(line: str) -> str:
    return (
        "\n".join(textwrap.wrap(line, WIDTH, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False))
        + "\n"
    )
