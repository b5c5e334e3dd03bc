"""What a job runs with."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

import pytest

from paceline.node.telemetry import origin

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.needs("git")
@pytest.mark.parametrize("key", ["clean", "process"])
def test_the_changes_are_found_without_programs_of_the_repository(tmp_path: Path, key: str) -> None:
    def git(*arguments: str, folder: Path = tmp_path) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always")
        subprocess.run(["git", *who, "-C", str(folder), *arguments], check=True, capture_output=True)

    for folder in (inner := tmp_path / "inner", tmp_path):
        folder.mkdir(exist_ok=True)
        (folder / "train.py").write_text("first\n")
        (folder / ".gitattributes").write_text("*.py filter=mine diff=mine\n")
        git("init", "-q", folder=folder)
        if folder == tmp_path:
            git("submodule", "add", "-q", str(inner), "sub")
        git("add", "train.py", ".gitattributes", folder=folder)
        git("commit", "-qm", "first", folder=folder)
    for folder in (tmp_path, tmp_path / "sub"):
        for name in (f"filter.mine.{key}", "diff.mine.textconv", "diff.mine.command", "core.fsmonitor"):
            git("config", name, f"touch {tmp_path}/ran; cat", folder=folder)
        git("config", "filter.mine.required", "true", folder=folder)
        (folder / "train.py").write_text("second\n")
    (copy := tmp_path / "copy").mkdir()
    origin.note(copy, tmp_path)
    assert "+second" in json.loads((copy / ".origin.paceline").read_text())["diff"]
    assert not (tmp_path / "ran").exists()
