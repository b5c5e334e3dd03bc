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
    packing._archive.cache_clear()
    again = packing.archive()
    assert (again.name, again.data) == (first.name, first.data)
    assert packing.Archive({"a.py": b"x = 1\n"}).name != packing.Archive({"a.py": b"x = 2\n"}).name


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


def test_an_old_python_is_refused_in_a_line(tmp_path: Path) -> None:
    file = tmp_path / "paceline.pyz"
    file.write_bytes(packing.archive().data)
    program = "import runpy, sys; sys.version_info = (3, 8, 1); runpy.run_path(sys.argv[1], run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program, file], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        f"paceline: {sys.executable} is Python 3.8.1, too old; choose an image or a Python with 3.9 or newer\n"
    )
