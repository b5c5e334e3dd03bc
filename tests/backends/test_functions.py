"""The script of a job that is a function: it says which framework the function uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.backends import functions
from paceline.node.planning.script import imports_of_file

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_the_framework_of_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "frameworks_own.py").write_text("def train():\n    import jax\n")
    monkeypatch.syspath_prepend(tmp_path)
    import frameworks_own  # type: ignore[import-not-found]

    for number, (work, framework) in enumerate(((frameworks_own.train, "jax"), (max, None))):
        folder = tmp_path / str(number)
        folder.mkdir()
        script = folder / functions.write(work, "work", folder)["script"]
        assert imports_of_file(script, folder).framework == framework
