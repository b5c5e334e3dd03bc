"""A line of paceline as a job file, and files of other tools in the place of one."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.dialects.engine import Line, own_flag
from paceline.cli.dialects.files import SCRIPTS, read
from paceline.cli.dialects.script import line_of
from paceline.cli.dialects.tools import explained
from paceline.job.errors import UserError
from paceline.job.writing import job_text

from .job import Given

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.job.spec import JobSpec

    SpecOf = Callable[[Given, click.Command], tuple[JobSpec, Given]]  # `spec.spec_of`

_HOSTS = ("-H", "--hosts", "--hostfile", "--host-discovery-script")
_WITH_HOSTS = ("-np", "--nnodes", "--min-np", "--max-np", "--blacklist-cooldown-range")  # what they mean, hosts say


def job_of(line: Line, spec_of: SpecOf) -> tuple[dict[str, object], Line]:
    """What a job file says of a line's job; and what stays on the line: its hosts, and what the screen shows."""
    verb = "submit"
    stays = []
    names_hosts = any(words[0] in _HOSTS for words in line.flags)
    for words in line.flags:
        option = own_flag("run", words[0])
        is_of_line = getattr(option, "section", "") in ("Where", "Output") and words[0] != "--on"
        if is_of_line or (names_hosts and words[0] in _WITH_HOSTS):
            stays.append(words)
            verb = "run" if own_flag(verb, words[0]) is None else verb
    kept = [words for words in line.flags if words not in stays]
    inner = Line("submit", kept, line.program)
    root = click.get_current_context().find_root()
    assert isinstance(root.command, click.Group)
    command = root.command.get_command(root, "submit")
    assert command is not None
    spec, _ = spec_of(Given(command.make_context("submit", inner.words()[1:], parent=root).params), command)
    return fields_of(spec, is_at_named_hosts=names_hosts), Line(verb, stays)


def fields_of(spec: JobSpec, *, is_at_named_hosts: bool) -> dict[str, object]:
    """The fields of a job as people write them; flags that name its hosts say how many there are."""
    left_out = {"backend", "nodes"} if is_at_named_hosts else set()
    dumped = spec.dumped(only_changed=True)
    found = {name: _without_nothing(value) for name, value in dumped.items() if name not in left_out}
    if found.get("ranks") == "slots":
        del found["ranks"]
    if spec.memory is not None:
        unit = next((power for power in (4, 3, 2, 1) if spec.memory % (1 << 10 * power) == 0), 0)
        found["memory"] = f"{spec.memory >> 10 * unit}{' KMGT'[unit]}i" if unit else spec.memory
    if "data" in found:
        found["data"] = [f"{it.volume}:{it.path}" for it in spec.data]
    if len(spec.setup) == 1 and "setup" in found:
        found["setup"] = spec.setup[0]
    return found


def _without_nothing(value: Any) -> Any:
    return {name: it for name, it in value.items() if it is not None} if isinstance(value, dict) else value


def of_file(path: str) -> tuple[str, Line] | None:
    """What a file of another tool is, and its line; None for job files, and files that no tool here has."""
    is_one = path.lower().endswith((".yaml", ".yml", ".json", *SCRIPTS)) and os.path.isfile(path)
    return read(path) if is_one else None


def of_script(text: str) -> Line:
    """The line of a job for a line, or lines, of the shell that start a launcher or a script."""
    explained(text)  # refuses others
    return line_of(text, [])[0]


def refuse(path: str, verb: str, flags: Sequence[tuple[str, ...]], spec_of: SpecOf) -> None:
    """Refuse a file of another tool in the place of a verb's SCRIPT, and print the job file that does the same."""
    found = of_file(path)
    if found is None:
        return
    what, line = found
    fields, rest = job_of(line, spec_of)
    for note in line.notes:
        click.echo(f"paceline: {note}", err=True)
    click.echo(job_text(fields), nl=False)
    rest.flags += flags
    rest.verb = "run" if rest.verb == "run" else verb  # which has flags that submit has not
    rest.program = ["job.yaml"]
    as_it_is = "; to run it on each rank as it is, add --no-python" if path.lower().endswith(SCRIPTS) else ""
    raise UserError(
        f"{path} is {what}; the job file that does the same is printed above: "
        f"paceline explain {shlex.quote(path)} -o job.yaml writes it, and {rest.text()} starts it{as_it_is}"
    )
