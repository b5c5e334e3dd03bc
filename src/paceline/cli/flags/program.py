"""The program of a command line, as users may write it: `train.py`, `python train.py`, or a whole command in quotes."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from typing import Any

from paceline.job.errors import UserError

from .where import is_elsewhere

_PYTHON = re.compile(r"python(3(\.\d+)?)?")
# Launchers, and kinds of jobs of Arena's: what people type in the place of SCRIPT who have used these.
_OTHERS = frozenset({
    "torchrun", "horovodrun", "fleetrun", "mpirun", "mpiexec", "orterun", "srun", "sbatch", "arena", "paddlecloud",
    "accelerate", "deepspeed",
    "pytorch", "pytorchjob", "tf", "tfjob", "mpi", "mpijob", "horovod", "horovodjob",
})  # fmt: skip


def program_of(given: dict[str, Any], verb: str) -> dict[str, Any]:
    """The flags with SCRIPT and ARGS as if the user had named the script alone.

    `python [-u] [-m] SCRIPT` is SCRIPT if that is the Python that runs paceline, so that ranks can be forked. With
    another Python, or other options of Python, it is a command.
    """
    words = [given["script"], *given["args"]]
    if given["module"]:
        _refuse_launchers(verb, ["python", "-m", *words])
    if given["module"] or given["no_python"]:
        return given
    folder = given["working_dir"] or "."
    if " " in words[0].strip() and not os.path.exists(os.path.join(folder, words[0])):
        try:
            words[:1] = shlex.split(words[0])
        except ValueError as error:
            raise UserError(f"{words[0]!r}: {str(error).lower()}; write the command without quotes around it") from None
    is_file = not os.path.isabs(words[0]) and os.path.isfile(os.path.join(folder, words[0]))
    if not is_file:
        _refuse_launchers(verb, words)
    if not _PYTHON.fullmatch(os.path.basename(words[0])) or is_file:
        return {**given, "script": words[0], "args": tuple(words[1:])}
    python, *rest = words
    options = []
    while rest and rest[0] in ("-u", "-m"):
        options.append(rest.pop(0))
    if not rest:
        raise UserError(f"{' '.join(words)} names no script; write for example paceline run train.py")
    if rest[0].startswith("-") or not (is_elsewhere(given) or _is_ours(python)):
        return {**given, "no_python": True, "script": python, "args": tuple(words[1:])}
    return {**given, "module": "-m" in options, "script": rest[0], "args": tuple(rest[1:])}


def _refuse_launchers(verb: str, words: list[str]) -> None:
    if words[0] in _OTHERS or any(word.endswith((".run", ".launch")) for word in words[2:4]):
        from paceline.cli.dialects.tools import old_program

        if (answer := old_program(verb, words)) is not None:
            raise UserError(answer)


def _is_ours(python: str) -> bool:
    """Whether a command is the Python that runs paceline, or is not there at all."""
    found = shutil.which(python)
    return found is None or os.path.dirname(os.path.abspath(found)) == os.path.dirname(sys.executable)
