"""What runs on a host first, here without ssh."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

from paceline.backends.packing import archive
from paceline.backends.remote.bootstrap import BEGIN, READ

if TYPE_CHECKING:
    from pathlib import Path


def begun(root: Path) -> list[dict[str, object]]:
    """The answers of a host that is asked what it does not know."""
    packed = archive()
    order = {"root": str(root), "name": packed.name}
    head = "".join(json.dumps(it) + "\n" for it in (BEGIN, order, {"do": "nothing"}))
    data = b"" if (root / packed.name).exists() else b"%d\n" % len(packed.data) + packed.data
    done = subprocess.run([sys.executable, "-c", READ], input=head.encode() + data, capture_output=True, check=False)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_archive_comes_once_and_its_modules_are_compiled_once(tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert [begun(root)[0], begun(root)[0]] == [{"need": True}, {"need": False}]
    modules = "paceline.contract", "paceline.node.spec", "paceline.train.run", "paceline.horovod.common.util"
    program = f"import sys; sys.path.insert(0, sys.argv[1]); import {', '.join(modules)}\n"
    program += f"for name in {modules}: print(sys.modules[name].__file__)"
    done = subprocess.run(
        [sys.executable, "-c", program, root / archive().name], capture_output=True, text=True, check=True
    )
    assert [file.rpartition(".")[2] for file in done.stdout.split()] == ["pyc"] * len(modules), done.stdout
