"""Settings of a project that run programs or choose credentials are obeyed only when the user has agreed to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.cli.verbs.test_asking import QUESTION, Terminal
from tests.typed import refusal, typed

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Paceline


@pytest.fixture
def project(paceline: Paceline) -> Path:
    """A project whose interpreter leaves a trace."""
    (python := paceline.folder / "python").write_text(f"#!/bin/sh\ntouch {paceline.folder}/ran\nexit 1\n")
    python.chmod(0o755)
    file = paceline.folder / "paceline.toml"
    file.write_text(
        f'[defaults]\non = "lab"\n[targets.lab]\nbackend = "ssh"\nhosts = ["localhost"]\npython = "{python}"\n'
    )
    del paceline.env["PACELINE_TRUST"]
    return file


def has_run(paceline: Paceline) -> bool:
    return (paceline.folder / "ran").exists()


@pytest.mark.parametrize("verb", [("list",), ("get", "it"), ("data", "list"), ("top", "job")])
def test_where_nobody_can_be_asked_it_is_refused(paceline: Paceline, project: Path, verb: tuple[str, ...]) -> None:
    line = refusal(paceline, *verb)
    assert line.startswith(f"{project}:6: targets.lab.python: a project's setting that runs a program or chooses cred")
    assert line.endswith(f"paceline trust {project}")
    assert not has_run(paceline)


def test_the_agreement_holds_as_long_as_the_settings_stay(paceline: Paceline, project: Path) -> None:
    done = typed(paceline, "trust")
    assert done.returncode == 0
    assert f"targets.lab.python = '{paceline.folder}/python'" in done.stderr
    typed(paceline, "list")
    assert has_run(paceline)
    project.write_text("[volumes]\na = '/a'\n" + project.read_text())
    assert "paceline trust" not in typed(paceline, "list").stderr
    project.write_text(project.read_text() + 'identity_file = "key"\n')
    assert "targets.lab.python, and 1 more like it: a project's" in refusal(paceline, "list")
    (other := paceline.folder / "other").mkdir()
    (other / "paceline.toml").write_bytes(project.read_bytes())
    assert typed(paceline, "trust", str(other / "paceline.toml")).returncode == 0
    assert "paceline trust" in refusal(paceline, "list"), "it is for the other file"


@pytest.mark.parametrize(
    "text",
    [
        'kubeconfig = "k"',
        'identity_file = "i"',
        'host_discovery_script = "./h"',
        "pod_template = {spec = {}}",
        'setup = "x"',
    ],
)
def test_these_need_an_agreement(paceline: Paceline, project: Path, text: str) -> None:
    project.write_text(f'[targets.lab]\nbackend = "kubernetes"\n{text}\n')
    assert f"{project}:3: targets.lab.{text.partition(' ')[0]}: a project's" in refusal(paceline, "list")


def test_a_setup_of_this_machine_needs_one_too(paceline: Paceline, project: Path) -> None:
    project.write_text('[local]\nsetup = ["x"]\n')
    assert f"{project}:2: local.setup: a project's" in refusal(paceline, "list")


def test_ones_own_settings_and_others_of_a_project_need_none(paceline: Paceline, project: Path) -> None:
    own = paceline.folder / "config" / "paceline" / "config.toml"
    own.parent.mkdir(parents=True)
    project.rename(own)
    paceline.env["XDG_CONFIG_HOME"] = str(paceline.folder / "config")
    project.write_text("[local]\ndevices = 2\n")
    typed(paceline, "list")
    assert has_run(paceline)
    assert "needs no agreement" in typed(paceline, "trust").stderr


def test_all_projects_can_be_trusted_by_a_variable(paceline: Paceline, project: Path) -> None:
    paceline.env["PACELINE_TRUST"] = "1"
    typed(paceline, "list")
    assert has_run(paceline)


def test_what_cannot_be_trusted(paceline: Paceline, project: Path) -> None:
    assert "nowhere.toml cannot be trusted: it is not there" in refusal(paceline, "trust", "nowhere.toml")
    project.write_text("[")
    assert f"{project}:1: not valid TOML" in refusal(paceline, "trust")
    project.unlink()
    assert "there is no paceline.toml in this folder or above it" in refusal(paceline, "trust")


@pytest.mark.parametrize(("keys", "agrees"), [("n\n", False), ("\n", False), ("\x04", False), ("y\n", True)])
def test_on_a_terminal_it_asks_once(paceline: Paceline, project: Path, keys: str, agrees: bool) -> None:
    terminal = Terminal(paceline, "list")
    try:
        assert f"targets.lab.python = '{paceline.folder}/python'" in terminal.until(QUESTION)
        terminal.type(keys)
        code, _, screen = terminal.end()
    finally:
        terminal.close()
    assert ("paceline trust" in screen, has_run(paceline)) == (not agrees, agrees), screen
    assert agrees or code == 2
    assert ("paceline trust" in typed(paceline, "list").stderr) is not agrees


def test_nobody_is_asked_while_a_shell_completes_a_line(paceline: Paceline, project: Path) -> None:
    paceline.env["_PACELINE_COMPLETE"] = "bash_complete"
    terminal = Terminal(paceline, "list")
    try:
        code, _, screen = terminal.end()
    finally:
        terminal.close()
    assert (code, "[y/N]" in screen, has_run(paceline)) == (2, False, False)
