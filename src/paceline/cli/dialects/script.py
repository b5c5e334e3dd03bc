"""A script of the shell that starts one launcher, as one line of paceline: what stands before it is the setup."""

from __future__ import annotations

import os
import re
import shlex
from typing import TYPE_CHECKING

from paceline.job.errors import UserError

from .engine import Line, put_before
from .mpirun import UNSET
from .shell import ASSIGNED, Command, commands, filled, is_expanded, plain, quoted, variable
from .tools import MEETING, TOOLS, inlined, launched, parts, recognised

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_OPENING, _CLOSING = {"if", "for", "while", "until", "case", "{", "("}, {"fi", "done", "esac", "}", ")"}
# Variables with which scripts for other tools count the GPUs of a node, and the nodes.
_GPUS = (
    "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE", "SKYPILOT_NUM_GPUS_PER_NODE", "DSTACK_GPUS_PER_NODE",
    "PET_NPROC_PER_NODE",
)  # fmt: skip
_NODES = ("SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SKYPILOT_NUM_NODES", "DSTACK_NODES_NUM", "PET_NNODES")
_MARK = "\u02d0"  # around the name of a variable of _GPUS; a letter, so that values may be made of it
_MARKED = re.compile(f"{_MARK}([A-Z_]+){_MARK}")
_OF_OTHERS = re.compile(r"\$\{?((?:SKYPILOT|DSTACK)_\w+)")
_SUBMIT_DIR = re.compile(r"\$(SLURM_SUBMIT_DIR\b|\{SLURM_SUBMIT_DIR\})")
_ENTERING = (["cd"], ["pushd"], ["popd"])
_SIMPLE = re.compile(r"[\w./:@%+,=-]*")  # a value that means the same in quotes and outside
_WORDS = re.compile(r"[\w./:@%+,=\s-]*")  # outside, one that is several words
_BREAK = Command("", "", "\n")
_DECLARING = ("export", "declare", "typeset", "local", "readonly")
_SETTING = (*_DECLARING, "read", "let", "unset", "for", "select", "getopts", "mapfile", "readarray", "printf")
_COUNTED = re.compile(r"([A-Za-z_]\w*)\s*(?:\+\+|--|[^\w\s]{0,2}=)")  # what is in ((NAME++)), a command of its own


def line_of(text: str, flags: Sequence[tuple[str, ...]]) -> tuple[Line, bool]:
    """The line of `paceline submit` for a script, and whether a launcher is in it; `flags` stand for what is around it.

    Commands before the launcher become the setup, `cd` the working dir, and variables with known values those of the
    job. What has no place in a job is named in the notes.
    """
    nodes = next((words[1] for words in reversed(flags) if words[0] == "--nnodes"), "1")
    pairs = [words[1].partition("=") for words in flags if words[0] == "--env"]
    values = {**{name: f"{_MARK}{name}{_MARK}" for name in _GPUS}, **dict.fromkeys(_NODES, nodes)}
    values.update((name, value) for name, _, value in pairs if _SIMPLE.fullmatch(value))
    typed = [it for one in commands(text) for it in inlined(one) if not it.words.startswith("#")]
    ends = ["", *(it.end for it in typed)]  # a line may end behind && or |
    typed = [it for it, end in zip(typed, ends, strict=False) if it != _BREAK or end not in ("&&", "||", "|")]
    found = list[Command]()
    unknown = set[str]()
    for command, is_certain in zip(typed, _certain(typed), strict=True):
        found.append(command._replace(words=filled(command.words, values)))
        unknown |= _learn(values, found[-1], is_certain=is_certain)
    try:
        place, line, is_launched = _program(found, text)
    except UserError as error:
        raise UserError(_unmarked(str(error))) from None
    start, own = (Line(flags=list(it)).get("--working-dir") or "" for it in (flags, line.flags))
    line.flags = [words for words in line.flags if words[0] not in MEETING]
    put_before(line, flags)
    line.verb = "submit"
    _count_gpus(line)
    before, line.before = line.before, []
    line.flags += [("--env", word) for word in before if ASSIGNED.fullmatch(word)]
    if others := " ".join(plain(word) for word in before if not ASSIGNED.fullmatch(word) and word != "time"):
        line.notes.append(f"left out: {others}, which stands before the launcher")
    _keep_shell(line)
    _add_setup(line, found[:place], unknown, start, own)
    _drop_set(line)
    _name_unset(line)
    if found[place].redirected:
        line.notes.append(f"left out: {found[place].redirected}; each rank has a log file, see paceline logs JOB")
    if rest := _on_one_line(_text(found[place + 1 :])):
        line.notes.append(f"left out: {rest}; a job runs one program")
    return line, is_launched


