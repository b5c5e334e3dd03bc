"""mpirun's daemon: what mpirun writes for a shell on another machine, as a command that needs none."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PROGRAM = "orted"
_FOLDERS = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")  # to which mpirun adds those of its --prefix
_BETWEEN = frozenset(";()")


def parse(line: str) -> tuple[list[str], dict[str, str]]:
    """The command in a line for sh, ksh, bash, zsh or csh, and the folders that the line puts first in variables.

    Before the command there may be assignments (`PATH=/opt/bin:$PATH ; export PATH ;`, or those of csh), and the
    reading of ./.profile, which is left out: the daemon gets the variables of the job's ranks.
    """
    lexer = shlex.shlex(line, posix=True, punctuation_chars="".join(_BETWEEN))
    lexer.whitespace_split, lexer.commenters = True, ""
    parts: list[list[str]] = [[]]
    for word in lexer:
        if word and _BETWEEN.issuperset(word):
            parts.append([])
        else:
            parts[-1].append(word)
    *before, command = [part for part in parts if part] or [[]]
    folders = dict(filter(None, map(_assignment, before)))
    check(command, folders)
    return command, folders


def check(command: list[str], folders: dict[str, str]) -> None:
    """Check that this starts mpirun's daemon, and nothing else."""
    is_command = isinstance(command, list) and all(isinstance(word, str) and "\0" not in word for word in command)
    if not is_command or not command or os.path.basename(command[0]) != PROGRAM:
        raise ValueError(f"{str(command)[:200]} is not the command of mpirun's daemon, {PROGRAM}")
    if not set(folders) <= set(_FOLDERS) or not all(isinstance(each, str) for each in folders.values()):
        raise ValueError(f"mpirun's daemon takes no variables {str(folders)[:200]}")


def with_folders(folders: Mapping[str, str], env: Mapping[str, str]) -> dict[str, str]:
    """Those of these variables that have a new value when the folders go first in them."""
    return {name: os.pathsep.join(part for part in (folder, env.get(name)) if part) for name, folder in folders.items()}


def _assignment(part: Sequence[str]) -> tuple[str, str] | None:
    """The variable and the folder that is put first in it, if that is what a part of the line does."""
    if len(part) == 2 and part[1] == "$path":  # of `set path = ( FOLDER $path )`
        return "PATH", part[0]
    if len(part) == 3 and part[0] == "setenv":
        name, value = part[1:]
    elif len(part) == 1:
        name, _, value = part[0].partition("=")
    else:
        return None
    folder = value.partition(":$")[0]
    return (name, folder) if name in _FOLDERS and folder else None
