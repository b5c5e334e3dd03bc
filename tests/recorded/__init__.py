"""The folder of a job of two ranks that has ended well, as paceline left it: for tests of what reads it."""

from __future__ import annotations

import secrets
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.conftest import Paceline

_JOB = Path(__file__).with_name("job")
_BEGAN = 1795529562  # the second in which all of it happened


def ended(paceline: Paceline, *names: str) -> None:
    """Jobs `python script.py` that have ended just now, each submitted after the one before."""
    for number, name in enumerate(names):
        path = paceline.home / "jobs" / name
        words = {
            "@NAME@": name, "@ID@": secrets.token_hex(16), "@HOME@": str(paceline.home), "@PYTHON@": sys.executable,
            "@FOLDER@": str(paceline.folder), str(_BEGAN): str(int(time.time()) - 1 - len(names) + number),
        }  # fmt: skip
        for source in _JOB.rglob("*"):
            if source.is_file():
                text = source.read_text()
                for placeholder, value in words.items():
                    text = text.replace(placeholder, value)
                target = path / source.relative_to(_JOB)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text)
        (path / "errors" / "0").mkdir(parents=True)
        path.chmod(0o700)
    paceline.home.chmod(0o700)
