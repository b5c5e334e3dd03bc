"""The pages for contributors name files that exist, and the forge runs what they say."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("AGENTS.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md", "docs/stable.md")),
    *sorted((ROOT / "docs" / "contributing").glob("*.md")),
]
MADE = {"dist/", "tests/FOLDER"}  # by `make release`; to be filled in


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    named = set(
        re.findall(r"(?<![\w/.-])(?:src|tests|tools|docs|benchmarks|requirements|conda|examples)/[\w./-]*\w", text)
    )
    named |= set(re.findall(r"`(\.ci/run|\.devcontainer|pyproject\.toml|CHANGELOG\.md|Makefile)`", text))
    assert not [name for name in named - MADE if not (ROOT / name).exists()]
    assert max(map(len, text.splitlines())) <= 120 and len(text.splitlines()) <= 250
    links = [it for it in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)]
    assert not [link for link in links if not (page.parent / link).exists()]


@pytest.mark.parametrize("name", ["backend", "method", "dialect", "cause"])
def test_a_usual_change_has_ten_steps_with_files(name: str) -> None:
    steps = re.split(r"^\d+\. ", (ROOT / "docs" / "contributing" / f"{name}.md").read_text(), flags=re.M)[1:]
    assert len(steps) == 10
    assert sum("`src/" in step or "`tests/" in step or "`docs/" in step for step in steps) >= 7


def test_what_the_forge_and_editors_run_is_there() -> None:
    versions = runpy.run_path(str(ROOT / "tools" / "versions.py"))
    for name in (*versions["TESTS"], *(f"examples/{it}" for it in versions["EXAMPLES"])):
        assert (ROOT / name).exists(), name
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    assert [step.get("run") for step in jobs["gate"]["steps"]][-1] == ".ci/run"
    matrix = jobs["versions"]["strategy"]["matrix"]
    assert tuple(matrix["python"]) == versions["PYTHONS"] and tuple(matrix["torch"]) == versions["TORCHES"]
    for path in (*(ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"), ROOT / ".pre-commit-config.yaml"):
        assert yaml.safe_load(path.read_text())
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    setup = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())["postCreateCommand"]
    assert setup.split()[-1] in targets
