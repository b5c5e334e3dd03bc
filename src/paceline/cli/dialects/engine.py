"""Reads a line of another tool by the tool's table, and makes a line of paceline of it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import click

from paceline.job.errors import UserError, nearest
from paceline.job.secret_values import looks_secret, without_passwords
from paceline.job.text import pasted

from .shell import ASSIGNED, is_expanded, quoted, variable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Meaning = str | Callable[["Line", str], None]

Document = dict[str, Any]  # of a YAML file of another tool
PYTHON = re.compile(r"python(3(\.\d+)?)?")
_SHELL = re.compile(r"[;&|<>$`*?(){}\n]|~/")


class Ignored(str):
    """The reason why a flag has no effect here."""


class Refused(str):
    """The reason why a flag cannot be honoured, and what to do instead."""


# Flags of which only one is taken.
_EXCLUSIVE = (
    ("-n", "--nproc-per-node", "-np"),
    ("--gpus", "--devices"),
    ("--on", "-H", "--hosts", "--hostfile"),
    ("-m", "--module", "--no-python"),
)

BINDING = Ignored("ranks share the cores of their machine evenly; --numa-binding binds them to those near their GPU")


@dataclass(frozen=True, eq=False)
class Tool:
    """A tool that people come from."""

    name: str  # what is typed behind `paceline`
    # its flags. A key has all names of a flag, then what it takes: nothing, `N`, `KEY VALUE`, `[N]` if it may be left
    # out (then only `--flag=N` gives it), or `FILE+` for one or more. A name with * at the end stands for all that
    # begin so. A value says what the flag becomes: flags of paceline, in which {} is what was given (at the end if
    # there is no {}), and {*} what * stands for, as a variable has it; "" for what is the same without; why it has no
    # effect or is refused; or a function, which changes the line.
    flags: Mapping[str, Meaning] = field(default_factory=dict)
    verb: str = "run"  # the verb of paceline that its lines become
    finish: Callable[[Line], None] | None = None  # what is done with a line when all flags are read
    # its subcommands, which take its own flags, too; or why there is none here
    tools: Mapping[str, Tool | Refused] = field(default_factory=dict)
    usual: str = ""  # the subcommand that one of its flags means where no subcommand is named
    # its settings of the environment → its flags, or those of paceline, that they replace; "" for what says nothing
    variables: Mapping[str, str] = field(default_factory=dict)
    is_mixed: bool = False  # whether flags may stand behind words
    shortens: bool = False  # whether it takes the beginning of a flag for the flag, as argparse does
    is_program: bool = False  # whether all words are the program's


@dataclass
class Line:
    """A line of paceline that comes into being."""

    verb: str = "run"  # of paceline
    flags: list[tuple[str, ...]] = field(default_factory=list)  # of paceline, each with its values
    program: list[str] = field(default_factory=list)  # the words behind them
    notes: list[str] = field(default_factory=list)  # what the user is told: which flags have no effect, and why
    given: dict[str, str] = field(default_factory=dict)  # the flags of the tool that were given, and their last value
    before: list[str] = field(default_factory=list)  # variables and commands that stand before `paceline`
    also: Line | None = None  # a line that follows this one
    is_asked: bool = False  # whether only the line is wanted (`--explain`)
    helped: Tool | None = None  # the tool that help is wanted for
    wants_all: bool = False  # whether that is help about all of its flags

    def add(self, flag: str, *values: str) -> None:
        """Add a flag of paceline."""
        self.flags.append((flag, *values))

    def get(self, flag: str) -> str | None:
        """The last value of a flag of paceline; "" for a switch."""
        found = [words[1] if len(words) > 1 else "" for words in self.flags if words[0] == flag]
        return found[-1] if found else None

    def take(self, *flags: str) -> str | None:
        """The last value of flags of paceline, which are removed."""
        found = [value for flag in flags if (value := self.get(flag)) is not None]
        self.flags = [words for words in self.flags if words[0] not in flags]
        return found[-1] if found else None

    def words(self) -> list[str]:
        """The words behind `paceline`."""
        return [*self.verb.split(), *(word for words in self.flags for word in words), *self.program]

    def text(self) -> str:
        """The line as people type it; values that look like secrets are left to variables of that name."""
        before = [quoted(word, is_first=True) for word in self.before]
        first = " ".join([*before, "paceline", *(quoted(_shown(word)) for word in self.words())])
        return first if self.also is None else f"{first} && {self.also.text()}"


def _shown(word: str) -> str:
    name, equals, value = word.partition("=")
    is_hidden = equals and name.isidentifier() and looks_secret(name, value) and not is_expanded(value)
    return f"{name}={variable(name)}" if is_hidden else without_passwords(word)


def parse(
    tool: Tool, words: Sequence[str], inherited: Mapping[str, Meaning] | None = None, outer: Line | None = None
) -> Line:
    """The line of paceline that a line of a tool becomes."""
    flags = {**(inherited or {}), **tool.flags}
    line = Line() if outer is None else replace(outer, program=[], helped=outer.helped and tool)
    line.verb = tool.verb
    rest = [] if tool.is_program else list(words)
    line.program += words if tool.is_program else ()
    table = _table(flags)
    while rest:
        word = rest.pop(0)
        if word == "--":
            line.program += rest
            break
        if not word.startswith("-") or word == "-":
            line.program.append(word)
            if tool.is_mixed and not tool.tools:
                continue
            line.program += rest
            break
        if (usual := _usual(tool, word)) is not None:
            return parse(usual, [word, *rest], flags, line)
        _take(tool, table, line, word, rest)
    _take_variables(tool, table, line)
    if (why := pasted(words[: len(words) - len(rest)])) is not None:
        raise UserError(why)
    if tool.tools:
        if not line.program and line.helped is not None:
            return line
        return parse(_subtool(tool, line.program), line.program[1:], flags, line)
    if line.verb in ("run", "submit") and not (line.program or tool.is_program) and line.helped is None:
        raise UserError(f"no script; write it behind the flags of {tool.name}")
    if tool.finish is not None and line.helped is None:
        tool.finish(line)
    line.notes = list(dict.fromkeys(line.notes))
    _drop_replaced(line)
    return line


def _subtool(tool: Tool, words: Sequence[str]) -> Tool:
    """The subcommand that the first of the words names."""
    if not words:
        raise UserError(f"{tool.name}: name what it is to do: {', '.join(_names(tool))}")
    if words[0] not in tool.tools:
        raise UserError(f"{tool.name} has no {words[0]!r} here; {nearest(words[0], tool.tools)}")
    found = tool.tools[words[0]]
    if isinstance(found, Refused):
        raise UserError(f"{tool.name} {words[0]}: {found}")
    return found


def _usual(tool: Tool, word: str) -> Tool | None:
    """The subcommand that a flag means where none is named; None for a flag of the tool itself."""
    usual, name = tool.tools.get(tool.usual), normal(word.partition("=")[0])
    return usual if isinstance(usual, Tool) and knows(usual, name) and not knows(tool, name) else None


def _drop_replaced(line: Line) -> None:
    """Leave flags out that a later one replaces."""
    last = {words[0]: number for number, words in enumerate(line.flags)}
    options = {name: own_flag(line.verb, name) for name in last}
    line.flags = [
        words
        for number, words in enumerate(line.flags)
        if number == last[words[0]] or (option := options[words[0]]) is None or option.multiple
    ]


def settle(line: Line) -> None:
    """Of flags that exclude each other, keep those that stand last."""
    for group in _EXCLUSIVE:
        last = next((words[0] for words in reversed(line.flags) if words[0] in group), None)
        line.flags = [words for words in line.flags if words[0] not in group or words[0] == last]


def put_before(line: Line, flags: Sequence[tuple[str, ...]]) -> None:
    """Add flags that those of the line replace."""
    line.flags[:0] = flags
    _drop_replaced(line)
    settle(line)


def _names(tool: Tool) -> list[str]:
    """The subcommands that there are, each by one name."""
    found: dict[Tool, str] = {}
    for name, inner in tool.tools.items():
        if isinstance(inner, Tool):
            found.setdefault(inner, name)
    return list(found.values())


def later(line: Line, value: str) -> None:
    """What a flag becomes that `finish` of its tool reads from `given`."""


def command(line: Line, value: str) -> None:
    """What a flag becomes that holds the program, in quotes."""
    line.program = [value]


# -- flags -------------------------------------------------------------------------------------------------------------


def names_of(key: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of a flag and what it takes, of a key of a table."""
    words = key.split()
    return (
        tuple(word for word in words if word.startswith("-")),
        tuple(word for word in words if not word.startswith("-")),
    )


