"""Options grouped under headings, and the values that several verbs parse alike."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.job.errors import UserError
from paceline.job.text import pasted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

OUT, ERR, BOTH = 1, 2, 3
_STREAMS = {"none": 0, "all": BOTH, "0": 0, "1": OUT, "2": ERR, "3": BOTH}
_SENTENCE = re.compile(r"[.;](?: |$)|  \[")  # its end: the first help has no more of a text longer than a line
_NAMES = 34  # columns of the terminal that flags take beside their texts
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# What a help explains where a word stands first in it; no meaning has another of the words.
_WORDS = {
    "agent": "the process that starts and watches the job on a machine",
    "allocation": "the machines that a scheduler has given to a shell",
    "attempt": "a start of the whole job",
    "backend": "what runs jobs, such as Slurm",
    "checkpoint": "saved state to go on from",
    "cold": "with an import of the framework",
    "node": "a machine of the job",
    "rank": "a process of the job, numbered from 0",
    "slot": "room for one process",
    "target": "a named place for jobs",
    "warm": "with the framework imported before",
}
_PLURALS = {
    "attempt": "starts of the whole job",
    "backend": "what runs jobs, such as Slurm",
    "checkpoint": "saved states to go on from",
    "node": "the machines of the job",
    "rank": "the processes of the job, numbered from 0",
    "slot": "each is room for one process",
    "target": "named places for jobs",
}
_WORD = re.compile(rf"(?<![-\w`\[.<=])(?<!coding )(?i:{'|'.join(_WORDS)})s?(?![-\w`=.]\w|[\w`=\]])")
# What may be empty: these are so by default for torchrun, and the others go to the program as they are.
_MAY_BE_EMPTY = frozenset({
    "rdzv_endpoint", "rdzv_conf", "local_ranks_filter", "duplicate_stdout_filters", "duplicate_stderr_filters",
    "args", "command", "words",
})  # fmt: skip


class Option(click.Option):
    """A click option that stands under a heading in the help of its verb.

    Attributes:
        is_rare: whether `--help` leaves it to `--help-all`.
        kind: of backend, whose flag it is: only help for that backend has it; None for all.
        kind_of: for `--on`: finds the kind of backend of a target; None if that is unknown.
    """

    def __init__(
        self,
        *args: Any,
        section: str = "Options",
        is_rare: bool = False,
        kind: str | None = None,
        kind_of: Callable[[str], str | None] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.section, self.is_rare, self.kind, self.kind_of = section, is_rare, kind, kind_of

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        """As click does, but for nothing where there should be a value."""
        _refuse_nothing(self, None if ctx.resilient_parsing else value)
        return super().process_value(ctx, value)


def in_section(section: str, *options: Option) -> list[Option]:
    """These options, under a heading of the help."""
    for option in options:
        option.section = section
    return list(options)


class Section(list[Option]):
    """The flags under a heading of the help.

    Each method declares one by its names, and returns what it is where it is not given: so an attribute of a class that
    is set to that has the type of its values. The attribute is called as click's parameter.
    """

    def __init__(self, title: str) -> None:
        super().__init__()
        self.title = title

    def _add(self, names: str, **how: Any) -> None:
        self.append(Option(names.split(), section=self.title, **how))

    def text(self, names: str, **how: Any) -> str | None:
        """A flag with a value."""
        self._add(names, **how)
        return None

    def texts(self, names: str, **how: Any) -> tuple[str, ...]:
        """A flag that may be given several times."""
        self._add(names, multiple=True, **how)
        return ()

    def pair(self, names: str, **how: Any) -> tuple[str, str] | None:
        """A flag with two values."""
        self._add(names, nargs=2, **how)
        return None

    def switch(self, names: str, **how: Any) -> bool:
        """A flag without a value."""
        self._add(names, is_flag=True, **how)
        return False

    def whole(self, names: str, type: Whole | type[int], **how: Any) -> int | None:
        """A flag with a whole number."""
        self._add(names, type=type, **how)
        return None

    def number(self, names: str, type: Number, **how: Any) -> float | None:
        """A flag with a number."""
        self._add(names, type=type, **how)
        return None


def output_option() -> Option:
    """The flag `-o`, which sets the parameter `output`."""
    return Option(
        ["-o", "--output"],
        section="Output",
        type=click.Choice(["table", "wide", "json", "yaml"]),
        default="table",
        help="wide: more columns; json, yaml: for programs, their keys stay.  [default: table]",
    )


def watch_option() -> Option:
    """The flag `-w`, which sets the parameter `watch`."""
    from paceline.cli.terminal.live import INTERVAL  # with all that drawing needs

    help = f"Refresh every {INTERVAL:g} s; q or Ctrl-C ends it."
    return Option(["-w", "--watch"], section="Output", is_flag=True, help=help)


class _Within:
    """What a help says of limits."""

    def _describe_range(self: Any) -> str:
        """In place of click's `x>=1`."""
        return f"{self.min} or more" if self.max is None else f"{self.min} to {self.max}"


