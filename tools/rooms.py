"""Check that no room of the source has more lines of code than its budget.

Docstrings, comments and blank lines do not count. Whoever needs more raises the budget in the same commit, and says why
there; whoever needs less lowers it, so that the lines that were won are not lost again.
"""

from __future__ import annotations

import ast
import sys
import tokenize
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
BUDGETS = {  # the files of a room that has others in it are those which are in none of these
    "paceline": 440,
    "paceline/backends": 2365,
    "paceline/backends/check": 435,
    "paceline/backends/environments": 925,
    "paceline/backends/kubernetes": 5155,
    "paceline/backends/local": 580,
    "paceline/backends/rehearsal": 655,
    "paceline/backends/remote": 1115,
    "paceline/backends/slurm": 1055,
    "paceline/backends/ssh": 2155,
    "paceline/cli": 270,
    "paceline/cli/dialects": 2910,
    "paceline/cli/flags": 1450,
    "paceline/cli/terminal": 690,
    "paceline/cli/verbs": 3525,
    "paceline/contract": 2750,
    "paceline/horovod": 4955,
    "paceline/job": 1795,
    "paceline/job/code": 985,
    "paceline/node": 2005,
    "paceline/node/agent": 1430,
    "paceline/node/host": 1455,
    "paceline/node/host/slurm": 2890,
    "paceline/node/journal": 575,
    "paceline/node/logs": 595,
    "paceline/node/machine": 1750,
    "paceline/node/planning": 730,
    "paceline/node/ranks": 2055,
    "paceline/node/ranks/rehearsal": 685,
    "paceline/node/rendezvous": 1550,
    "paceline/node/store": 1515,
    "paceline/node/telemetry": 700,
    "paceline/node/warm": 825,
    "paceline/node/watching": 1590,
    "paceline/notify": 710,
    "paceline/train": 755,
    "paceline/train/checkpoint": 1730,
    "paceline/train/control": 890,
    "paceline/train/data": 1795,
    "paceline/train/group": 990,
    "paceline/train/loop": 2175,
    "paceline/train/metrics": 765,
    "paceline/train/parallel": 6530,
    "paceline/train/replicas": 450,
    "paceline/web": 2120,
}
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip


def lines_of_code(path: Path) -> int:
    """The number of lines of a file that have code."""
    with open(path, "rb") as file:
        tokens = [token for token in tokenize.tokenize(file.readline) if token.type not in _NO_CODE]
    code = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            code -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(code)


def room_of(path: Path) -> str:
    """The room that a file is in: the longest of the names of rooms that its path begins with."""
    name = path.relative_to(SOURCE).as_posix()
    rooms = [room for room in BUDGETS if name == f"{room}.py" or name.startswith(f"{room}/")]
    return max(rooms, key=len, default=name.rpartition("/")[0])


def main() -> int:
    """Print each room that has more lines than its budget; with -v all."""
    found: Counter[str] = Counter()
    for path in sorted(SOURCE.rglob("*.py")):
        found[room_of(path)] += lines_of_code(path)
    over = {room: lines for room, lines in found.items() if lines > BUDGETS.get(room, 0)}
    for room, lines in sorted(found.items()):
        if room in over or "-v" in sys.argv:
            print(f"{room}: {lines} lines of code, budget {BUDGETS.get(room, 0)}")
    if over:
        print("make it smaller, or raise the budget in tools/rooms.py and say why in the commit")
    return int(bool(over))


if __name__ == "__main__":
    sys.exit(main())
