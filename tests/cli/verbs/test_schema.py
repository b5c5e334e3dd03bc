"""`paceline schema`: what editors know of job files."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from paceline.job.errors import UserError
from paceline.job.reading import read
from paceline.job.spec import JobSpec

if TYPE_CHECKING:
    from tests.conftest import Paceline

ROOT = Path(__file__).parents[3]
SCHEMA = json.loads((ROOT / "docs" / "job.schema.json").read_text())
EXAMPLES = sorted(ROOT.glob("examples/*.yaml"))


@functools.cache
def validator() -> Any:
    import jsonschema  # takes long to import

    return jsonschema.Draft202012Validator(SCHEMA)


def errors(job: Any) -> list[str]:
    return [error.message for error in validator().iter_errors(job)]


def test_the_copy_in_the_docs_is_what_the_verb_prints(paceline: Paceline) -> None:
    done = paceline("schema")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == SCHEMA, "run: paceline schema > docs/job.schema.json"


def test_it_is_a_schema_of_all_fields() -> None:
    validator().check_schema(SCHEMA)
    assert set(SCHEMA["properties"]) == set(JobSpec.__struct_fields__)
    assert SCHEMA["title"] == "paceline job"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_fit(path: Path) -> None:
    assert errors(yaml.safe_load(path.read_text())) == []
    read(path)


FITTING = [
    {"args": ["--lr", 0.1, True]},
    {"env": {"A": 1}, "labels": {"B": False}},
    {"nodes": "2:4"},
    {"nodes": 2},
    {"ranks": "auto"},
    {"memory": "16Gi"},
    {"memory": "512 MB"},
    {"memory": 512 << 20},
    {"time_limit": "1h30m", "ttl": "90.5s"},
    {"devices": ["0", 1]},
    {"devices": 2},
    {"data": ["a:/b", {"volume": "a", "path": "/b"}]},
    {"code": {"mode": "git", "source": "https://host/repository"}},
    {"framework": "torch"},
]
WRONG = [
    {"rnaks": 2},
    {"args": [["nested"]]},
    {"nodes": "many"},
    {"nodes": 0},
    {"ranks": "many"},
    {"memory": "16 elephants"},
    {"ttl": "soon"},
    {"ttl": 0},
    {"ttl": 90.5},
    {"time_limit": "60"},
    {"data": ["nonsense"]},
    {"code": {"mode": "svn"}},
    {"framework": "pytroch"},
    {"script": ["train.py"]},
]


@pytest.mark.parametrize("fields", FITTING, ids=str)
def test_schema_and_reader_agree_on_what_is_right(tmp_path: Path, fields: dict[str, Any]) -> None:
    job = {"script": "train.py", **fields}
    assert errors(job) == []
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    read(tmp_path / "job.yaml")


@pytest.mark.parametrize("fields", WRONG, ids=str)
def test_schema_and_reader_agree_on_what_is_wrong(tmp_path: Path, fields: dict[str, Any]) -> None:
    job = {"script": "train.py", **fields}
    assert errors(job) != []
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    with pytest.raises(UserError):
        read(tmp_path / "job.yaml")


def test_something_must_be_run() -> None:
    assert errors({"name": "a"}) != []


def test_what_is_stored_fits() -> None:
    fields = {"script": "a.py", "nodes": "2:4", "ttl": "5s", "memory": 1 << 30, "devices": ("0",), "data": ["a:/b"]}
    spec = JobSpec.validated(fields)
    assert errors(spec.dumped()) == []