def _count_gpus(line: Line) -> None:
    """Make variables of _GPUS mean all GPUs where a flag of the launcher is one; elsewhere they stay variables."""

    def named(word: str) -> str:
        return _MARKED.sub(lambda it: variable(it[1]), word)

    line.flags = [
        words if words[0] == "--env" else tuple("gpu" if _MARKED.fullmatch(it) else named(it) for it in words)
        for words in line.flags
    ]
    line.program = list(map(named, line.program))
    line.notes = list(map(_unmarked, line.notes))


def _unmarked(text: str) -> str:
    """A text with the variables of _GPUS as they were typed."""
    return _MARKED.sub(r"$\1", text)


def _name_unset(line: Line) -> None:
    """Name variables of other tools that nothing sets: those of the environment that have such values are left out."""
    for words in [words for words in line.flags if words[0] == "--env" and _MARKED.search(words[1])]:
        line.flags.remove(words)
        line.notes.append(f"left out: {_unmarked(words[1])}; its value is not known here")
    used = " ".join([*(plain(it) for it in line.program), *(it[1] for it in line.flags if it[0] == "--setup")])
    given = {words[1].partition("=")[0] for words in line.flags if words[0] == "--env"}
    if names := [f"${name}" for name in sorted(set(_OF_OTHERS.findall(used)) - given)]:
        line.notes.append(f"no job of paceline sets {', '.join(names)}; write their values")


def _drop_set(line: Line) -> None:
    """Leave out what mpirun passes on, if the job sets it: `-x NAME`."""
    names = {words[1].partition("=")[0] for words in line.flags if words[0] == "--env"}
    line.flags = [words for words in line.flags if words[0] != "--secret" or words[1] not in names]
    names.update(words[1] for words in line.flags if words[0] == "--secret")
    line.notes = [note for note in line.notes if note not in map(UNSET.format, names)]


def _on_one_line(text: str) -> str:
    """Commands on one line, as people write them."""
    return re.sub(r"\s*\n\s*", "; ", re.sub(r"\b(then|do|else)\n\s*|\\\n\s*", r"\1 ", text))


def _certain(found: list[Command]) -> Iterator[bool]:
    """Whether each command runs whenever the launcher does."""
    place = next((number for number, it in enumerate(found) if recognised(parts(it)[1]) is not None), len(found))
    before, ends = 0, ["", *(it.end for it in found)]
    for number, (_, depth) in enumerate(_depths(found)):
        is_chained = ends[number] == "&&" and not all(end == "&&" for end in ends[number + 1 : place + 1])
        yield before <= 0 and depth <= 0 and not is_chained and ends[number] not in ("||", "|", "|&")
        before = depth


def _learn(values: dict[str, str], command: Command, *, is_certain: bool) -> set[str]:
    """Note the values that a command gives to variables; returns those of which it leaves no one value."""
    unknown = set()
    for name, how, value in _given(command):
        known = values.pop(name, "$") + value if how == "+=" else value
        if is_certain and how and _WORDS.fullmatch(known):
            values[name] = known
        else:
            values.pop(name, None)
        if name not in values or how == "+=":
            unknown.add(name)
    return unknown