class Whole(_Within, click.IntRange):
    """A whole number within limits, which a refusal names in words."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number."""
        return _within(self, click.INT.convert(value, param, ctx), param, ctx)


class Number(_Within, click.FloatRange):
    """The same, with a fraction."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number."""
        number = click.FLOAT.convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return _within(self, number, param, ctx)


def _within(of: Whole | Number, number: float, param: click.Parameter | None, ctx: click.Context | None) -> float:
    if of.min is not None and number < of.min:
        of.fail(f"{number} is less than {of.min}", param, ctx)
    if of.max is not None and number > of.max:
        of.fail(f"{number} is more than {of.max}", param, ctx)
    return number


class Count(Whole):
    """A number of devices; their names belong to another flag."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number."""
        if isinstance(value, str) and "," in value:
            self.fail(f"{value!r} names devices; write --devices {value}", param, ctx)
        return super().convert(value, param, ctx)


class Port(Whole):
    """A port of sshd; srun's flag of the same letter names a partition."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number."""
        if isinstance(value, str) and not value.isdecimal():
            self.fail(f"{value!r} is no port; a partition of Slurm is named by --on slurm --queue {value}", param, ctx)
        return super().convert(value, param, ctx)


UNDERSCORES = {"token_normalize_func": lambda name: name.replace("_", "-")}  # --nproc_per_node, as for torchrun


