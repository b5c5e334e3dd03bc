"""The tools that paceline knows, each loaded when one of its lines is read."""

from __future__ import annotations

import importlib
import os
import re
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.job.errors import UserError, nearest

from .engine import PYTHON, Line, Refused, Tool, knows, parse

if TYPE_CHECKING:
    from collections.abc import Sequence

# verb → where its table is
TOOLS = {
    "torchrun": "torchrun:TORCHRUN",
    "torch-launch": "torchrun:TORCH_LAUNCH",
    "horovodrun": "horovodrun:HOROVODRUN",
    "paddle-launch": "paddle:PADDLE_LAUNCH",
    "mpirun": "mpirun:MPIRUN",
    "srun": "srun:SRUN",
    "arena": "arena:ARENA",
    "paddlecloud": "paddlecloud:PADDLECLOUD",
}
_PROGRAMS = {**{tool: tool for tool in TOOLS}, "fleetrun": "paddle-launch", "mpiexec": "mpirun", "orterun": "mpirun"}
_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torch-launch",
    "paddle.distributed.launch": "paddle-launch",
    "paddle.distributed.fleet.launch": "paddle-launch",
    "fleet.launch": "paddle-launch",
    "horovod.runner.launch": "horovodrun",
}
# Verbs of other tools that paceline has under another name, or not at all.
_VERBS = {
    "launch": "paceline run SCRIPT, or paceline submit SCRIPT",
    "train": "paceline run SCRIPT, or paceline submit SCRIPT",
    "exec": "paceline attach JOB -- COMMAND",
    "ssh": "paceline attach JOB",
    "status": "paceline get JOB",
    "describe": "paceline get JOB",
    "info": "paceline get JOB",
    "queue": "paceline list",
    "jobs": "paceline list",
    "ls": "paceline list",
    "ps": "paceline list",
    "log": "paceline logs JOB",
    "logviewer": "paceline logs JOB",
    "cancel": "paceline stop JOB",
    "kill": "paceline stop --now JOB",
    "down": "paceline stop JOB",
    "scancel": "paceline stop JOB",
    "sbatch": "paceline submit --on slurm SCRIPT",
    "squeue": "paceline list",
    "rm": "paceline delete JOB",
    "requeue": "paceline resubmit JOB",
    "config": "paceline check",
    "env": "paceline check",
    "runopts": "paceline run --help-all",
    "version": "paceline --version",
}
_KINDS = ("pytorch", "pytorchjob", "tf", "tfjob", "mpi", "mpijob", "horovod", "horovodjob")  # behind `arena submit`
# How nodes find each other: of a launcher within a job, this is paceline's task.
_MEETING = ("--node-rank", "--master-addr", "--master-port", "--rdzv-endpoint", "--rdzv-id", "--standalone")
_NAME = re.compile(r"([A-Za-z_]\w*)=.*", re.DOTALL)


def load(name: str) -> Tool:
    """The tool behind a verb."""
    module, _, attribute = TOOLS[name].partition(":")
    found: Tool = getattr(importlib.import_module(f"{__package__}.{module}"), attribute)
    return found


def recognised(words: Sequence[str]) -> tuple[Tool, list[str]] | None:
    """The tool that a command line calls, and the words behind its name; None for other programs."""
    rest = list(words)
    if not rest:
        return None
    if PYTHON.fullmatch(os.path.basename(rest[0])):
        rest = [word for word in rest[:2] if word != "-u"] + rest[2:]
        if rest[1:2] == ["-m"] and len(rest) > 2 and rest[2] in _MODULES:
            return load(_MODULES[rest[2]]), rest[3:]
        return None
    name = _PROGRAMS.get(os.path.basename(rest[0]))
    return None if name is None else (load(name), rest[1:])


def unwrap(line: Line) -> None:
    """Replace a launcher in the program by what its flags become: paceline starts the ranks itself.

    Raises:
        UserError: see `parse`.
    """
    found = recognised(line.program)
    if found is None:
        return
    tool, words = found
    inner = parse(tool, words)
    inner.take(*_MEETING)
    ranks = [words for words in inner.flags if words[0] in ("-n", "-np")]
    if ranks:
        line.take("-n", "-np")
    if line.get("--gpus") is not None:
        inner.take("--devices")
    has = {words[0] for words in line.flags}
    line.flags += [words for words in inner.flags if words[0] not in has or words[0] == "--env"]
    line.notes += inner.notes
    line.program = inner.program


