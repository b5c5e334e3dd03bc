"""The archive with what a node needs of paceline."""

from __future__ import annotations

import io
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING

from paceline.backends import packing

if TYPE_CHECKING:
    from pathlib import Path


def test_the_same_files_give_the_same_archive() -> None:
    first = packing.archive()
    packing.archive.cache_clear()
    assert packing.archive() == first


def test_it_holds_no_client_room() -> None:
    names = zipfile.ZipFile(io.BytesIO(packing.archive().data)).namelist()
    rooms = {"contract", "node", "train", "horovod"}
    assert {name.split("/")[1] for name in names if "/" in name} == {"__init__.py", "_version.py", *rooms}


def test_it_is_the_package_of_what_it_runs(tmp_path: Path) -> None:
    packed = packing.archive()
    file = tmp_path / packed.name
    file.write_bytes(packed.data)
    (tmp_path / "script.py").write_text("import paceline, sys; print(paceline.__file__, sys.path.index(sys.argv[1]))")
    done = subprocess.run(
        [sys.executable, "-S", file, "rank", tmp_path / "error.json", "script", "script.py", file],
        capture_output=True, text=True, check=True, cwd=tmp_path, env={},
    )  # fmt: skip
    where, place = done.stdout.split()
    assert where == f"{file}/paceline/__init__.py"
    assert int(place) > 0