def _table(flags: Mapping[str, Meaning]) -> dict[str, tuple[str, tuple[str, ...], Meaning]]:
    """Name → the first name of the flag, what it takes, and what it becomes."""
    found = {}
    for key, meaning in flags.items():
        names, takes = names_of(key)
        found.update(dict.fromkeys(names, (names[0], takes, meaning)))
    return found


def _row(
    table: Mapping[str, tuple[str, tuple[str, ...], Meaning]], name: str
) -> tuple[str, tuple[str, ...], Meaning] | None:
    """What a table has of a flag: a row of its own, or that of its family."""
    families = (row for key, row in table.items() if key.endswith("*") and name.startswith(key[:-1]))
    return table.get(name) or next(families, None)


def knows(tool: Tool, name: str) -> bool:
    """Whether a tool has a flag of this name."""
    return _row(_table(tool.flags), name) is not None


def normal(name: str) -> str:
    """A name with - for _, which most tools take alike."""
    return name.replace("_", "-") if name.startswith("--") else name


def _take(
    tool: Tool,
    table: Mapping[str, tuple[str, tuple[str, ...], Meaning]],
    line: Line,
    word: str,
    rest: list[str],
) -> None:
    """Read one flag, and its values from the words that follow it."""
    name, equals, text = word.partition("=")
    name = normal(name)
    attached = text if equals else None
    if name not in table and not word.startswith("--") and word[:2] in table:  # -n4, -vf
        takes = table[word[:2]][1]
        name, attached = word[:2], word[2:].removeprefix("=") if takes else None
        if not takes:
            rest.insert(0, f"-{word[2:]}")
    if name not in table and tool.shortens and name.startswith("--"):
        longer = {table[it][0]: it for it in table if it.startswith(name)}
        name = next(iter(longer.values())) if len(longer) == 1 else name
    if (row := _row(table, name)) is None:
        _take_unknown(tool, table, line, name, attached=attached, rest=rest)
        return
    first, takes, meaning = row
    values = _values(tool, name, takes, attached, rest)
    if not takes and attached is not None and attached.lower() in ("false", "0"):
        return
    value = " ".join(values)
    line.given[first] = value
    if callable(meaning):
        meaning(line, value)
    elif isinstance(meaning, Refused):
        raise UserError(f"{name}: {meaning}")
    elif isinstance(meaning, Ignored):
        line.notes.append(f"{name} has no effect: {meaning}")
    elif meaning:
        of_family = name[len(first) - 1 :].replace("-", "_").upper()
        for words in _flags_of(meaning.replace("{*}", of_family), values):
            line.add(*words)


