"""docs/reference.md names every flag of `paceline run`, its variable, and every key of a job file."""

from __future__ import annotations

import re
from pathlib import Path

from paceline.cli.verbs.resubmit import resubmit
from paceline.cli.verbs.run import run
from paceline.cli.verbs.submit import submit
from paceline.cli.verbs.tune import tune
from paceline.job.spec import JobSpec, Rendezvous

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference.md"
# Keys that no flag sets: `resubmit` and `--detach` do, and those of nodes that are started by hand stand below.
NOT_FLAGS = {"resume_from", "detached", "environment_digest", "rendezvous"}


def table() -> dict[str, tuple[str, str]]:
    """Flag → what the table says of its key and its variable; the rows of a flag that has several are joined."""
    found: dict[str, tuple[str, str]] = {}
    for row in PAGE.read_text().partition("## Variables that you set")[0].splitlines():
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        for flag in re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", cells[0]) if row.startswith("|") else ():
            key, variable = found.get(flag, ("", ""))
            found[flag] = (f"{key} {cells[1]}", f"{variable} {cells[2]}")
    return found


def test_every_flag_and_its_variable() -> None:
    flags = table()
    for parameter in {
        parameter.name: parameter for parameter in (*run.params, *submit.params, *resubmit.params, *tune.params)
    }.values():
        if parameter.param_type_name != "option":
            continue
        for flag in parameter.opts:
            assert flag in flags, f"docs/reference.md lacks {flag}"
            variable = str(parameter.envvar or "")
            assert variable in flags[flag][1], f"docs/reference.md: the variable of {flag} is {variable}"
    known = {flag for verb in (run, submit, resubmit, tune) for parameter in verb.params for flag in parameter.opts}
    assert not set(flags) - known, "docs/reference.md names flags that do not exist"


def test_every_key_of_a_job_file() -> None:
    keys = {word for key, _ in table().values() for word in re.findall(r"[a-z_]+", key)} | {"script", "args"}
    fields = (set(JobSpec.__struct_fields__) | set(Rendezvous.__struct_fields__)) - NOT_FLAGS
    assert not fields - keys, "docs/reference.md lacks keys of job files"
