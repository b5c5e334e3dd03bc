"""What a machine has for an environment, and how pip and uv are called there."""

from __future__ import annotations

import os
import textwrap
import zipfile
from pathlib import Path

import pytest

from paceline.backends.environments import pip
from paceline.node.machine import environments

from .wheels import wheel

INDEX, OTHER = "https://own/simple", "https://other/simple"


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without settings of pip and uv."""
    for name in os.environ:
        if name.startswith(("PIP_", "UV_", "SSL_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(environments, "_PIP_FILES", (str(tmp_path / "pip.conf"),))


@pytest.mark.parametrize("is_uv", [False, True])
def test_nothing_is_installed_elsewhere(is_uv: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONPATH", "PIP_TARGET", "PIP_PREFIX", "PIP_USER", "UV_SYSTEM_PYTHON"):
        monkeypatch.setenv(name, "x")
    found = environments._variables({}, is_uv=is_uv)
    assert not {"PYTHONPATH", "UV_SYSTEM_PYTHON"} & found.keys()
    # An empty one also hides that of a file.
    assert (found["PIP_TARGET"], found["PIP_PREFIX"], found["PIP_USER"]) == ("", "", "0")


@pytest.mark.parametrize(
    ("given", "own", "file", "uv", "pip"),
    [
        ({}, {}, "", None, None),
        ({"PIP_INDEX_URL": INDEX}, {"UV_DEFAULT_INDEX": OTHER}, "", INDEX, INDEX),
        ({"UV_DEFAULT_INDEX": f"own={INDEX}"}, {"PIP_INDEX_URL": OTHER}, "", f"own={INDEX}", INDEX),
        ({}, {"UV_DEFAULT_INDEX": INDEX, "PIP_INDEX_URL": OTHER}, "", INDEX, OTHER),
        ({}, {}, f"[global]\nindex-url = {INDEX}\n", INDEX, INDEX),
    ],
)
def test_both_builders_ask_the_same_index(
    given: dict[str, str], own: dict[str, str], file: str, uv: str | None, pip: str | None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "pip.conf").write_text(file)
    assert environments._variables(given, is_uv=True).get("UV_DEFAULT_INDEX") == uv
    assert environments._variables(given, is_uv=False).get("PIP_INDEX_URL") == pip


def test_repositories_beside_hashes() -> None:
    """pip refuses to have both at once."""
    options, hashed, git = "--extra-index-url https://x", "a==1 --hash=sha256:aa", "b @ git+https://x/b@c"
    assert environments.batches([options, hashed, git]) == [[options, hashed], [options, git]]
    assert environments.batches([options, hashed]) == [[options, hashed]]
    assert environments.batches([hashed, "c"]) == [[hashed, "c"]]  # which is refused, as it must be


@pytest.mark.parametrize(
    ("code", "said", "told"),
    [
        (1, "Looking\nERROR: no a\nERROR: No matching distribution found for a\n", "no a; No matching distribution"),
        (1, "Could not fetch URL https://x/a/: wrong certificate\nERROR: no a\n", "URL https://x/a/: wrong certif"),
        (1, "ERROR: HASHES DO NOT MATCH\n  a==1 from file:///a.whl:\n   Got  00\n", "a==1 from file:///a.whl"),
        (2, "error: Failed to fetch: a\n  cause: wrong certificate\n", "Failed to fetch: a; wrong certificate"),
        (-9, "Collecting a\n", "was killed by signal 9, perhaps for want of memory"),
    ],
)
def test_why_a_builder_has_failed(code: int, said: str, told: str) -> None:
    assert told in environments._why(["uv", "pip", "install"], code, said)


def test_what_a_machine_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = tmp_path / "python3.29"
    stub.write_text("#!/bin/sh\nexit 127\n")  # as pyenv has one for each version that is not chosen
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    root = tmp_path / "home"
    own, minor = environments._pythons()[0]
    place = environments.folder(root) / environments._name("d1", minor)
    (place / "bin").mkdir(parents=True)
    os.symlink(own, place / "bin/python")
    for damaged in ("[]", "{", "{}", '{"python": 3}', '{"python": "/bin/sh"}'):
        (place / "environment.json").write_text(damaged)
        found = environments.look(root, "d1", "file:///")
        assert found["built"] == {}
        assert "3.29" not in [it for _, it in found["pythons"]]
    (place / "environment.json").write_text('{"seconds": 1, "bytes": 2, "packages": {"first": "1.0"}}')
    [record] = environments.look(root, "d1", "file:///")["built"].values()
    assert record["python"] == str(place / "bin/python")
    assert environments.packages_of(record["python"]) == {"first": "1.0"}

    link = tmp_path / "link"
    link.symlink_to(root)
    assert environments.is_built(link, record["python"])
    assert not environments.is_built(tmp_path, record["python"])

    # What a running build has brought along is not pruned; what a killed one has left is.
    for name, age in ((".files-new", 0.0), (".files-old", 1e6)):
        (environments.folder(root) / name).mkdir()
        os.utime(environments.folder(root) / name, (place.stat().st_mtime - age,) * 2)
    assert [it["name"] for it in environments.listed(root)] == [".files-old", place.name]


BACKEND = """
    import shutil
    def build_wheel(folder, *_):
        open({built!r}, "a").write("x")
        return shutil.copy({made!r}, folder).rpartition("/")[2]
"""


def test_a_project_is_built_when_it_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    project, built = tmp_path / "project", tmp_path / "built"
    made = wheel(tmp_path / "made", "first")
    project.mkdir()
    system = 'requires = []\nbuild-backend = "backend"\nbackend-path = ["."]'
    (project / "pyproject.toml").write_text(f"[build-system]\n{system}\n")
    (project / "backend.py").write_text(textwrap.dedent(BACKEND.format(built=str(built), made=str(made))))

    def of(name: str) -> bytes:
        (tmp_path / name).mkdir()
        return pip.wheel_of(project, tmp_path / name, "here").read_bytes()

    assert of("a") == of("b") == made.read_bytes()
    assert built.read_text() == "x"
    (project / "build").mkdir()  # as builds leave it
    of("c")
    assert built.read_text() == "x"
    (project / "more.py").touch()
    of("d")
    assert built.read_text() == "xx"
    (project / "more" / "dist").mkdir(parents=True)
    (project / "more" / "dist" / "__init__.py").touch()
    of("e")
    assert built.read_text() == "xxx", "a package may be called as the folder of a build"


def test_a_wheel_has_no_file_of_an_earlier_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_BUILD_ISOLATION", "false")  # pip's way to say that it takes the setuptools that is here
    project = tmp_path / "project"
    (project / "mine").mkdir(parents=True)
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "mine"\nversion = "1"\n[tool.setuptools]\npackages = ["mine"]\n'
    )
    modules = []
    for name in ("old", "new"):
        (project / "mine" / "old.py").unlink(missing_ok=True)
        (project / "mine" / f"{name}.py").touch()
        (tmp_path / name).mkdir()
        with zipfile.ZipFile(pip.wheel_of(project, tmp_path / name, "here")) as file:
            modules.append([it for it in file.namelist() if it.endswith(".py")])
    assert modules == [["mine/old.py"], ["mine/new.py"]]
    assert not (project / "build").exists()


def test_an_archive_of_a_project_is_built_when_it_is_another_one(tmp_path: Path) -> None:
    archive = tmp_path / "mylib-1.0.tar.gz"
    archive.write_bytes(b"1")
    before = list(pip._state(archive))
    archive.write_bytes(b"22")
    assert list(pip._state(archive)) != before
