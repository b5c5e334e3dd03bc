"""What a pod runs first."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from paceline.backends.kubernetes.manifests.bootstrap import START
from paceline.backends.kubernetes.start.streaming import NAME

PROGRAM = """
import pathlib, sys
print(pathlib.Path(sys.argv[2]).with_name(%r).read_text())
"""


def test_code_that_a_client_sent_while_the_archive_was_unpacked_stays(tmp_path: Path) -> None:
    here, work = tmp_path / "here", tmp_path / "work"
    here.mkdir()
    work.mkdir()
    (here / "part.json").write_text("{}")
    with zipfile.ZipFile(here / "archive-000", "w") as archive:
        archive.writestr("paceline/node/__main__.py", PROGRAM % NAME)
    (work / NAME).write_text("the code")
    command = [sys.executable, "-c", START, str(here), str(work), str(tmp_path / "message")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "the code\n", done.stderr
