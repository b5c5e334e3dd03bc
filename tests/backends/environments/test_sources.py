"""What `--environment` names is read, kept by its content, and written for each kind of machine."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.backends.environments import locks, pip, source
from paceline.backends.environments.environment import Environment
from paceline.job.errors import UserError

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
source = { git = "https://host/big?rev=main#abc" }
dependencies = [{ name = "lib" }]
[package.optional-dependencies]
gpu = [{ name = "cuda" }]
[[package]]
name = "cuda"
version = "12"
source = { registry = "https://pypi.org/simple" }
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
        ("uv", UV, HERE, ["big @ git+https://host/big@abc", "cuda==12 --hash=sha256:bb", "lib==1.0 --hash=sha256:aa"]),
        ("uv", UV, ARM, ["lib==1.0 --hash=sha256:aa"]),
        ("uv", UV, {**ARM, **OLD, "machine": "aarch64"}, ["lib==1.0 --hash=sha256:aa", "old @ https://files/old-2.tar.gz"]),
        ("pylock", PYLOCK, HERE, ["far @ https://files/far-1.tar.gz", "lib==1.0 --hash=sha256:aa"]),
        ("pylock", PYLOCK, ARM,
         ["arm==2 --hash=sha256:cc", "far @ https://files/far-1.tar.gz", "lib==1.0 --hash=sha256:aa"]),
    ],
)  # fmt: skip
def test_locks_are_those_of_one_machine(form: Form, text: str, platform: dict[str, str], lines: list[str]) -> None:
    assert locks.lines(Environment("lock", form, text, ""), platform) == lines


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


def refuse(words: list[str], where: str) -> None:
    """Stands in for pip."""
    raise UserError(f"{where}: no project")


def test_one_that_is_not_kept_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"not kept here any more .*; give --environment again"):
        source.kept("needs.txt", "0123456789abcdef", tmp_path)
