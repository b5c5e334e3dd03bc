"""Scripts that may set a variable that torch._dynamo reads, after they have imported torch."""

from __future__ import annotations

import ast

import pytest

from paceline.node.planning.script import may_set_variables


@pytest.mark.parametrize(
    ("script", "may"),
    [
        ("import os, torch\nos.environ.update(TORCHDYNAMO_DISABLE='1')", True),
        ("import os, torch\nos.environ['CXX'] = 'clang++'", True),
        ("import os, torch\nfor name in ('A', 'B'):\n    os.environ[name] = '1'", True),
        ("from os import environ\nimport torch\nenviron |= read('settings')", True),
        ("import os, torch\nos.environ.update(read('settings'))", True),
        ("import os, torch\nos.environ.setdefault(name(), '1')", True),
        ("import os, torch\nread_into(os.environ)", True),
        ("import os, torch\nos.putenv(name(), '1')", True),
        ("import os, torch\nos.environ['OMP_NUM_THREADS'] = str(4)\nos.environ.setdefault('A', '1')", False),
        ("import os, torch\nrank = int(os.environ[key()]) if 'RANK' in os.environ else os.getenv('R')", False),
        ("import os, torch\nf(os.environ.copy(), env={**os.environ, 'A': '1'}, **os.environ)", False),
        ("from os import environ as e\ne[name()] = '1'", True),
        ("env = os.environ\nenv[name()] = '1'", True),
        ("os.environ.pop(name())", True),
        ("del os.environ['A'], os.environ['B']", False),
    ],
)
def test_variables_that_may_be_set(script: str, may: bool) -> None:
    assert may_set_variables(ast.walk(ast.parse(script))) is may
