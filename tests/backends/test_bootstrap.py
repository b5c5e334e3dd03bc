"""What runs on a host first, here without ssh."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from paceline.backends.packing import archive
from paceline.backends.remote.bootstrap import BEGIN, READ

if TYPE_CHECKING:
    from pathlib import Path

NO_JOBS = {"jobs": [], "names": []}


class Begun:
    """A host that is asked for its jobs, and its first answer; `before` is what its Python does first."""

    def __init__(self, root: Path, before: str = "") -> None:
        packed = archive()
        self._process = subprocess.Popen(
            [sys.executable, "-c", READ], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        order = {"root": str(root), "name": packed.name}
        for line in (before + BEGIN, order, {"do": "describe", "names": [], "since": None}):
            self._process.stdin.write(json.dumps(line).encode() + b"\n")
        self._process.stdin.flush()
        self.first = json.loads(self._process.stdout.readline())
        self._data = b"%d\n" % len(packed.data) + packed.data if self.first.get("need") else b""

    def others(self) -> list[dict[str, object]]:
        """Its other answers, after the archive if it needs it."""
        said, _ = self._process.communicate(self._data)
        return [json.loads(line) for line in said.splitlines()]


def begun(root: Path, before: str = "") -> list[dict[str, object]]:
    """All its answers."""
    host = Begun(root, before)
    return [host.first, *host.others()]


def test_the_archive_comes_once_and_its_modules_are_compiled_once(tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert [begun(root), begun(root)] == [[{"need": True}, NO_JOBS], [{"need": False}, NO_JOBS]]
    modules = "paceline.contract", "paceline.node.spec", "paceline.train.run", "paceline.horovod.common.util"
    program = f"import sys; sys.path.insert(0, sys.argv[1]); import {', '.join(modules)}\n"
    program += f"for name in {modules}: print(sys.modules[name].__file__)"
    done = subprocess.run(
        [sys.executable, "-c", program, root / archive().name], capture_output=True, text=True, check=True
    )
    assert [file.rpartition(".")[2] for file in done.stdout.split()] == ["pyc"] * len(modules), done.stdout


def test_hosts_that_share_a_home_bring_the_archive_at_once(tmp_path: Path) -> None:
    same_pid = "import os; os.getpid = lambda: 4242\n"
    first = Begun(tmp_path, same_pid)
    second = begun(tmp_path, same_pid)
    assert [first.first, *first.others()] == second == [{"need": True}, NO_JOBS]
    assert begun(tmp_path) == [{"need": False}, NO_JOBS]
    assert [file.name for file in tmp_path.iterdir()] == [archive().name]


@pytest.mark.parametrize("left", [b"", b"PK\5\6" + bytes(18), b"PK\3\4 and so on"], ids=["nothing", "empty", "cut"])
def test_a_damaged_archive_is_sent_again(tmp_path: Path, left: bytes) -> None:
    (tmp_path / archive().name).write_bytes(left)
    assert begun(tmp_path) == [{"need": True}, NO_JOBS]
    assert begun(tmp_path) == [{"need": False}, NO_JOBS]
