"""What `--environment` names is read, kept by its content, and written for each kind of machine."""

from __future__ import annotations

import os
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.backends.environments import installed, locks, machines, pip, source
from paceline.backends.environments.environment import Environment
from paceline.job.errors import UserError
from paceline.job.spec import JobSpec
from paceline.node.machine.environments import write_requirements

from .wheels import wheel

if TYPE_CHECKING:
    from paceline.backends.environments.environment import Form

HERE = {"machine": "x86_64", "libc": "glibc", "libc_version": "2.36", "version": "3.11.2"}
ARM = {**HERE, "machine": "aarch64"}
OLD = {**HERE, "version": "3.9.0"}
UV = """
version = 1
requires-python = ">=3.9"
[[package]]
name = "mine"
version = "0.1.0"
source = { virtual = "." }
dependencies = [
    { name = "lib" },
    { name = "old", marker = "python_full_version < '3.10'" },
    { name = "big", extra = ["gpu"], marker = "platform_machine == 'x86_64'" },
]
[[package]]
name = "lib"
version = "1.0"
source = { registry = "https://pypi.org/simple" }
wheels = [{ url = "https://files/lib-1.0-py3-none-any.whl", hash = "sha256:aa" }]
[[package]]
name = "lib2"
version = "9"
source = { registry = "https://pypi.org/simple" }
[[package]]
name = "old"
version = "2"
source = { url = "https://files/old-2.tar.gz" }
[[package]]
name = "big"
version = "3"
source = { git = "https://host/big?subdirectory=python%2Fsub&rev=main#abc" }
dependencies = [{ name = "lib" }]
[package.optional-dependencies]
gpu = [{ name = "cuda" }]
[[package]]
name = "cuda"
version = "12"
source = { registry = "https://own/simple" }
sdist = { url = "https://files/cuda-12.tar.gz", hash = "sha256:bb" }
"""
PYLOCK = """
lock-version = "1.0"
created-by = "test"
[[packages]]
name = "lib"
version = "1.0"
wheels = [{ url = "https://files/lib-1.0-py3-none-any.whl", hashes = { sha256 = "aa" } }]
[[packages]]
name = "arm"
version = "2"
marker = "platform_machine == 'aarch64'"
wheels = [{ url = "https://files/arm-2-py3-none-any.whl", hashes = { sha256 = "cc" } }]
[[packages]]
name = "far"
archive = { url = "https://files/far-1.tar.gz", hashes = { sha256 = "dd" } }
"""


@pytest.mark.parametrize(
    ("form", "text", "platform", "lines"),
    [
        ("uv", UV, HERE, ["--extra-index-url https://own/simple", "big @ git+https://host/big@abc#subdirectory=python/sub",
                          "cuda==12 --hash=sha256:bb", "lib==1.0 --hash=sha256:aa"]),
        ("uv", UV, ARM, ["lib==1.0 --hash=sha256:aa"]),
        ("uv", UV, {**ARM, **OLD, "machine": "aarch64"}, ["lib==1.0 --hash=sha256:aa", "old @ https://files/old-2.tar.gz"]),
        ("pylock", PYLOCK, HERE, ["far @ https://files/far-1.tar.gz --hash=sha256:dd", "lib==1.0 --hash=sha256:aa"]),
        ("pylock", PYLOCK, ARM,
         ["arm==2 --hash=sha256:cc", "far @ https://files/far-1.tar.gz --hash=sha256:dd", "lib==1.0 --hash=sha256:aa"]),
    ],
)  # fmt: skip
def test_locks_are_those_of_one_machine(form: Form, text: str, platform: dict[str, str], lines: list[str]) -> None:
    assert locks.lines(Environment("lock", form, text, ""), platform) == lines


def test_a_package_of_this_machine_that_another_one_needs_is_refused() -> None:
    text = UV.replace(
        "[[package]]", '[[package]]\nname = "own"\nversion = "1"\nsource = { editable = "../own" }\n[[package]]', 1
    )
    assert locks.lines(Environment("lock", "uv", text, ""), HERE), "it is a project that nothing needs"
    text = text.replace('{ name = "lib" },', '{ name = "lib" },\n{ name = "own" },', 1)
    with pytest.raises(UserError, match="own is a folder of this machine; use --environment here"):
        locks.lines(Environment("lock", "uv", text, ""), HERE)


def test_the_tags_of_a_machine() -> None:
    tags = pip.tags(HERE)
    assert tags[0] == "manylinux_2_36_x86_64"
    assert {"manylinux_2_28_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64"} <= set(tags)
    assert pip.tags({**ARM, "libc": "musl", "libc_version": ""})[0] == "musllinux_1_2_aarch64"


LINES = st.one_of(
    st.sampled_from(
        ["-r a.txt", "-c b.txt", "-e .", "--index-url https://x/simple", "numpy>=1", "a @ https://x/a.whl"]
    ),
    st.text(max_size=30),
)


