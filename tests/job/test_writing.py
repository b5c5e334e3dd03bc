"""Variables that are written into job files: the rest of the file stays as it is."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.job.errors import UserError
from paceline.job.reading import read
from paceline.job.writing import set_variable, write_job

if TYPE_CHECKING:
    from pathlib import Path

NAME = "PACELINE_SYNC"
FILES = [
    "script: a.py\n",
    "script: a.py",
    "# first\nscript: a.py # why\nenv:\n  # rates\n  LR: 1e-3\nranks: 2\n",
    "env:\n    LR: 1e-3\n    PACELINE_SYNC: fp16 # old\nscript: a.py\n",
    "script: a.py\nenv: {PACELINE_SYNC: 'powersgd(2)', LR: 0.10}\n",
    "script: a.py\nenv: {}\n",
    "script: a.py\nenv:\nranks: 2\n",
    "{script: a.py, env: {LR: on}}\n",
    '{"script": "a.py"}\n',
    "---\nscript: a.py\n...\n",
    "\ufeffscript: ü.py\nenv: {A: ü}\n",
]


@pytest.mark.parametrize("text", FILES)
@pytest.mark.parametrize("value", ["fp16", "powersgd(4)", "topk(0.5)"])
def test_a_variable_is_set_and_nothing_else(tmp_path: Path, text: str, value: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text, encoding="utf-8")
    path.chmod(0o640)
    before = read(path)
    set_variable(path, NAME, value)
    assert read(path) == before.changed({"env": {**before.env, NAME: value}})
    assert path.stat().st_mode & 0o777 == 0o640
    kept = [line.partition("#")[2] for line in text.splitlines() if "#" in line]
    assert all(comment in path.read_text() for comment in kept)
    assert os.listdir(tmp_path) == ["job.yaml"]


@settings(max_examples=50, deadline=None)
@given(
    env=st.dictionaries(st.from_regex(r"[A-Z_][A-Z0-9_]{0,8}", fullmatch=True), st.text(max_size=20)),
    value=st.text(max_size=20),
)
def test_any_value_comes_back(tmp_path_factory: pytest.TempPathFactory, env: dict[str, str], value: str) -> None:
    path = tmp_path_factory.mktemp("job") / "job.yaml"
    texts = {name: each.replace("\0", "") for name, each in env.items()}
    write_job(path, {"script": "a.py", "env": texts})
    set_variable(path, NAME, value.replace("\0", ""))
    assert read(path).env == {**texts, NAME: value.replace("\0", "")}


def test_a_form_into_which_nothing_can_be_put(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    text = "script: a.py\nlabels: &same {A: b}\nenv: *same\n"
    path.write_text(text)
    with pytest.raises(UserError, match="write it there yourself"):
        set_variable(path, NAME, "fp16")
    assert path.read_text() == text
    assert os.listdir(tmp_path) == ["job.yaml"]
