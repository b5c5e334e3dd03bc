"""`paceline plan`: what the training of a script takes in memory, before it runs anywhere."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.backends.base import Metered
from paceline.backends.refusals import kind_of_program
from paceline.backends.registry import HERE
from paceline.cli.flags.job import PROGRAM_ARGUMENTS
from paceline.cli.flags.option import UNDERSCORES, Option, SectionedCommand, in_section, output_option, parse_numbers
from paceline.cli.flags.spec import JOB_FILES
from paceline.cli.terminal.tables import Column, show
from paceline.cli.terminal.write import say
from paceline.contract.memory import MEMORY, PLAN, PLANNED, amount
from paceline.job.errors import UserError
from paceline.job.quantities import show_size
from paceline.job.text import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from paceline.backends.base import Backend
    from paceline.contract.memory import Planned
    from paceline.job.job import Node
    from paceline.job.spec import JobSpec

_RANKS, _MOST = "1,2,4,8", 1 << 16
_LONGEST, _MOST_TEXT = 120, 300  # seconds until the first pass, before a job starts; characters of an error
_PARTS = ("parameters", "gradients", "optimizer", "activations")
_PLAN = in_section(
    "Plan",
    Option(["-m", "--module"], is_flag=True, help="SCRIPT is a module, as in python -m."),
    Option(
        ["--memory"],
        metavar="SIZE",
        help="Memory of each rank, such as 24G.  [default: its share of what is free on this machine]",
    ),
    Option(["-n", "--ranks"], metavar="N,…", help=f"Numbers of ranks to plan for.  [default: {_RANKS}]"),
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
    text = _RANKS if given["ranks"] is None else given["ranks"]
    ranks = sorted(set(parse_numbers("--ranks", text, "2,4")))
    if ranks[0] < 1 or ranks[-1] > _MOST:
        raise UserError(f"--ranks {text}: a job has from 1 to {_MOST} ranks; write for example --ranks 2,4")
    script = given["script"]
    if not given["module"] and (kind_of_program(script, Path.cwd()) != "script" or script.lower().endswith(JOB_FILES)):
        raise UserError(f"{script} is no script of Python, and paceline plan measures no others; name one")
    words = [*(["-m"] if given["module"] else []), given["script"], *given["args"]]
    env = {} if given["memory"] is None else {MEMORY: given["memory"]}
    try:
        answer, code = _measured(words, map(str, ranks), env, stdout=sys.stderr.fileno())
    except KeyboardInterrupt:
        return 130
    if answer is None and code:
        raise UserError(f"the script ended with exit code {code}, see above, before a model was called")
    if answer is None:
        raise UserError(
            "the script ended before the first forward pass of a model of run.setup; it must train with the "
            "library, as in docs/library.md"
        )
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
            own = answer["together"] or f"shard={answer['shard']!r}"
            say(f'the script has {own}; this is what "auto" would take; --all shows the rest')
    show(rows, _columns(all_ways=given["all"]), given["output"], _Row._asdict)
    return 0


def _measured(
    words: Sequence[str], ranks: Iterable[str], env: Mapping[str, str], **options: Any
) -> tuple[Planned | None, int]:
    """What the process of a script, given as Python's words, says of numbers of ranks; and its exit code."""
    with tempfile.TemporaryDirectory(prefix="paceline-plan-") as folder:
        file = Path(folder) / "plan.json"
        env = {**os.environ, **env, PLAN: str(file), PLANNED: ",".join(ranks)}
        code = subprocess.run([sys.executable, *words], env=env, check=False, **options).returncode
        return (json.loads(file.read_text()) if file.exists() else None), code


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


# -- before a job starts -----------------------------------------------------------------------------------------------