def explained(text: str) -> Line:
    """The line of paceline that a line of another tool becomes, with the variables before it.

    Raises:
        UserError: it is none, or cannot be read.
    """
    text, after = _command(text.replace("\\\n", " "))
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise UserError(f"{text!r}: {str(error).lower()}; put the line into quotes of the other kind") from None
    words = words[1:] if words[:1] == ["$"] else words
    before = []
    while words and _NAME.fullmatch(words[0]):
        before.append(words.pop(0))
    has_nohup = words[:1] == ["nohup"]
    words = words[1:] if words[:1] in (["nohup"], ["time"], ["exec"]) else words
    if words[:1] == ["paceline"] and words[1:2] and words[1] in TOOLS:
        words = words[1:]
    found = recognised(words)
    if found is None:
        known = ", ".join((*_PROGRAMS, *(f"python -m {module}" for module in list(_MODULES)[:3])))
        raise UserError(f"{words[0] if words else text} is no launcher that paceline knows; they are {known}")
    line = parse(*found)
    line.before, line.after = [*before, *line.before], after
    if has_nohup:
        line.notes.append("nohup is not needed: a job of paceline submit, or run --detach, outlives the terminal")
    return line


def _command(text: str) -> tuple[str, str]:
    """A command, and what the shell does with it: all from the first `|`, `&`, `;`, `<` or `>` that is not quoted."""
    found = re.match(r"""(?:\\.|'[^']*'|"(?:\\.|[^"\\])*"|[^'"\\|&;<>])*""", text, re.DOTALL)
    end = found.end() if found is not None else len(text)
    if text[end : end + 1] in ("'", '"'):  # a quote without its end, which shlex refuses
        return text, ""
    number = re.search(r"(?<=\s)\d+$", text[:end]) if text[end : end + 1] in ("<", ">") else None
    end = number.start() if number is not None else end
    return text[:end], text[end:].strip()


# -- old flags and verbs behind verbs of paceline ----------------------------------------------------------------------


def old_verb(verb: str, own: Sequence[str]) -> str:
    """What is said of a verb that paceline does not have."""
    if verb in _VERBS:
        return f"paceline has no verb {verb!r}; write {_VERBS[verb]}"
    if verb in _PROGRAMS:
        return f"paceline has no verb {verb!r}; write paceline {_PROGRAMS[verb]}"
    return f"paceline has no verb {verb!r}; {nearest(verb, own)}"


def old_program(script: str, args: Sequence[str]) -> str | None:
    """What is said of a SCRIPT that is the name of a launcher, or a kind of job of Arena's."""
    words = ["arena", "submit", script, *args] if script in _KINDS else [script, *args]
    try:
        found = recognised(words)
        if found is None:
            return None
        line = parse(*found)
    except UserError as error:
        return f"{script} is no script: {error}"
    return f"{script} is no script; write: {line.text()}"


def old_flag(verb: str, name: str, words: Sequence[str]) -> str | None:
    """What is said of a line with a flag that only another tool has; None if none has it.

    Args:
        verb: of paceline.
        name: of the flag.
        words: those behind the verb.
    """
    refused = None
    for tool in _with_flags_like(verb):
        try:
            line = parse(replace(tool, shortens=False), words)
        except UserError as error:
            if knows(tool, name) and refused is None:
                refused = f"that is a line of {tool.name}: {error}"
            continue
        line.verb = verb
        if line.text() != Line(verb, program=list(words)).text():
            return "; ".join((f"that is a line of {tool.name}", *line.notes, f"write: {line.text()}"))
    return refused


def _with_flags_like(verb: str) -> list[Tool]:
    """The tools whose lines may have been meant by a line of a verb."""
    arena = load("arena")
    found: list[Tool | Refused] = []
    if verb in ("run", "submit"):
        found = [tool for name in TOOLS if not (tool := load(name)).tools]
        arena, verb = _within(arena, "submit"), ""
        found += dict.fromkeys(arena.tools.values())
    for word in verb.split():
        arena = _within(arena, word)
        found = [arena]
    return [tool for tool in found if isinstance(tool, Tool)]


def _within(tool: Tool, name: str) -> Tool:
    """A subcommand; one without flags if there is none."""
    found = tool.tools.get(name)
    return found if isinstance(found, Tool) else Tool(name)