@given(st.lists(LINES, max_size=6), st.lists(LINES, max_size=3))
def test_any_requirements_are_read_or_refused(lines: list[str], others: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        patch.setenv("PACELINE_HOME", str(folder / "home"))
        patch.setattr(pip, "_run", refuse)  # a project here, which is none
        try:
            (folder / "requirements.txt").write_text("\n".join(lines))
            (folder / "a.txt").write_text("\n".join(others))
        except UnicodeEncodeError:  # no file has such a text
            return
        try:
            found, digest = source.kept("requirements.txt", None, folder)
        except UserError as error:
            assert "\n" not in str(error)
            return
        again = folder / "again"
        again.mkdir()
        for file in ("requirements.txt", "a.txt"):
            os.rename(folder / file, again / file)
        assert source.kept("requirements.txt", None, again) == (found, digest)  # wherever it is
        assert source.kept("requirements.txt", digest, again) == (found, digest)
        assert locks.lines(found, HERE) == locks.lines(found, ARM)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-8"])
def test_constraints_only_constrain(encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    text = "numpy>=1  # a comment\r\n-c limits.txt\r\n-c https://x/more.txt\r\n"
    (tmp_path / "requirements.txt").write_bytes(text.encode(encoding))
    (tmp_path / "limits.txt").write_text("numpy==1.26\nscipy==1.10\n")
    found, _ = source.kept("auto", None, tmp_path)
    assert found.source == "requirements.txt"
    options = write_requirements(locks.lines(found, HERE), tmp_path)
    assert options == ["-r", str(tmp_path / "requirements.txt"), "-c", str(tmp_path / "constraints.txt")]
    assert (tmp_path / "requirements.txt").read_text() == "numpy>=1\n-c https://x/more.txt\n"
    assert (tmp_path / "constraints.txt").read_text() == "numpy==1.26\nscipy==1.10\n"


def test_a_project_may_be_named_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    name = wheel(tmp_path, "pk").name
    (tmp_path / "requirements.txt").write_text(f"-r base.txt\n./{name}[dev]\n")
    (tmp_path / "base.txt").write_text(f"./{name}\n")
    found, digest = source.kept("requirements.txt", None, tmp_path)
    assert [it.name for it in found.wheels] == [name]
    assert source.kept("requirements.txt", digest, tmp_path) == (found, digest)


def test_the_same_distributions_have_one_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever they were installed; what has changed in one is another."""
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(installed, "_asked", lambda *_: ([3, 11], [str(tmp_path / "site")]))
    with zipfile.ZipFile(wheel(tmp_path, "first", "1.0+local")) as file:
        file.extractall(tmp_path / "site")
    before = source.kept("here", None, tmp_path)
    os.utime(tmp_path / "site/first.py", (1e9, 1e9))
    assert source.kept("here", None, tmp_path) == before
    (tmp_path / "site/first.py").write_text("changed")
    assert source.kept("here", None, tmp_path)[1] != before[1]


CPU = "https://packages.org/cpu"


@pytest.mark.parametrize(
    ("line", "one", "other", "is_same"),
    [
        ("torch", {"PIP_INDEX_URL": CPU}, {"PIP_INDEX_URL": "https://packages.org/cu126"}, False),
        ("torch", {"UV_INDEX": f"a=https://me:1@packages.org/a b={CPU}"},
         {"UV_INDEX": f"a=https://me:2@packages.org/a b={CPU}"}, True),
        ("torch", {"PIP_INDEX_URL": "/a/folder/of/this/machine"}, {}, True),
        ("--index-url https://packages.org/${KIND}", {"KIND": "cpu"}, {"KIND": "cu126"}, False),
        ("--index-url ${INDEX}", {"INDEX": "https://1@packages.org"}, {"INDEX": "https://2@packages.org"}, True),
        ("--index-url https://me:${TOKEN}@packages.org", {"TOKEN": "1"}, {"TOKEN": "2"}, True),
    ],
)  # fmt: skip
def test_another_index_is_another_environment_and_other_credentials_are_not(
    line: str, one: dict[str, str], other: dict[str, str], is_same: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    (tmp_path / "requirements.txt").write_text(line)
    digests = []
    for variables in (one, other):
        with monkeypatch.context() as patch:
            for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
                patch.delenv(name)
            for name, value in variables.items():
                patch.setenv(name, value)
            digests.append(source.kept("requirements.txt", None, tmp_path)[1])
    assert len(set(digests)) == (1 if is_same else 2)
    assert source.kept("requirements.txt", digests[0], tmp_path)[1] == digests[0]


def test_a_home_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").write_text("in the way")
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    (tmp_path / "requirements.txt").write_text("numpy\n")
    with pytest.raises(UserError, match="Not a directory; make room there, or set PACELINE_HOME"):
        source.kept("requirements.txt", None, tmp_path)


def test_an_archive_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    wheel(tmp_path / "wheels", "first")
    here = machines.this_machine()
    look = {"pythons": [("python", "3.11")], "platform": HERE, "has_index": True, "uv": "/usr/bin/uv"}
    found = machines.Environments(JobSpec(script="x", environment="wheels"))
    found._pythons[here] = machines._Python("python", "3.11", None, look)
    with found._load(here).archive as archive:
        assert os.fstat(archive.fileno()).st_size == archive.seek(0, os.SEEK_END)


def test_machines_that_join_have_the_same_minor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    wheel(tmp_path / "wheels", "first")
    here = machines.this_machine()
    look = {
        "pythons": [("python3.13", "3.13"), ("python3.11", "3.11")], "platform": {**HERE, "version": "3.13.1"},
        "built": {}, "is_noexec": False,
    }  # fmt: skip
    found = machines.Environments(JobSpec(script="x", environment="wheels"))
    for minor, chosen in ((None, "3.13"), ("3.13", "3.13"), ("3.11", "3.11")):
        found.choose({here: look}, minor)
        assert found._pythons[here].path == f"python{chosen}"
    with pytest.raises(
        UserError, match=r"runs with Python 3\.12, and there is 3\.13, 3\.11; install Python 3\.12 there"
    ):
        found.choose({here: look}, "3.12")


def refuse(words: list[str], where: str) -> None:
    """Stands in for pip."""
    raise UserError(f"{where}: no project")


def test_one_that_is_not_kept_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"not kept here any more .*; give --environment again"):
        source.kept("needs.txt", "0123456789abcdef", tmp_path)
