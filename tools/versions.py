"""Try versions of Python and torch: the examples on two ranks, and some tests, in an environment for each pair.

    python tools/versions.py                                       # every Python on PATH, with every torch that it has
    python tools/versions.py --python python3.12 --torch 2.6.0 2.9.1
    python tools/versions.py --write docs/contributing/versions.md # and replace the rows of the table there

It needs uv on PATH. An environment is removed when its cell is done: it has up to 8 GB. Exit code 1: something failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
TORCHES = ("2.6.0", "2.7.1", "2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1")
EXAMPLES = {
    "digits.py": ("--epochs", "2"),
    "digits_library.py": ("--epochs", "2"),
    "chargpt_library.py": ("--characters", "100000", "--width", "32", "--layers", "1"),
    "images.py": ("--epochs", "1"),
    "language_model.py": ("--epochs", "1", "--words", "20000"),
    "gan.py": ("--epochs", "1"),
    "reinforcement.py": ("--updates", "10"),
}
TESTS = (
    "tests/contract/test_recognise.py",
    "tests/train/test_run.py",
    "tests/train/loop/test_resume.py",
    "tests/train/checkpoint/test_sharded.py",
    "tests/train/parallel/test_setup.py",
)
OF_TESTS = ("hypothesis", "pytest", "pytest-timeout", "pytest-xdist", "safetensors")  # what these import
MARKS = ("<!-- cells -->\n", "<!-- end of cells -->\n")
_SECONDS = 900.0  # for an installation or the tests
_EXAMPLE = 180.0  # for an example, which takes 15


@dataclass(frozen=True)
class Cell:
    """What was found with one version of each."""

    python: str
    torch: str
    examples: str
    tests: str
    note: str = ""

    @property
    def row(self) -> str:
        """The row of the table."""
        return f"| {self.python} | {self.torch} | {self.examples} | {self.tests} | {self.note} |\n"


def run(*command: str | Path, home: Path = ROOT, seconds: float = _SECONDS) -> subprocess.CompletedProcess[str]:
    """Run a command in the repository; one that takes too long has failed."""
    env = {**os.environ, "PACELINE_HOME": str(home)}
    try:
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"{command[0]} took longer than {seconds:g} s")


def cell(interpreter: str, torch: str, folder: Path) -> Cell:
    """Make an environment, and try the examples and the tests in it."""
    version = run(interpreter, "-c", "import platform; print(platform.python_version())").stdout.strip()
    python = folder / "bin" / "python"
    install = ("uv", "pip", "install", "--quiet", "--python", python)
    for step in ((interpreter, "-m", "venv", folder), (*install, f"torch=={torch}", "-e", ".[examples]", *OF_TESTS)):
        done = run(*step)
        if done.returncode:
            print(done.stderr[-4000:], file=sys.stderr)
            return Cell(version, torch, "-", "-", "not installed: there is no wheel, or it needs other versions")
    failed = []
    for name, arguments in EXAMPLES.items():
        done = run(
            python,
            "-m",
            "paceline",
            "run",
            "-n",
            "2",
            f"examples/{name}",
            *arguments,
            home=folder / "home",
            seconds=_EXAMPLE,
        )
        if done.returncode:
            failed.append(name)
            print(f"{name}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}", file=sys.stderr)
    tested = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", *TESTS)
    if tested.returncode:
        print(tested.stdout[-12000:], file=sys.stderr)
    last = re.sub(r" in .*|=", "", tested.stdout.rstrip().rpartition("\n")[2]).strip()
    return Cell(version, torch, f"{len(EXAMPLES) - len(failed)} of {len(EXAMPLES)}", last, ", ".join(failed))


def cells(pythons: list[str], torches: list[str]) -> Iterator[Cell]:
    """Try each torch with each Python that is here."""
    for python in pythons:
        if shutil.which(python) is None or run(python, "--version").returncode:
            yield Cell(python.removeprefix("python"), "all", "-", "-", "no such Python here")
            continue
        for torch in torches:
            began = time.monotonic()
            with tempfile.TemporaryDirectory(prefix="paceline-versions-") as folder:
                found = cell(python, torch, Path(folder))
            print(f"{found.row.strip()}  {time.monotonic() - began:.0f} s", flush=True)
            yield found


def write(page: Path, found: list[Cell]) -> None:
    """Put the rows between the two marks of a page; rows of other cells stay."""
    before, mark, rest = page.read_text().partition(MARKS[0])
    old, end, after = rest.partition(MARKS[1])
    rows = {tuple(row.split("|")[1:3]): row for row in old.splitlines(keepends=True)[2:]}
    rows.update({tuple(it.row.split("|")[1:3]): it.row for it in found})
    ordered = sorted(rows.values(), key=lambda row: [int(number) for number in re.findall(r"\d+", row)])
    page.write_text("".join([before, mark, *old.splitlines(keepends=True)[:2], *ordered, end, after]))


def main() -> int:
    """Try the cells that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", default=[f"python{version}" for version in PYTHONS])
    parser.add_argument("--torch", nargs="+", default=list(TORCHES))
    parser.add_argument("--write", type=Path, metavar="PAGE")
    options = parser.parse_args()
    found = list(cells(options.python, options.torch))
    if options.write is not None:
        write(options.write, found)
    wrong = [it for it in found if it.examples != "-" and (it.note or "failed" in it.tests or "error" in it.tests)]
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