class SectionedCommand(click.Command):
    """Prints its options heading by heading, in the order in which they are defined: the usual ones, then all.

    Its help is the docstring of its callback.
    """

    def get_help_option_names(self, ctx: click.Context) -> list[str]:
        ctx.help_option_names = list(_HELP)  # whatever made the context: a command keeps the names that it sees first
        return super().get_help_option_names(ctx)

    def __init__(self, *args: Any, usual: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **{"help": kwargs["callback"].__doc__, **kwargs})
        self.usual = usual

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does; help also looks at the target that is named."""
        if not {*_HELP, _ALL}.isdisjoint(args):
            ctx.meta[_KIND] = self._kind(args)
        ctx.meta[TYPED] = list(args)
        try:
            rest = super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx  # so that the refusal names the verb's help
            raise
        for parameter in self.params:
            _refuse_nothing(parameter, None if ctx.resilient_parsing else ctx.params.get(str(parameter.name)))
        given = (value for name, value in ctx.params.items() if name != "args")  # those of the script are its own
        words = (it for value in given for it in (value if isinstance(value, tuple) else (value,)))
        if (why := pasted(it for it in words if isinstance(it, str))) is not None:
            raise UserError(why)
        return rest

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The options and arguments, with `--help-all`, which `--help` names where it does not have all of them."""
        params = super().get_params(ctx)
        show_all = Option(
            [_ALL], help="Show all flags.", is_flag=True, is_eager=True, expose_value=False, callback=_show_all
        )
        show_all.hidden = len(self._first(params, None)) == len(params)
        return [*params[:-1], show_all, params[-1]]

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help; a word of the field is explained where it stands first."""
        ctx.meta[_EXPLAINED] = set()
        super().format_help(ctx, formatter)

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what the verb does."""
        whole, self.help = self.help, _explained(self.help or "", ctx.meta[_EXPLAINED])
        try:
            super().format_help_text(ctx, formatter)
        finally:
            self.help = whole

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the headings."""
        params, kind = self.get_params(ctx), ctx.meta.get(_KIND)
        has_all = ctx.meta.get(_ALL, False)
        shown = [it for it in params if getattr(it, "kind", None) in (None, kind)] if has_all else []
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in shown or self._first(params, kind):
            record = parameter.get_help_record(ctx)
            if record is not None and record[1]:
                names, text = record
                title = getattr(parameter, "section", "Options")
                is_usual = self.usual and not has_all and getattr(parameter, "kind", None) is None
                is_long = is_usual and len(text) > formatter.width - _NAMES
                row = (names, _SENTENCE.split(text)[0] + "." if is_long else text)
                sections.setdefault("Options" if is_usual else title, []).append(row)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl([(names, _explained(text, ctx.meta[_EXPLAINED])) for names, text in records])
        kinds = dict.fromkeys(it.kind for it in params if isinstance(it, Option) and it.kind not in (None, kind))
        if kinds:
            formatter.write_paragraph()
            targets = " or --on ".join(map(str, kinds))
            formatter.write_text(f"With --on {targets}, --help has the flags of that backend.")

    def _first(self, params: list[click.Parameter], kind: str | None) -> list[click.Parameter]:
        """What `--help` has."""
        if not self.usual:
            own = [
                it for it in params if not getattr(it, "is_rare", False) and getattr(it, "kind", None) in (None, kind)
            ]
            return sorted(own, key=lambda it: getattr(it, "section", "") == "Where")
        found = {name: it for it in params for name in it.opts}
        of_kind = [it for it in params if kind is not None and getattr(it, "kind", None) == kind]
        return [*(found[name] for name in (*self.usual, _ALL, "--help") if name in found), *of_kind]

    def _kind(self, args: list[str]) -> str | None:
        """The kind of the backend that --on names among the arguments."""
        finders = [it.kind_of for it in self.params if isinstance(it, Option) and it.kind_of is not None]
        for word, following in zip(args, [*args[1:], ""], strict=True):
            name = following if word == "--on" else word.removeprefix("--on=") if word.startswith("--on=") else ""
            if name and finders:
                return finders[0](name)
        return None


_KIND, _ALL, _EXPLAINED = "paceline.help.kind", "--help-all", "paceline.help.explained"  # keys of click's meta
TYPED = "paceline.typed"  # another one, of the words behind the verb
_HELP = ("-h", "--help")


def _refuse_nothing(parameter: click.Parameter, value: Any) -> None:
    """Refuse what a variable of the shell that is not set leaves in the place of a value or a name."""
    if parameter.name in _MAY_BE_EMPTY or "" not in (value if isinstance(value, (list, tuple)) else (value,)):
        return
    if isinstance(parameter, click.Argument):
        raise UserError(f"{parameter.human_readable_name.rstrip('…')} is empty; name one")
    name = next((it for it in parameter.opts if it.startswith("--")), parameter.opts[0])
    raise UserError(f"{name} is empty; give a value, or leave the flag out")


def new_file(flag: str, name: str) -> Path:
    """The file that a flag has written, refused before any work is done for it where none can be written."""
    path = Path(name)
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir():
        what = "it is a folder" if path.is_dir() else f"there is no folder {folder}"
        raise UserError(f"{flag} {name}: {what}; name another file")
    return path


def _explained(text: str, known: set[str]) -> str:
    """A text of a help, with what its words mean that are not known yet."""

    def with_meaning(found: re.Match[str]) -> str:
        word = found[0].lower().removesuffix("s")
        if word in known:
            return found[0]
        known.add(word)
        meaning = _PLURALS.get(word, _WORDS[word]) if found[0].lower() != word else _WORDS[word]
        return f"{found[0]} ({meaning})"

    return _WORD.sub(with_meaning, text)


def _show_all(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        context.meta[_ALL] = True
        click.echo(context.get_help(), color=context.color)
        context.exit()


def flags_of(command: click.Command, words: Sequence[str]) -> list[tuple[str, ...]]:
    """The flags among the words behind a verb, one by one, each with its values."""
    parser = command.make_parser(click.Context(command, **command.context_settings))
    values, _, order = parser.parse_args(list(words))
    found, taken = [], dict[str, int]()
    for option in order:
        if not isinstance(option, click.Option):
            continue
        name = str(option.name)
        value = values[name]
        if option.multiple:
            taken[name] = taken.get(name, -1) + 1
            value = value[taken[name]]
        those = () if option.is_flag else value if isinstance(value, tuple) else (value,)
        found.append((option.opts[0], *(it for it in those if isinstance(it, str))))  # of one left out there is a mark
    return found


def parse_pairs(flag: str, pairs: Iterable[str], variable: bool = False) -> dict[str, str]:
    """NAME=VALUE pairs of a repeatable flag."""
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        shown = f"{name}=…" if variable and equals else pair  # the value may be a secret
        if not equals or not name or "\0" in pair:
            example = "LR=0.1" if variable else "team=vision"
            raise UserError(f"{flag} {shown!r} is not NAME=VALUE; write for example {flag} {example}")
        if variable and not _VARIABLE.fullmatch(name):
            raise UserError(f"{flag} {shown!r}: a variable's name has letters from A to Z, digits and '_'; rename it")
        found[name] = value
    return found


def parse_streams(flag: str, text: str, ranks: int) -> dict[int, int]:
    """Which streams of which local ranks a flag such as --tee names: local rank → 0, OUT, ERR or BOTH.

    The forms are torchrun's: one number for all (0 none, 1 stdout, 2 stderr, 3 both) or `0:3,1:2` by local rank; `all`
    and `none` stand for 3 and 0.
    """
    if text in _STREAMS:
        return dict.fromkeys(range(ranks), _STREAMS[text])
    chosen = dict.fromkeys(range(ranks), 0)
    for part in text.split(","):
        rank, colon, streams = part.partition(":")
        if not colon or not rank.isdecimal() or streams not in _STREAMS:
            raise UserError(
                f"{flag} {text!r} is not all, none, 0 … 3 or RANK:STREAMS,…; write for example {flag} 0:3,1:2"
                + ("; --time-limit 2h is a limit of time" if text.count(":") > 1 else "")
            )
        if int(rank) >= ranks:
            raise UserError(f"{flag} names local rank {rank}, but there are {ranks} on this node, numbered from 0")
        chosen[int(rank)] = _STREAMS[streams]
    return chosen


def parse_numbers(flag: str, text: str, example: str = "0,1") -> list[int]:
    """Whole numbers separated by commas."""
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise UserError(f"{flag} {text!r} is not a list of numbers; write for example {flag} {example}")
    return [int(part) for part in parts]


def parse_address(flag: str, text: str) -> tuple[str, int | None]:
    """HOST or HOST:PORT, an IPv6 address in brackets included; port None when there is none."""
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.%\w]+\]|[^:\[\]\s]+)(?::(\d{1,5}))?", text)
    if match is None or (match[2] is not None and int(match[2]) > 65535):
        raise UserError(f"{flag} {text!r} is not HOST or HOST:PORT; write for example {flag} node0:29400")
    return match[1].strip("[]"), None if match[2] is None else int(match[2])