def _given(command: Command) -> Iterator[tuple[str, str, str]]:
    """The variables that a command sets in the shell: the name, = or += (nothing if it computes it), and the value."""
    before, words = parts(command)
    has_values = words[:1] in ([], ["export"])
    for word in words if words and words[0] in _SETTING else before if not words else ():
        name, equals, value = word.partition("=")
        how = "+=" if name.endswith("+") else equals
        if equals or (words and words[0] not in _DECLARING):
            yield name.removesuffix("+"), how if has_values else "", value
    if words and (counted := _COUNTED.match(plain(command.words))) is not None:
        yield counted[1], "", ""


def _assigned(command: Command) -> list[str]:
    """The words NAME=VALUE of a command that does nothing but set variables; none of others."""
    before, words = parts(command)
    words = words[1:] if words[:1] == ["export"] and not before else [] if words else before
    return words if all(ASSIGNED.fullmatch(word) for word in words) else []


def _program(found: list[Command], text: str) -> tuple[int, Line, bool]:
    """The place of the command that starts the ranks, the line that it becomes, and whether it is a launcher."""
    lines = [launched(command) for command in found]
    places = [place for place, line in enumerate(lines) if line is not None]
    is_launched = bool(places)
    if len(places) > 1:
        raise UserError(f"it starts {len(places)} launchers, and a job runs one program; make a file for each")
    if not is_launched:
        lines = [launched(command, is_alone=True) for command in found]
        places = [place for place, line in enumerate(lines) if line is not None][-1:]
    if not places:
        if not text.strip():
            raise UserError("it runs no command; name a script, as in paceline submit train.py")
        return len(found) - 1, Line(flags=[("--no-python",)], program=["bash", "-c", text]), False
    _refuse_blocks(found, places[0])
    line = lines[places[0]]
    assert line is not None
    if line.verb not in ("run", "submit"):
        what = " ".join(plain(found[places[0]].words).split())
        why = "a variable may hold flags; write their values" if line.verb in TOOLS else "it starts no job"
        raise UserError(f"{what}: {why}")
    return places[0], line, is_launched


def _depths(found: Sequence[Command]) -> Iterator[tuple[Command, int]]:
    """Each command, and how many loops, conditions and brackets are open behind it."""
    depth = brackets = 0
    for command in found:
        words = plain(command.words).split()[:2]
        depth += sum(word in _OPENING for word in words) - sum(word in _CLOSING for word in words)
        brackets = max(brackets + (command.end == "(") - (command.end == ")"), 0)  # one in a `case` may close none
        yield command, depth + brackets


def _refuse_blocks(found: list[Command], place: int) -> None:
    """Refuse a launcher that stands in a loop or a condition."""
    *_, (_, depth) = _depths(found[: place + 1])
    if depth > 0 or (place and found[place - 1].end == "||"):
        raise UserError(
            "the launcher stands in a loop or a condition; write what it starts, as in paceline submit SCRIPT"
        )


def _keep_shell(line: Line) -> None:
    """Leave words to a shell on each rank that only it knows, such as `$SCRATCH/data`."""
    for words in line.flags:
        if any(map(is_expanded, words)):
            raise UserError(f"{plain(' '.join(words))}: its value is not known here; write it")
    if any(map(is_expanded, line.program)):
        _give_to_shell(line)


def _give_to_shell(line: Line) -> None:
    """Make a shell start the program on each rank."""
    is_module = line.get("-m") is not None
    is_script = line.take("-m", "--no-python") is None and line.program[0].endswith(".py")
    program = [*(["python"] if is_module or is_script else ()), *(["-m"] if is_module else ()), *line.program]
    line.add("--no-python")
    line.program = ["sh", "-c", plain(f"exec {' '.join(map(quoted, program))}")]


