"""What is imported when, and that a node needs Python 3.9 and nothing else."""

from __future__ import annotations

import ast
import importlib
import json
import pickle
import pkgutil
import re
import shutil
import subprocess
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import paceline
import paceline.train
from paceline import jobs

if TYPE_CHECKING:
    from tests.conftest import Paceline

PACKAGE = Path(paceline.__file__).parent
ROOT = Path(__file__).parents[1]
NODE_FILES = [
    PACKAGE / "__init__.py",
    PACKAGE / "_version.py",
    *(PACKAGE / "contract").rglob("*.py"),
    *(PACKAGE / "node").rglob("*.py"),
]


def modules_after(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport json, sys\nprint(json.dumps(list(sys.modules)))"],
        capture_output=True,
        text=True,
        check=True,
    )
    return {name.partition(".")[0] for name in json.loads(done.stdout)}


@pytest.mark.parametrize(
    "module", ["paceline", "paceline.contract", "paceline.node.agent.agent", "paceline.node.ranks.forkserver"]
)
def test_node_side_is_standard_library_only(module: str) -> None:
    new = modules_after(f"import {module}") - modules_after("pass")
    assert {name for name in new if name not in sys.stdlib_module_names} <= {"paceline"}
    assert "asyncio" not in new


def test_node_side_parses_as_python_3_9() -> None:
    for path in NODE_FILES:
        ast.parse(path.read_text(), path, feature_version=(3, 9))


def test_node_side_runs_on_python_3_9(tmp_path: Path) -> None:
    python = shutil.which("python3.9")
    if python is None or subprocess.run([python, "--version"], capture_output=True, check=False).returncode:
        pytest.skip("no python3.9 on PATH; that its syntax is understood there is tested above")
    modules = "node.agent.agent", "node.ranks.forkserver", "node.machine.hardware", "contract"
    code = "import " + ", ".join(f"paceline.{module}" for module in modules)
    subprocess.run([python, "-c", code], env={"PYTHONPATH": str(PACKAGE.parent)}, check=True)


def test_public_names_are_all_that_are_meant_and_sorted() -> None:
    pytest.importorskip("torch")
    assert paceline.__all__ == sorted(paceline.__all__) and jobs.__all__ == sorted(jobs.__all__)
    assert set(paceline.__all__) <= set(dir(paceline))
    # Whatever says that users find it here, and what the pages and docstrings call by such a name, is among them.
    for module in pkgutil.walk_packages(paceline.train.__path__, "paceline.train."):
        for name, thing in vars(importlib.import_module(module.name)).items():
            if not name.startswith("_") and getattr(thing, "__module__", None) == "paceline":
                assert name in paceline.__all__
    texts = [*PACKAGE.rglob("*.py"), ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    used = {name for path in texts for name in re.findall(r"\bpaceline\.([A-Z][a-zA-Z]+)", path.read_text())}
    assert used <= set(paceline.__all__)
    with pytest.raises(AttributeError, match="no attribute 'PeerLoss'"):
        getattr(paceline, "PeerLoss")  # noqa: B009 - type checkers know that it is not there


@pytest.mark.parametrize("module", ["paceline", "paceline.jobs"])
def test_what_is_public_is_shown_and_pickled_by_its_public_name(module: str) -> None:
    pytest.importorskip("torch")
    public = importlib.import_module(module)
    for name in public.__all__:
        thing = getattr(public, name)
        if (module == "paceline" and callable(thing)) or (isinstance(thing, type) and issubclass(thing, BaseException)):
            assert f"{thing.__module__}.{thing.__qualname__}" == f"{module}.{name}"
            assert pickle.loads(pickle.dumps(thing)) is thing
        if isinstance(thing, type) and issubclass(thing, BaseException):
            error = thing.__new__(thing, "what is wrong")
            assert traceback.format_exception_only(error) == [f"{module}.{name}: what is wrong\n"]


# The time of a short command is that of its imports.
HEAVY = (
    "asyncio", "ctypes", "decimal", "difflib", "hashlib", "importlib.metadata", "msgspec", "numpy", "rich", "ssl",
    "subprocess", "tarfile", "tomllib", "torch", "yaml", "paceline.backends.ssh.backend", "paceline.job.spec",
    "paceline.node.planning", "paceline.node.spec", "paceline.node.store.lifecycle",
)  # fmt: skip
FOR_A_JOB = (
    "decimal", "hashlib", "importlib.metadata", "msgspec", "subprocess", "paceline.job.spec", "paceline.node.planning",
    "paceline.node.spec", "paceline.node.store.lifecycle",
)  # fmt: skip
NOT_FOR_A_JOB = (
    "paceline.backends.foreground", "paceline.job.settings",
    "paceline.node.logs.reader", "paceline.node.devicequeue.ticket",
    "paceline.node.machine.gpus", "paceline.node.store.moving",
)  # fmt: skip
IMPORTED = """
import atexit, json, sys
del sys.argv[1:sys.argv.index("paceline") + 1]
atexit.register(lambda: print(json.dumps(list(sys.modules))))
from paceline.cli.main import main
main()
"""


def imported(paceline: Paceline, *arguments: str) -> set[str]:
    done = paceline.succeeds(*arguments, python=(sys.executable, "-c", IMPORTED))
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("arguments", [["--help"], ["list"], ["list", "--help"], ["submit", "--help"]])
def test_verbs_import_nothing_that_they_do_not_use(arguments: list[str], paceline: Paceline) -> None:
    assert not imported(paceline, *arguments).intersection(HEAVY)


def test_to_submit_a_job_imports_nothing_that_it_does_not_need(paceline: Paceline) -> None:
    loaded = imported(paceline, "submit", "--name", "it", paceline.script("print(1)"))
    assert not loaded.intersection(NOT_FOR_A_JOB)
    assert not loaded.intersection(HEAVY).difference(FOR_A_JOB)
    assert paceline("wait", "it").returncode == 0


@pytest.mark.parametrize("package", ["paceline", "benchmarks"])
def test_no_modules_import_each_other_in_a_circle(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Type-checking imports and those within functions included."""
    grimp = pytest.importorskip("grimp")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    graph = grimp.build_graph(package, cache_dir=None)
    left = {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}
    while free := [module for module, imported in left.items() if not imported & left.keys()]:
        for module in free:
            del left[module]
    assert not left, "each of these is in a circle, or imports one that is"
