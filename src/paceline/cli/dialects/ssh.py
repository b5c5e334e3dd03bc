"""`ssh HOST COMMAND`, where COMMAND starts a launcher.

Source: `man ssh` of OpenSSH 9.
"""

from __future__ import annotations

import shlex

from .engine import Ignored, Line, Tool, later, say_program
from .shell import commands, plain
from .tools import unwrap

_OWN = Ignored("paceline connects as your settings of ssh say; write it there")
_SWITCHES = "46AaCfGgKkMNnqsTtVvXxYy"
_OPTIONS = "BbcDEeFIJLmOoPQRSWw"


def _finish(line: Line) -> None:
    """A host, and the command without the launcher."""
    host, *command = line.program
    inside = commands(plain(" ".join(command)))
    if len(inside) > 1 and inside[0].words.startswith("cd ") and inside[0].end in ("&&", ";"):
        line.add("--working-dir", inside.pop(0).words.removeprefix("cd ").strip())
    line.program = shlex.split(inside[0].words)
    if len(inside) > 1 or inside[0].redirected:
        parts = (part for it in inside for part in (it.words, it.redirected, it.end) if part)
        line.program = ["sh", "-c", " ".join(parts)]
    unwrap(line)
    if line.take("--nnodes") not in (None, "1"):
        line.notes.append("one line starts the ranks of all hosts; name them, as -H HOST1,HOST2")
    line.flags.insert(0, ("-H", f"{line.given['-l']}@{host}" if "-l" in line.given else host))
    say_program(line)


SSH = Tool(
    "ssh",
    {
        "-p PORT": "-p",
        "-i FILE": "-i",
        "-l USER": later,
        **{f"-{letter}": "" for letter in _SWITCHES},
        **{f"-{letter} VALUE": _OWN for letter in _OPTIONS},
    },
    finish=_finish,
)
