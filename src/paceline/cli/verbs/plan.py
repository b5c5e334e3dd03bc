"""`paceline plan`: what the training of a script takes in memory, before it runs anywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from paceline.cli.flags.job import PROGRAM_ARGUMENTS
from paceline.cli.flags.option import UNDERSCORES, Option, SectionedCommand, in_section, output_option, parse_numbers
from paceline.cli.terminal.tables import Column, show
from paceline.cli.terminal.write import say
from paceline.contract.memory import MEMORY, PLAN, PLANNED, amount
from paceline.job.errors import UserError
from paceline.job.quantities import show_size
from paceline.job.text import counted

_RANKS, _MOST = "1,2,4,8", 1 << 16
_PARTS = ("parameters", "gradients", "optimizer", "activations")
_PLAN = in_section(
    "Plan",
    Option(["-m", "--module"], is_flag=True, help="SCRIPT is a module, as in python -m."),
    Option(
        ["--memory"],
        metavar="SIZE",
        help="What each rank has, such as 24G.  [default: its share of what is free on this machine]",
    ),
    Option(["-n", "--ranks"], metavar="N,…", help=f"Numbers of ranks.  [default: {_RANKS}]"),
    Option(["--all"], is_flag=True, help='Show all ways, and not only what Strategy(shard="auto") takes.'),
)


class _Row(NamedTuple):
    ranks: int
    memory: int  # bytes that a rank has
    way: str
    parts: dict[str, int]
    total: int
    is_chosen: bool
    fits: bool


def _plan(**given: Any) -> int:
    """Say what the training of SCRIPT takes in memory, and how Strategy(shard="auto") would keep its model.

    SCRIPT runs here, in one process, until its first forward pass, which is measured without computing it. A model that
    is made within run.build() needs no memory.
    """
    if given["memory"] is not None:
        _checked_amount(given["memory"])
    ranks = sorted(set(parse_numbers("--ranks", given["ranks"] or _RANKS)))
    if not ranks or ranks[0] < 1 or ranks[-1] > _MOST:
        raise UserError(f"--ranks: a job has from 1 to {_MOST} ranks")
    if not given["module"] and not Path(given["script"]).is_file():
        raise UserError(f"no such script: {given['script']}")
    with tempfile.TemporaryDirectory(prefix="paceline-plan-") as folder:
        file = Path(folder) / "plan.json"
        env = {**os.environ, PLAN: str(file), PLANNED: ",".join(map(str, ranks))}
        if given["memory"] is not None:
            env[MEMORY] = given["memory"]
        words = [sys.executable, *(["-m"] if given["module"] else []), given["script"], *given["args"]]
        try:
            code = subprocess.run(words, env=env, stdout=sys.stderr.fileno(), check=False).returncode
        except KeyboardInterrupt:
            return 130
        if not file.exists() and code:
            raise UserError(f"the script ended with exit code {code}, see above, before a model was called")
        if not file.exists():
            raise UserError(
                "the script ended before the first forward pass of a model of run.setup; it must train with the "
                "library, as in docs/library.md"
            )
        answer = json.loads(file.read_text())
    rows = [
        _Row(each["ranks"], each["memory"], way["name"], way["parts"], way["total"], *state)
        for each in answer["rows"]
        for way in each["ways"]
        for state in [(way["name"] == each["chosen"], way["fits"])]
        if given["all"] or state[0]
    ]
    if given["output"] in ("table", "wide"):
        frozen = f", {answer['frozen']:,} frozen" if answer["frozen"] else ""
        optimizers = ", ".join(answer["optimizers"]) or "no optimizer yet, reckoned as Adam"
        units = counted(answer["units"], "unit") if answer["units"] else "no units found: see units= of Strategy"
        say(f"{answer['model']}: {answer['trained']:,} parameters{frozen}, {units}, {optimizers}")
        unknown = "" if answer["measured"] else ": the pass is not measured"
        say(f"{answer['rows'][0]['used']:.0%} of the memory of a rank may be used{unknown}")
        if answer["shard"] != "auto":
            say(f'the script has shard={answer["shard"]!r}; this is what "auto" would take; --all shows the rest')
    show(rows, _columns(all_ways=given["all"]), given["output"], _Row._asdict)
    return 0


def _checked_amount(text: str) -> int:
    try:
        return amount(text, "--memory")
    except ValueError as error:
        raise UserError(str(error)) from None


def _columns(*, all_ways: bool) -> list[Column[_Row]]:
    def part(name: str) -> Column[_Row]:
        return Column(name.upper(), lambda row: show_size(row.parts[name]) if row.parts[name] else None)

    def rest(row: _Row) -> str:
        return show_size(row.total - sum(row.parts[name] for name in _PARTS))

    def chosen(row: _Row) -> str:
        return ("auto" if row.fits else "auto, does not fit") if row.is_chosen else ""

    columns = [
        Column("RANKS", lambda row: str(row.ranks), keep=9),
        Column("WAY", lambda row: row.way, keep=8),
        *map(part, _PARTS),
        Column("OTHER", rest),
        Column("PER RANK", lambda row: show_size(row.total), keep=7),
        Column("HAS", lambda row: show_size(row.memory), keep=6),
        Column("FITS", lambda row: "yes" if row.fits else "no", keep=5),
    ]
    return [*columns, Column("CHOICE", chosen, keep=4)] if all_ways else columns


plan = SectionedCommand(
    "plan",
    callback=_plan,
    context_settings={"allow_interspersed_args": False, **UNDERSCORES},
    params=[*_PLAN, output_option(), *PROGRAM_ARGUMENTS],
)
