"""`init` writes a job file that can be read and used, and overwrites nothing unasked."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from tests.typed import refusal, typed

from paceline.job.reading import read

if TYPE_CHECKING:
    from tests.conftest import Paceline


def test_the_template_can_be_started(paceline: Paceline) -> None:
    for name in ("a: b.py", "test_train.py", "lib/train.py"):
        paceline.script("print('here')", name)
    done = typed(paceline, "init")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "paceline: job.yaml is written; edit it, and start it with: paceline submit job.yaml\n"
    path = paceline.folder / "job.yaml"
    assert read(path).script == "a: b.py"
    assert typed(paceline, "submit", "--dry-run", "job.yaml").returncode == 0
    (paceline.folder / "all.yaml").write_text(re.sub(r"^# ([a-z_]+: )", r"\1", path.read_text(), flags=re.M))
    assert read(paceline.folder / "all.yaml").time_limit == 12 * 3600, "what is commented out can be used, too"
    paceline.script("", "train.py")
    assert typed(paceline, "init", "--force").returncode == 0
    assert read(path).script == "train.py"


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("job.toml", "--file job.toml: a job file ends in .yaml"),
        ("no/job.yaml", "no; name another file"),
        ("mine.yaml", "mine.yaml exists; name another one with --file, or overwrite it with --force"),
    ],
)
def test_refusals_write_nothing(paceline: Paceline, file: str, said: str) -> None:
    mine = paceline.folder / "mine.yaml"
    mine.write_text("script: mine.py\n")
    before = set(paceline.folder.iterdir())
    assert said in refusal(paceline, "init", "--file", file)
    assert (set(paceline.folder.iterdir()), mine.read_text()) == (before, "script: mine.py\n")
