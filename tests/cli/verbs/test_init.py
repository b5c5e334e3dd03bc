"""`init` writes files that can be read and used, asks only on a terminal, and overwrites nothing unasked."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from tests.cli.verbs.test_asking import Terminal
from tests.typed import refusal, typed

from paceline.job import settings
from paceline.job.reading import read

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Paceline


@pytest.fixture
def folder(paceline: Paceline) -> Path:
    for name in ("train.py", "eval.py", "test_train.py"):
        paceline.script("print('here')", name)
    return paceline.folder


def files(folder: Path) -> list[str]:
    return sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.suffix != ".py"
    )


def test_what_is_suggested_can_be_started(paceline: Paceline, folder: Path) -> None:
    done = typed(paceline, "init", "-y")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "paceline: job.yaml is written; start it with: paceline submit job.yaml\n"
    job = read(folder / "job.yaml")
    assert (job.script, job.ranks, job.backend) == ("train.py", 1, "local")
    assert typed(paceline, "submit", "--dry-run", "job.yaml").returncode == 0
    text = (folder / "job.yaml").read_text()
    (folder / "all.yaml").write_text(re.sub(r"^# ([a-z_]+: )", r"\1", text, flags=re.M))
    assert read(folder / "all.yaml").time_limit == 12 * 3600, "what is commented out can be used, too"


def test_flags_answer(paceline: Paceline, folder: Path) -> None:
    paceline.script("", "a: b.py")
    flags = ("--on", "slurm", "-n", "2 gpus", "--script", "a: b.py", "--image", "x:1", "--file", "slurm.yaml")
    assert typed(paceline, "init", *flags).returncode == 0
    job = read(folder / "slurm.yaml")
    assert (job.script, job.ranks, job.devices, job.image, job.backend) == ("a: b.py", 2, 2, "x:1", "slurm")
    assert files(folder) == ["slurm.yaml"]


def test_hosts_become_a_target(paceline: Paceline, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = "# ours\n[targets.old]\nbackend = 'slurm'\n"
    (folder / "paceline.toml").write_text(before)
    done = typed(paceline, "init", "-y", "-H", "node1,me@node2:4")
    assert done.returncode == 0, done.stderr
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    targets = settings.load(folder).targets
    assert (targets["lab"].backend, targets["lab"].options) == ("ssh", {"hosts": ["node1", "me@node2:4"]})
    assert (folder / "paceline.toml").read_text().startswith(before)
    job = read(folder / "job.yaml")
    assert (job.backend, job.nodes, job.ranks, job.code and job.code.mode) == ("lab", 2, "slots", "snapshot")
    cluster = ("--settings", "user", "--on", "kubernetes", "--target", "cluster", "--force")
    assert typed(paceline, "init", "-y", *cluster).returncode == 0
    assert settings.load(folder).targets["cluster"].backend == "kubernetes"
    assert read(folder / "job.yaml").backend == "cluster"
    assert typed(paceline, "init", "-y", "--on", "old", "--force").returncode == 0
    assert read(folder / "job.yaml").backend == "old"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "there is no terminal to ask on; give --script, --on, -n, or -y"),
        (("--script", "train.py", "-H", "node1"), "give -n, or -y"),
        (("-y", "--script", "trian.py"), "--script trian.py: no such file; did you mean train.py?"),
        (("-y", "-n", "many"), "-n 'many' is neither a number from 1 on nor gpu, cpu"),
        (("-y", "-n", "0"), "-n"),
        (("-y", "--on", "slrum"), "--on slrum: no such target; did you mean slurm?"),
        (("-y", "--on", "ssh"), "--on ssh needs hosts; name them with -H"),
        (("-y", "--on", "slurm", "-H", "a"), "-H names hosts, but --on slurm needs none"),
        (("-y", "-H", "a,a"), "a is named twice"),
        (("-y", "-H", "a", "--target", "lab.a"), "--target 'lab.a' is no name for a target"),
        (("-y", "--settings", "project"), "this machine needs no target; leave --settings out"),
        (("-y", "--file", "job.toml"), "--file job.toml: a job file ends in .yaml"),
        (("-y", "--file", "no/job.yaml"), "there is no folder no"),
    ],
    ids=" ".join,
)
def test_refusals_write_nothing(paceline: Paceline, folder: Path, flags: tuple[str, ...], said: str) -> None:
    assert said in refusal(paceline, "init", *flags)
    assert files(folder) == []


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "job.yaml",
            "script: mine.py\n",
            "job.yaml exists; name another one with --file, or overwrite it with --force",
        ),
        ("paceline.toml", "targets = {}\n", "paceline.toml can have no more tables"),
        ("paceline.toml", "[targets.lab]\nbackend = 'slurm'\n", "there is a target lab already"),
        ("paceline.toml", "[targets\n", "paceline.toml:1: not valid TOML"),
    ],
    ids=["job", "inline", "taken", "broken"],
)
def test_what_is_there_stays(paceline: Paceline, folder: Path, name: str, text: str, said: str) -> None:
    (folder / name).write_text(text)
    assert said in refusal(paceline, "init", "-y", "-H", "node1")
    assert files(folder) == [name]
    assert (folder / name).read_text() == text


def test_three_questions_on_a_terminal(paceline: Paceline, folder: Path) -> None:
    terminal = Terminal(paceline, "init")
    try:
        assert "Which script (train.py, eval.py)? [train.py] " in terminal.until(r"Which script.*\] ")
        terminal.type("evil.py\n")
        terminal.until(r"did you mean eval.py\?\s+Which script.*\] ")
        terminal.type("eval.py\n")
        terminal.until(r"Where does it run: local \(this machine\), ssh \(hosts\), slurm, kubernetes\? \[local\] ")
        terminal.type("\n")
        terminal.until(r"How many ranks on each machine \(this one has .* cores?\)\? \[1\] ")
        terminal.type("2\n")
        code, _, screen = terminal.end()
    finally:
        terminal.close()
    assert code == 0, screen
    assert screen.splitlines()[-1] == "paceline: job.yaml is written; start it with: paceline submit job.yaml"
    job = read(folder / "job.yaml")
    assert (job.script, job.ranks, job.backend) == ("eval.py", 2, "local")


def test_an_end_of_the_input_writes_nothing(paceline: Paceline, folder: Path) -> None:
    terminal = Terminal(paceline, "init", "--script", "train.py", "--on", "ssh")
    try:
        terminal.until(r"Which hosts .*\? ")
        terminal.type("\x04")
        code, _, _ = terminal.end()
    finally:
        terminal.close()
    assert (code, files(folder)) == (130, [])