def _add_setup(line: Line, before: list[Command], unknown: set[str], start: str, own: str) -> None:
    """What stands before the launcher: the folder, variables, and commands that run once on each node.

    `start` is the folder in which the script starts, and `own` the one that the launcher itself enters.
    """
    found = _blocks(before)
    entered = [block[0] for block in found if _is_cd(block)]
    folder = _ended(entered, start)
    blocks: list[tuple[str, bool]] = []  # each with whether it enters a folder
    used = plain(" ".join(line.program))
    for block in reversed(found):
        first, name = block[0], plain(parts(block[0])[1][0]) if parts(block[0])[1] else ""
        assigned = _assigned(first) if len(block) == 1 else []
        is_exported, text = name == "export", _command(block)
        names = dict.fromkeys(given for command in block for given, _, _ in _given(command))
        needed = [it for it in names if re.search(rf"(\$\{{?|(\(\(|\bexport\s).*\b){it}\b", used)]
        if len(block) == 1 and (name == "set" or (assigned and not is_exported and not needed)):
            continue  # a setup ends at the first command that fails; a value that nothing uses stands there by now
        if assigned and is_exported and not (unknown.intersection(names) or any(map(is_expanded, assigned))):
            line.flags[:0] = [("--env", word) for word in assigned if not _is_set(line, word)]
            continue
        if assigned and not is_exported:
            text = f"export {text}"
        elif needed and not is_exported:
            text += f"\nexport {' '.join(needed)}"
        elif _is_cd(block) and _SUBMIT_DIR.search(plain(first.words)):
            text = f"cd {shlex.quote(os.path.abspath(_entered(first, '') or '.'))}"
        if blocks or not _is_cd(block):
            used += f" {text}"
        blocks.insert(0, (text, _is_cd(block)))
    at = os.path.normpath(os.path.join(start if folder is None else folder, own))
    has_copy = line.get("--sync-mode") is not None  # in which setup and ranks start, whatever the working dir is
    if has_copy and at != os.path.normpath(start or "."):
        if line.program[:2] != ["sh", "-c"]:
            _give_to_shell(line)
        line.program[2] = f"cd {shlex.quote(at)} && {line.program[2]}"
        at = start or "."
    line.notes += [
        f"whether the script enters a folder with {words} is not known here; see --working-dir"
        for words in filter(None, map(_entered_perhaps, found))
    ]
    line.take("--working-dir")
    if at != ".":
        line.add("--working-dir", at)
    if folder is None:
        line.notes.append(f"left out: {plain(entered[-1].words)}; name the folder with --working-dir")
    for text in _in_folders(line, blocks, start, at, is_in_last=folder is not None and not own and not has_copy):
        line.add("--setup", text)


def _is_cd(block: list[Command]) -> bool:
    """Whether a block enters a folder, as in `cd x` or `cd x || exit 1`."""
    is_one = len(block) == 1 or (len(block) == 2 and block[0].end == "||")
    return is_one and parts(block[0])[1][:1] in _ENTERING


def _entered_perhaps(block: list[Command]) -> str | None:
    """The first command in a loop or a condition that enters a folder of the shell itself."""
    depth = 0
    for command in block if not _is_cd(block) else ():
        words = parts(command)[1]
        if words[:1] in _ENTERING and not depth:
            return plain(" ".join(words))
        depth += (command.end == "(") - (command.end == ")")
    return None


def _entered(command: Command, folder: str | None) -> str | None:
    """The folder to which a `cd` leads from another one; None for one that is not known here."""
    words = parts(command)[1][1:]
    target = plain(" ".join(words))
    if (submitted := _SUBMIT_DIR.match(target)) is not None:
        folder, target = "", target[submitted.end() :].lstrip("/") or "."
    elif any(map(is_expanded, words)):
        return None
    if len(words) != 1 or "$" in target or target == "-":
        return None
    return target if os.path.isabs(target) else None if folder is None else os.path.join(folder, target)