def _take_variables(tool: Tool, table: Mapping[str, tuple[str, tuple[str, ...], Meaning]], line: Line) -> None:
    """Read the settings that stand before the command, or are those of this shell."""
    typed = {it[1]: it[2] for it in map(ASSIGNED.fullmatch, line.before) if it is not None}
    for name, flag in tool.variables.items():
        if flag and (value := typed.get(name) or os.environ.get(name)):
            _take(tool, table, line, f"{flag}={value}", [])
    line.before = [word for word in line.before if word.partition("=")[0] not in tool.variables]


def _take_unknown(
    tool: Tool,
    table: Mapping[str, tuple[str, tuple[str, ...], Meaning]],
    line: Line,
    name: str,
    *,
    attached: str | None,
    rest: list[str],
) -> None:
    """Read a flag that is not in the table: one of paceline's."""
    if name == "--explain":
        line.is_asked = True
        return
    if name in ("--help", "--help-all", "-h"):
        line.helped, line.wants_all = tool, name == "--help-all"
        return
    if (own := own_flag(line.verb, name)) is None:
        raise UserError(f"{tool.name} has no flag {name}; {nearest(name, table)}")
    line.add(name, *_values(tool, name, ("VALUE",) * (0 if own.is_flag else own.nargs), attached, rest))


