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
    "from os import environ\nenviron['A'] = '1'\nimport torch": {"A": "1"},
    "os.environ['A'] = os.environ['B'] = '1'\nimport torch": {"A": "1", "B": "1"},
    "import helpers\nimport torch": {"H": "1"},
    "from helpers import apply\nimport torch\napply()": {"H": "1"},
    "import pkg.sub as s\nimport torch": {"P": "1", "S": "1"},
    "from pkg import sub\nimport torch": {"P": "1", "S": "1"},
    "import paceline, torch\nrun = paceline.init()\nimport unknown": {},
    """
    '''What a script often has before its framework.'''
    from __future__ import annotations
    import argparse, json, logging, os.path, random, sys, warnings
    from dataclasses import dataclass, field
    from pathlib import Path
    import numpy as np
    SIZES = {"small": [1, -2]}
    STEPS: int = 10
    SEED = STEPS = 7

    def number(text: str = "3") -> int:
        os.environ["A"] = text

    import torch
    """: {},
}

UNCLEAR = {
    "from dotenv import load_dotenv\nload_dotenv()\nimport torch": "script.py:2 imports dotenv",
    "import comet_ml\nimport torch": "script.py:2 imports comet_ml (which must come before torch)",
    "def f():\n    os.environ['A'] = '1'\nf()\nimport torch": "script.py:4 has f()",
    "import atexit\ndef f():\n    os.environ['A'] = '1'\natexit.register(f)\nimport torch": "has atexit.register(f)",
    "@set_variables\ndef f():\n    pass\nimport torch": "script.py:3 has @set_variables",
    "def f(a=os.putenv('A', '1')):\n    pass\nimport torch": "script.py:2 has def f(a=os.putenv('A', '1')):",
    "class A:\n    os.environ['A'] = '1'\nimport torch": "script.py:2 has class A:",
    "import bad\nimport torch": "bad.py:1 has print(1)",
    "from pkg.native import f\nimport torch": "native.py:2 imports missing",
    "os.environ['A'] = str(1)\nimport torch": "script.py:2 has os.environ['A'] = str(1)",
    "os.environ['A'] = 1\nimport torch": "script.py:2 has os.environ['A'] = 1",
    "os.environ[f'A{1}'] = '1'\nimport torch": "script.py:2 has os.environ[f'A{1}'] = '1'",
    "env = os.environ\nenv['A'] = '1'\nimport torch": "script.py:2 has env = os.environ",
    "os.environ |= {'A': '1'}\nimport torch": "script.py:2 has os.environ |= {'A': '1'}",
    "os.environ.setdefault('A', '1')\nimport torch": "script.py:2 has os.environ.setdefault('A', '1')",
    "if len(os.environ) > 3:\n    os.environ['A'] = '1'\nimport torch": "script.py:2 has if len(os.environ) > 3:",
    "try:\n    import torch\nexcept ImportError:\n    torch = None": "script.py:2 has try:",
    "del os.environ['A']\nimport torch": "script.py:2 has del os.environ['A']",
    "import sys\nsys.modules['torch'] = None\nimport torch": "script.py:3 has sys.modules['torch'] = None",
}


def write(folder: Path, text: str) -> Path:
    (folder / "helpers.py").write_text("import os\nos.environ['H'] = '1'\ndef apply():\n    os.environ['A'] = '1'\n")
    (folder / "pkg").mkdir()
    (folder / "pkg" / "__init__.py").write_text("import os; os.environ['P'] = '1'")
    (folder / "pkg" / "sub.py").write_text("from . import other")
    (folder / "pkg" / "other.py").write_text("import os; os.environ['S'] = '1'")
    (folder / "pkg" / "native.py").write_text("from . import sub\nfrom .missing import f")
    (folder / "bad.py").write_text("print(1)")
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


def test_the_user_chooses_the_start_method(paceline: Paceline) -> None:
    paceline.script("import unknown\nimport torch")
    chosen = [job_of(paceline, *flags, "script.py")["start_method"] for flags in ((), ("--start-method", "fork"))]
    assert chosen == ["exec", "fork"]


def test_a_package_runs_before_its_module(paceline: Paceline) -> None:
    paceline.script("import os\nos.environ['A'] = '1'", "pkg/__init__.py")
    paceline.script("import torch", "pkg/train.py")
    paceline.script("import torch", "pkg/__main__.py")
    assert job_of(paceline, "-m", "pkg.train")["env"] == job_of(paceline, "-m", "pkg")["env"] == {"A": "1"}
