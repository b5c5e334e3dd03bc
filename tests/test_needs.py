"""Tests whose programs are missing are skipped, with what to install; in CI, which installs it, they fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import needs

ROOT = Path(__file__).parent.parent
TESTS = """
    import pytest
    from tests import needs

    def test_in_the_middle():
        needs.need(needs.missing("git"))

    @pytest.mark.needs("mpirun", "rsync")
    def test_marked():
        raise AssertionError("it has run")

    @pytest.fixture(scope="session")
    def lab():
        needs.need("the lab needs root")

    def test_with_a_fixture(lab):
        raise AssertionError("it has run")
"""


@pytest.mark.parametrize("ci", ["", "true"])
def test_a_missing_program_is_named_with_its_package(tmp_path: Path, ci: str) -> None:
    path = tmp_path / "test_it.py"
    path.write_text("\n".join(line[4:] for line in TESTS.splitlines()))
    nothing = "import shutil; shutil.which = lambda *_, **__: None"
    command = f"{nothing}; import pytest; raise SystemExit(pytest.main(['-ra', {str(path)!r}]))"
    options = f"-p tests.needs -p no:cacheprovider -c {ROOT / 'pyproject.toml'} --rootdir {tmp_path}"
    env = {**os.environ, "CI": ci, "PYTEST_ADDOPTS": options}
    done = subprocess.run(
        [sys.executable, "-c", command], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == bool(ci), done.stdout + done.stderr
    assert ("1 failed, 2 errors in" if ci else "3 skipped in") in done.stdout
    for why in ("needs git (Debian package git)", "needs mpirun (Debian package openmpi-bin)", "the lab needs root"):
        assert why in done.stdout


def test_programs_that_are_there_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for program in ("git", "rsync"):
        (tmp_path / program).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert needs.missing("git", "rsync") == ""
    needs.need(needs.missing("git", "rsync"))


def test_every_package_is_installed_where_its_absence_is_a_failure() -> None:
    text = (ROOT / ".ci" / "run").read_text()
    installed = {name for line in re.findall(r"^packages\+?=\((.*)\)$", text, flags=re.M) for name in line.split()}
    essential = {"mount", "util-linux"}  # every Debian has them
    assert set(needs.PACKAGES.values()) <= installed | essential
