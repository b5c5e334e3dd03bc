"""The manual pages are complete, and groff sets them without a warning."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import click
import pytest

from paceline.cli.main import VERBS, cli
from paceline.cli.man import pages

if TYPE_CHECKING:
    from pathlib import Path


def test_every_verb_has_a_page_with_all_its_flags() -> None:
    found = pages()
    for verb in VERBS:
        command = cli.get_command(click.Context(cli), verb)
        assert command is not None
        page = found[f"paceline-{verb}.1"].replace("\\-", "-")
        missing = [
            flag for it in command.params if isinstance(it, click.Option) for flag in it.opts if flag not in page
        ]
        assert not missing, f"paceline-{verb}.1 lacks {missing}"
        assert f"paceline-{verb}" in found["paceline.1"].replace("\\-", "-")
    assert {"paceline-top.1", "paceline-top-job.1", "paceline-data-list.1"} <= found.keys()


@pytest.mark.needs("groff")
def test_groff_sets_them_without_a_warning(tmp_path: Path) -> None:
    for name, text in pages().items():
        (tmp_path / name).write_text(text, encoding="ascii")
    groff = ["groff", "-ww", "-man", "-Tascii", "-P-cbou", *sorted(pages())]
    done = subprocess.run(groff, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    shown = " ".join(done.stdout.split())
    assert "paceline run -n 4 train.py four ranks here" in shown
    assert "paceline-stop - stop jobs: cleanly, or at once" in shown
