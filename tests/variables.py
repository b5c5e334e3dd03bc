"""Compares what a dry run shows of a job's ranks with what they have in their environment."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

CHOSEN = "<chosen at start>"
# Each rank leaves its environment in a file: `run` shows only the first one's output.
TELL = """
    import json, os
    with open("env-" + os.environ["PACELINE_RANK"], "w") as file:
        json.dump(dict(os.environ), file)
"""
OF_MPIRUN = re.compile("OMPI_|PMIX_|OPAL_|PRTE_|HYDRA_|IPATH_")  # what it sets itself
OF_PYTHON = ("LC_CTYPE",)


def told(folder: Path) -> list[dict[str, str]]:
    """What the ranks have left, by rank."""
    files = sorted(folder.glob("env-*"), key=lambda path: int(path.name[4:]))
    found = [json.loads(path.read_text()) for path in files]
    for path in files:
        path.unlink()
    return found


def compare(shown: dict[str, str], real: dict[str, str], inherited: dict[str, str]) -> None:
    """Every variable that a rank has beside what it inherits is shown, as it is, and no other."""
    assert not shown.keys() - real.keys()
    given = {name for name, value in real.items() if inherited.get(name) != value}
    missing = {name for name in given - shown.keys() if not OF_MPIRUN.match(name) and name not in OF_PYTHON}
    assert not missing
    for name, value in shown.items():
        pattern = re.escape(value).replace(re.escape(CHOSEN), ".+").replace("<secret>", ".+")
        assert re.fullmatch(pattern, real[name], re.DOTALL), (name, value, real[name])