def _flags_of(meaning: str, values: list[str]) -> list[tuple[str, ...]]:
    """The flags of paceline that a flag becomes."""
    if "{}" not in meaning and values:
        return [*_flags_of(meaning, [])[:-1], (*_flags_of(meaning, [])[-1], *values)]
    found: list[list[str]] = []
    for word in shlex.split(meaning):
        if word.startswith("-") or not found:
            found.append([word])
        else:
            found[-1] += [word.replace("{}", value) for value in values] if "{}" in word else [word]
    return [tuple(words) for words in found]


def _values(tool: Tool, name: str, takes: tuple[str, ...], attached: str | None, rest: list[str]) -> list[str]:
    """The values of a flag."""
    if takes and takes[0].startswith("[") and takes[0].endswith("]"):
        return [] if attached is None else [attached]
    values = [] if attached is None else [attached]
    if not takes:
        if values and attached is not None and attached.lower() not in ("true", "1", "false", "0"):
            raise UserError(f"{tool.name}: {name} takes no value; leave {attached!r} out")
        return []
    while len(values) < len(takes) or (takes[-1].endswith("+") and rest and not rest[0].startswith("-")):
        if not rest:
            raise UserError(f"{tool.name}: {name} needs a value; write {name} {' '.join(takes)}")
        values.append(rest.pop(0))
    return values


def own_flag(verb: str, name: str) -> click.Option | None:
    """The flag of a verb of paceline that has this name; of the command line that is running."""
    context = click.get_current_context(silent=True)
    cli = None if context is None else context.find_root().command
    command = cli.get_command(click.Context(cli), verb.partition(" ")[0]) if isinstance(cli, click.Group) else None
    for option in command.params if command is not None else ():
        if isinstance(option, click.Option) and name in option.opts:
            return option
    return None


# -- programs ----------------------------------------------------------------------------------------------------------


def say_program(line: Line) -> None:
    """Say that the program is none of Python's, where a tool runs any that is on PATH."""
    if line.program and not PYTHON.fullmatch(os.path.basename(line.program[0])) and line.get("-m") is None:
        name, folder = line.program[0], line.get("--working-dir") or "."
        is_file = os.sep in name or os.path.exists(os.path.join(folder, name))
        if not is_file and shutil.which(name) is not None:
            line.add("--no-python")


def split_command(line: Line) -> None:
    """Take a command that stands in quotes apart; one that only a shell understands is left to it."""
    if len(line.program) != 1 or " " not in (command := line.program[0].strip()):
        return
    if _SHELL.search(command) is not None:
        line.program = ["sh", "-c", command]
        return
    try:
        while len(line.program) == 1 and " " in line.program[0].strip():  # "'python t.py'" of Arena's pages
            line.program = shlex.split(line.program[0])
    except ValueError as error:
        raise UserError(f"{command!r}: {str(error).lower()}; close the quotation") from None
