"""What a release publishes: its version, its size, what is in the wheel, and the recipe for conda."""

from __future__ import annotations

import importlib.util
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def release() -> Any:
    """tools/release.py."""
    spec = importlib.util.spec_from_file_location("release", ROOT / "tools" / "release.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_places_have_the_same_version(release: Any, tmp_path: Path) -> None:
    assert release.version_of() == PROJECT["project"]["version"]
    for name in ("pyproject.toml", "src/paceline/_version.py", "CHANGELOG.md", "conda/recipe.yaml"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((ROOT / name).read_text())
    text = (tmp_path / "CHANGELOG.md").read_text()
    (tmp_path / "CHANGELOG.md").write_text(text.replace("\n## ", "\n## 9.9.9\n## ", 1))
    with pytest.raises(SystemExit, match=r"CHANGELOG\.md has version 9\.9\.9"):
        release.version_of(tmp_path)


def test_the_wheel_is_small_and_complete(release: Any, tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    source, wheel = sorted(release.build(ROOT, tmp_path / "dist", "1764288000"), key=lambda path: path.suffix)
    assert source.name.endswith(".tar.gz") and wheel.stat().st_size <= release.LARGEST
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
        assert {it.date_time[:3] for it in opened.infolist()} == {(2025, 11, 28)}  # of that epoch
    version = PROJECT["project"]["version"]
    assert {"paceline/py.typed", f"paceline-{version}.data/data/share/man/man1/paceline-run.1"} <= names
    assert not [name for name in names if not name.startswith(("paceline/", f"paceline-{version}."))]


def test_the_list_of_components_has_what_is_installed_and_what_the_page_has(release: Any) -> None:
    listed = release.sbom("0.1.0", [["click", "8.3", "BSD-3-Clause"], ["paceline", "0.1.0", "Apache-2.0"]])
    assert listed["metadata"]["component"]["purl"] == "pkg:pypi/paceline@0.1.0"
    found = {re.sub(r"@.*", "", it["purl"]) for it in listed["components"]}
    assert found == {"pkg:pypi/click", "pkg:npm/preact", "pkg:npm/htm", "pkg:npm/uplot"}


def test_the_recipe_for_conda_requires_what_the_package_requires() -> None:
    recipe = yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text())
    project = PROJECT["project"]
    asked = [f"python{project['requires-python']}", *(it.partition(";")[0] for it in project["dependencies"])]

    def plain(lines: list[str]) -> set[str]:
        return {re.sub(r"\s", "", line) for line in lines}

    assert plain(recipe["requirements"]["run"]) == plain(asked)
    assert plain(recipe["requirements"]["host"]) == plain([*asked, "pip", *PROJECT["build-system"]["requires"]])
    (entry,) = recipe["build"]["python"]["entry_points"]
    assert entry == f"paceline = {project['scripts']['paceline']}"