def _ended(entered: list[Command], start: str) -> str | None:
    """The folder in which commands such as `cd` end; None for one that is not known here."""
    folder: str | None = start
    left: list[str | None] = []  # by pushd
    for command in entered:
        name = parts(command)[1][0]
        if name == "popd":
            folder = left.pop() if left else None
            continue
        if name == "pushd":
            left.append(folder)
        folder = _entered(command, folder)
    return folder


def _in_folders(line: Line, blocks: list[tuple[str, bool]], start: str, at: str, *, is_in_last: bool) -> list[str]:
    """The setup, which starts in the folder of the ranks, `at`: where its commands run in others, it enters these.

    `is_in_last` says that the ranks start where the last `cd` ends.
    """
    kinds = [is_cd for _, is_cd in blocks]
    if all(kinds):
        return []
    texts = [text for text, _ in blocks]
    first = kinds.index(False)
    if is_in_last and True not in kinds[first:]:
        return texts[first:]
    texts = texts[: len(kinds) - kinds[::-1].index(False)]
    if os.path.normpath(start or ".") == os.path.normpath(at):
        return texts
    back = os.path.abspath(start or ".")
    if not os.path.isabs(start) and (line.get("--image") or line.get("--on") == "kubernetes"):
        if os.path.isabs(at):
            line.notes.append(f"the setup runs in {at}; write where what stands before cd {at} is to run")
            return texts
        back = os.path.relpath(start or ".", at)
    return [f"cd {shlex.quote(back)}", *texts]


def _is_set(line: Line, word: str) -> bool:
    return any(words[0] == "--env" and words[1].partition("=")[0] == word.partition("=")[0] for words in line.flags)


def _blocks(found: list[Command], joined: Sequence[str] = ("|", "||", "|&", "&&")) -> list[list[Command]]:
    """The commands, those together that belong together: loops, conditions, pipes, `A || B`, and `A && B`.

    `A && B` is two where the launcher, which needs both, is behind it, or one of them enters a folder.
    """
    blocks: list[list[Command]] = [[]]
    for command, depth in _depths(found):
        blocks[-1].append(command)
        if depth <= 0 and command.end not in joined:
            blocks.append([])
    blocks = [block for block in blocks if any(it.words for it in block)]
    if "&&" not in joined:
        return blocks
    apart = [it[-1].end == "&&" or any(parts(one)[1][:1] in _ENTERING for one in it) for it in blocks]
    return [
        one
        for block, is_apart in zip(blocks, apart, strict=True)
        for one in (_blocks(block, joined[:-1]) if is_apart else [block])
    ]


def _command(block: list[Command]) -> str:
    """A block as one command; `A && B` as a condition, since it fails where A does, and the script would go on."""
    places = [place for place, (it, depth) in enumerate(_depths(block[:-1]), 1) if it.end == "&&" and depth <= 0]
    if not places or any(it.end == "||" for it in block):
        return _text(block)
    return f"if {_text(block[: places[-1]])}; then\n{_text(block[places[-1] :])}\nfi"


def _text(found: Sequence[Command]) -> str:
    """Commands as they were typed, without what joins the last one to others."""
    said = ""
    for command in found:
        said += " ".join(filter(None, (_unmarked(plain(command.words)), command.redirected)))
        said += {"\n": "\n", ";": "; ", "(": "(", ")": ")", "": ""}.get(command.end, f" {command.end} ")
    return re.sub(r"(\s*(&&|;|\n))+\s*$", "", said).strip()


def setup_line(verb: str, flags: Sequence[tuple[str, ...]], text: str) -> str | None:
    """What to write for commands in quotes in the place of SCRIPT, of which the last one is the program; None for one.

    `flags` are those of the verb that the user has written before it.
    """
    if len([it for it in commands(text) if it.words]) < 2:
        return None
    line, _ = line_of(text, flags)
    line.verb = verb
    return shlex.join([text]) + f": what stands before the program is its setup; write: {line.text()}"
