"""A test that leaves something fails, with what it left; one that leaves nothing, or what all tests use, does not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SUITE = """
import os, socket, subprocess, sys, tempfile, threading
import pytest
from tests import leaks

leaks._SECONDS = 1.0
SLEEP = [sys.executable, "-c", "import sys; sys.stdin.read()"]
DETACHED = "import os, sys\\nif os.fork() == 0:\\n    os.setsid()\\n    sys.stdin.read()"
held = []

@pytest.fixture(scope="session")
def server():
    with socket.create_server(("127.0.0.1", 0)) as it, tempfile.TemporaryDirectory():
        yield it

@pytest.fixture
def closed():
    with socket.create_server(("127.0.0.1", 0)) as it:
        yield it

def test_child(): held.append(subprocess.Popen(SLEEP, stdin=subprocess.PIPE).pid)
def test_orphan(): subprocess.run([sys.executable, "-c", DETACHED], stdin=reader, check=True)
def test_socket(): held.append(socket.create_server(("127.0.0.1", 0)))
def test_file(): held.append(open(__file__))
def test_folder(): tempfile.mkdtemp()
def test_nothing(server, closed, tmp_path):
    subprocess.run(["true"], check=True)
    with tempfile.TemporaryDirectory(): pass
def test_soon():
    child = subprocess.Popen(SLEEP, stdin=subprocess.PIPE)
    threading.Timer(0.2, child.communicate).start()
def test_shared():
    with leaks.kept(): held.append(socket.socketpair())
reader, writer = os.pipe()
"""


def test_what_a_test_leaves_is_named(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom tests import leaks\n"
        "def pytest_addoption(pluginmanager): pluginmanager.register(leaks)\n"
    )
    (tmp_path / "test_it.py").write_text(SUITE)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--tb=short",
        "-q",
        f"--basetemp={tmp_path}/base",
    ]
    env = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    found = dict(re.findall(r"ERROR at teardown of test_(\w+) _+\nthe test leaves\n((?:.+\n)+?)(?=_|=)", done.stdout))
    assert {name: sorted(line.split()[0] for line in text.splitlines()) for name, text in found.items()} == {
        "child": ["descriptor", "process"],
        "orphan": ["process"],
        "socket": ["descriptor"],
        "file": ["descriptor"],
        "folder": ["temporary"],
    }, done.stdout + done.stderr
    assert "sys.stdin.read()" in found["orphan"] and "test_it.py" in found["file"] and "AF_INET" in found["socket"]
    assert "8 passed, 5 errors" in done.stdout
