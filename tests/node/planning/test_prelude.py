"""What a script does before it imports its framework is read from its text: what is understood, and what is not."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING

import pytest

from paceline.node.planning.prelude import prelude_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Paceline

UNDERSTOOD = {
    "os.environ['A'] = '1'\nimport torch\nos.environ['B'] = '2'": {"A": "1"},
    "from os import environ as e\ne['A'] = '1'\nimport torch": {"A": "1"},
    "import os as o\no.environ['A'] = o.environ['B'] = '1'\nimport torch": {"A": "1", "B": "1"},
    "def main():\n    main()\nif __name__ == '__main__':\n    os.environ['A'] = '1'\n    import torch": {"A": "1"},
    "import helpers\nimport torch": {"H": "1"},
    "from helpers import apply\nimport torch\napply()": {"H": "1"},
    "import pkg.sub as s\nimport torch": {"P": "1", "S": "1"},
    "try:\n    import torch\nexcept ImportError:\n    torch = None\nimport unknown": {},
    "try:\n    import unknown\nexcept ImportError:\n    unknown = None\nimport torch": {},
    "import typing\nif typing.TYPE_CHECKING:\n    import unknown\nimport torch": {},
    "import paceline\nrun = paceline.init()\nimport unknown": {},
    """
    '''What a script often has before its framework.'''
    from __future__ import annotations
    import argparse, json, logging, random, sys, warnings
    from dataclasses import dataclass, field
    from pathlib import Path
    import numpy as np
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    sys.path.append(str(Path(__file__).resolve().parent))
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    log = logging.getLogger(__name__)
    log.info(f"{len(sys.argv)} arguments")
    SEED, SIZES = 42, {"small": [1, 2]}
    HOME = os.environ["HOME"] if "HOME" in os.environ else os.environ.get("PWD", "/")
    STEPS: int = int(os.getenv("STEPS", "10")) * 2
    random.seed(SEED)
    np.random.seed(SEED)

    @dataclass
    class Config:
        rate: float = 0.1
        names: list[str] = field(default_factory=list)

        def change(self):
            os.environ["A"] = "1"

    def number(text, size=SIZES["small"][0]):
        os.environ["A"] = text

    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    import torch
    """: {},
}

UNCLEAR = {
    "from dotenv import load_dotenv\nload_dotenv()\nimport torch": "script.py:2 imports dotenv",
    "import comet_ml\nimport torch": "script.py:2 imports comet_ml (which must come before torch)",
    "def f():\n    os.environ['A'] = '1'\nf()\nimport torch": "script.py:4 calls f",
    "import atexit\ndef f():\n    os.environ['A'] = '1'\natexit.register(f)\nimport torch": "script.py:5 uses f",
    "f = lambda: os.environ.update(A='1')\nf()\nimport torch": "script.py:2 has lambda: os.environ.update(A='1')",
    "from helpers import apply\napply()\nimport torch": "script.py:3 calls apply",
    "import helpers\nhelpers.apply()\nimport torch": "script.py:3 calls helpers.apply",
    "os.environ['A'] = str(1)\nimport torch": "script.py:2 sets A to a value that is computed",
    "os.environ[f'A{1}'] = '1'\nimport torch": "sets a variable to a value that is computed",
    "env = os.environ\nenv['A'] = '1'\nimport torch": "script.py:2 uses os.environ",
    "os.environ |= {'A': '1'}\nimport torch": "script.py:2 has os.environ |= {'A': '1'}",
    "os.environ.update(A='1')\nimport torch": "script.py:2 calls os.environ.update",
    "if len(os.environ) > 3:\n    os.environ['A'] = '1'\nimport torch": "script.py:2 has if len(os.environ) > 3:",
    "try:\n    import json\nexcept ImportError:\n    os.environ['A'] = '1'\nimport torch": "script.py:5 may set A",
    "try:\n    import json\nexcept ImportError:\n    import torch": "script.py:5 may import torch",
    "os.putenv('A', '1')\nimport torch": "script.py:2 calls os.putenv",
    "del os.environ['A']\nimport torch": "script.py:2 has del os.environ['A']",
    "exec('x = 1')\nimport torch": "script.py:2 calls exec",
    "import functools\nfunctools.partial(os.environ.update, A='1')()\nimport torch": "calls functools.partial",
    "from unittest import mock\nwith mock.patch.dict(os.environ, A='1'):\n    import torch": "has with mock.patch.dict",
    "import sys\nsys.modules['torch'] = None\nimport torch": "script.py:3 changes sys.modules",
    "import importlib\nimportlib.import_module('settings')\nimport torch": "script.py:3 calls importlib.import_module",
}


def write(folder: Path, text: str) -> Path:
    (folder / "helpers.py").write_text("import os\nos.environ['H'] = '1'\ndef apply():\n    os.environ['A'] = '1'\n")
    (folder / "pkg").mkdir()
    (folder / "pkg" / "__init__.py").write_text("import os; os.environ['P'] = '1'")
    (folder / "pkg" / "sub.py").write_text("from . import other")
    (folder / "pkg" / "other.py").write_text("import os; os.environ['S'] = '1'")
    script = folder / "script.py"
    script.write_text(f"import os\n{textwrap.dedent(text)}")
    return script


@pytest.mark.parametrize("text", UNDERSTOOD)
def test_constants_are_known(tmp_path: Path, text: str) -> None:
    found = prelude_of([write(tmp_path, text)], tmp_path)
    assert (found.variables, found.unclear) == (UNDERSTOOD[text], "")


@pytest.mark.parametrize("text", UNCLEAR)
def test_what_is_not_understood_is_named(tmp_path: Path, text: str) -> None:
    assert UNCLEAR[text] in prelude_of([write(tmp_path, text)], tmp_path).unclear


def job_of(paceline: Paceline, *args: str) -> dict[str, object]:
    job: dict[str, object] = json.loads(paceline.run("--dry-run", *args).stdout)["job"]
    return job


def test_a_default_gives_way_to_what_the_user_has_set(paceline: Paceline) -> None:
    paceline.script(
        "import os\nos.environ.setdefault('A', 'script')\nos.environ.setdefault('B', 'script')\nimport torch"
    )
    assert job_of(paceline, "--env", "A=user", "script.py")["env"] == {"A": "user", "B": "script"}


def test_the_user_chooses_the_start_method(paceline: Paceline) -> None:
    paceline.script("import unknown\nimport torch")
    chosen = [job_of(paceline, *flags, "script.py")["start_method"] for flags in ((), ("--start-method", "fork"))]
    assert chosen == ["exec", "fork"]


def test_a_package_runs_before_its_module(paceline: Paceline) -> None:
    paceline.script("import os\nos.environ['A'] = '1'", "pkg/__init__.py")
    paceline.script("import torch", "pkg/train.py")
    paceline.script("import torch", "pkg/__main__.py")
    assert job_of(paceline, "-m", "pkg.train")["env"] == job_of(paceline, "-m", "pkg")["env"] == {"A": "1"}