def fits(spec: JobSpec, prepared: JobSpec, there: Backend) -> str | None:
    """A line that says whether a job fits into its memory; None if its script makes no model within `run.build()`."""
    name, folder = spec.target, spec.working_dir
    if spec.kind == "command" or (spec.code is not None and spec.code.mode == "git"):
        return None
    paths = [name] if spec.script else [f"{name.replace('.', '/')}{end}" for end in (".py", "/__main__.py")]
    if not any(_builds(Path(folder, path)) for path in paths):
        return None
    unknown, more = f"{name}: what it takes in memory is not known", f"see paceline plan {name}"
    here = _count(prepared)
    if here is None:
        return f"{unknown}, as the number of ranks is not; {more}"
    if importlib.util.find_spec("torch") is None:
        return f"{unknown}: torch is not installed for {sys.executable}"
    ranks = f"{here * prepared.node_range[0]}/{here}"
    memory, is_known = _memory(prepared, here, there)
    env = {**spec.env, **({} if memory is None else {MEMORY: str(memory)})}
    words = [*(["-m"] if spec.module else []), name, *spec.args]
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        try:
            answer, code = _measured(
                words, [ranks], env, cwd=folder, timeout=_LONGEST, stdin=subprocess.DEVNULL, stdout=said, stderr=said
            )
        except subprocess.TimeoutExpired:
            return f"{unknown}: its first pass did not come within {_LONGEST} s; {more}"
        said.seek(0)
        last = "".join(said.read().splitlines()[-1:])[:_MOST_TEXT]
    if answer is None:
        return f"{unknown}: {last or f'it ended with exit code {code}'}; {more}"
    return f"{answer['model']}{_fits(answer, is_known=is_known)}; {more}"


def _builds(path: Path) -> bool:
    """Whether a script makes a model within `run.build()` of the library."""
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (OSError, SyntaxError, ValueError, RecursionError):  # it is not here, or no Python
        return False
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    entered = [item.context_expr for node in nodes if isinstance(node, ast.With) for item in node.items]
    called = [it.func.attr for it in entered if isinstance(it, ast.Call) and isinstance(it.func, ast.Attribute)]
    return "build" in called and any(f"{name}.".startswith("paceline.") for name in names)


def _count(spec: JobSpec) -> int | None:
    """The number of ranks on a node, if it is known before the start."""
    if isinstance(spec.ranks, int):
        return spec.ranks
    devices = len(spec.devices) if isinstance(spec.devices, tuple) else spec.devices
    return devices if spec.ranks in ("gpu", "auto") and devices else None


def _memory(spec: JobSpec, here: int, there: Backend) -> tuple[int | None, bool]:
    """The bytes that a rank may have, None if its process finds that out; and whether that is where the job runs.

    Of machines of which a job gets some, it is that of the smallest one, if it gets the largest ones.
    """
    on_gpu = bool(spec.devices) or spec.ranks == "gpu"
    if MEMORY in spec.env:
        return None, True
    if spec.memory and not on_gpu:
        return spec.memory // here, True
    if there.name == HERE:
        return None, True
    nodes: list[Node] = []
    if isinstance(there, Metered):
        with contextlib.suppress(UserError):
            nodes = there.nodes(lambda _: None)
    gpus = [min((gpu["memory"] or 0 for gpu in node.gpus), default=0) for node in nodes]
    sizes = sorted(gpus if on_gpu else [node.memory // here for node in nodes], reverse=True)
    size = sizes[: spec.node_range[0]][-1] if sizes else 0
    return size or None, bool(size)


def _fits(answer: Planned, *, is_known: bool) -> str:
    """Whether a model fits."""
    (row,) = answer["rows"]
    ways = {way["name"]: way for way in row["ways"]}
    auto, each = ways[row["chosen"]], f"each of {row['ranks']} ranks" if row["ranks"] > 1 else "its rank"
    if answer["together"]:
        return f": what a rank takes with {answer['together']} is not planned"
    own = auto if answer["shard"] == "auto" else row["own"]
    if own is None:
        return f": shard={answer['shard']!r} is not possible, or not planned"
    if not is_known:
        every = ", ".join(f"{name} takes {show_size(way['total'])}" for name, way in ways.items())
        return f" on {each}: {every}; what a rank has there is not known: say it with --env {MEMORY}=24G"
    choice = 'shard="auto" takes ' if answer["shard"] == "auto" else ""
    line = f"{choice}{own['name']}: {show_size(own['total'])} of the {show_size(row['memory'])} that {each} has"
    if own["fits"]:
        return f" fits: {line}"
    line = f" does not fit: {line}, of which {row['used']:.0%} may be used"
    return f'{line}; shard="auto" would take {show_size(auto["total"])}' if auto["fits"] else f"{line}; no way fits"


plan = SectionedCommand(
    "plan",
    callback=_plan,
    context_settings={"allow_interspersed_args": False, **UNDERSCORES},
    params=[*_PLAN, output_option(), *PROGRAM_ARGUMENTS],
)
