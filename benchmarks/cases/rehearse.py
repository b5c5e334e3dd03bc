"""`paceline run --rehearse 8` of scripts with a planted fault, and of scripts that are right."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..case import Case, Side
from ..lab import Lab
from ..sample import Failed, Sample
from ..scripts.rehearsed import FAULTY, RIGHT
from .hosts import paceline

RANKS = 8
_MOST_MISSED = 2
_AT = re.compile(r"^train\.py:(\d+): ", re.MULTILINE)


def found(lab: Lab, text: str, folder: Path) -> tuple[bool, bool, float]:
    """Whether a rehearsal has findings, whether one of them names a line with the fault, and how long it took."""
    (folder / "train.py").write_text(text)
    began = time.monotonic()
    line = paceline(lab, "run", "--rehearse", str(RANKS), "--rehearse-seed", "1", "train.py")
    done = subprocess.run(line, cwd=folder, env=lab.env, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - began
    if done.returncode not in (0, 1):
        raise Failed(f"exit code {done.returncode}: {done.stderr[-500:]}")
    faults = {number for number, it in enumerate(text.splitlines(), 1) if "# fault" in it}
    return done.returncode == 1, bool(faults & set(map(int, _AT.findall(done.stdout)))), seconds


def _rehearsed(lab: Lab, scripts: Mapping[str, str], *, are_right: bool) -> Iterator[tuple[Sample]]:
    wrong = []
    for name, text in scripts.items():
        with tempfile.TemporaryDirectory(dir=lab.folder) as folder:
            has_findings, is_named, seconds = found(lab, text, Path(folder))
        if has_findings if are_right else not is_named:
            wrong.append(name)
        yield (Sample(seconds),)
    count = len(scripts)
    said = (
        f"findings in {len(wrong)} of {count} right scripts" if are_right else f"{count - len(wrong)} of {count} found"
    )
    print(f"rehearse: {said}{': ' if wrong else ''}{', '.join(wrong)}", flush=True)
    if len(wrong) > (0 if are_right else _MOST_MISSED):
        raise Failed(said)


CASES = [
    Case(
        "rehearse-faulty", f"paceline run --rehearse {RANKS} of a script with one fault, until it is found",
        Side("run --rehearse"), None, together=lambda lab, _: _rehearsed(lab, FAULTY, are_right=False),
    ),
    Case(
        "rehearse-right", f"paceline run --rehearse {RANKS} of a script that is right", Side("run --rehearse"), None,
        together=lambda lab, _: _rehearsed(lab, RIGHT, are_right=True),
    ),
]  # fmt: skip
