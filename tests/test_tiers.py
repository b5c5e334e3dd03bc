"""Which tests run, and what they cost: small suites with the hooks of this one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from tests import tiers

ROOT = Path(__file__).parents[1]
SUITE = """
    import subprocess, pytest
    @pytest.fixture
    def paceline(): raise AssertionError("not quick")
    def test_pure(): pass
    def test_starts(): subprocess.run(["true"], check=True)
    def test_command_line(paceline): pass
    @pytest.mark.nightly
    def test_long(): pass
"""


def outcomes(folder: Path, *flags: str) -> dict[str, str]:
    """Run the suite; the outcome of each test that is not left out."""
    (folder / "conftest.py").write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom tests import costs, tiers\n"
        "def pytest_addoption(pluginmanager):\n    for it in (costs, tiers): pluginmanager.register(it)\n"
    )
    (folder / "test_it.py").write_text("\n".join(line[4:] for line in SUITE.splitlines()))
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    nightly: long\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--costs", "costs.jsonl", *flags]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert "= costs =" in done.stdout, done.stdout + done.stderr
    lines = [json.loads(line) for line in (folder / "costs.jsonl").read_text().splitlines()]
    assert all(line["started"] == (line["id"] == "test_it.py::test_starts") for line in lines if "--quick" not in flags)
    return {line["id"].rpartition("::")[2].removeprefix("test_"): line["outcome"] for line in lines}


def test_nightly_tests_run_only_when_they_are_asked_for(tmp_path: Path) -> None:
    assert set(outcomes(tmp_path)) == {"pure", "starts", "command_line"}
    assert set(outcomes(tmp_path, "-m", "nightly")) == {"long"}
    assert set(outcomes(tmp_path, "test_it.py::test_long")) == {"long"}
    assert "long" in outcomes(tmp_path, "test_it.py")


def test_what_is_nightly_by_its_name_is_there() -> None:
    for line in tiers.nightly():
        path, _, name = line.partition("::")
        beginning, text = name.rpartition("::")[2].partition("[")[0], (ROOT / path).read_text()
        if "(Contract)" in text:  # it inherits tests
            text += (ROOT / "tests/backends/contract.py").read_text()
        assert re.search(rf"^ *def {beginning}", text, re.MULTILINE), line


def test_quick_tests_start_nothing(tmp_path: Path) -> None:
    assert outcomes(tmp_path, "--quick") == {"pure": "passed", "starts": "skipped"}
