"""What the Tab key completes, without a shell."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from click.shell_completion import ShellComplete

from paceline.cli.main import cli

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Paceline


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with jobs here and on a target, and settings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ("jobs/resnet-1", "jobs/resnet-2", "jobs/.staging", "jobs/bert-1", "targets/lab/resnet-3"):
        (tmp_path / "home" / name).mkdir(parents=True)
    (tmp_path / "paceline.toml").write_text('[targets.lab]\nbackend = "ssh"\nhosts = ["h1"]\n')
    return tmp_path


def completed(*words: str) -> list[str]:
    """What the last word may become."""
    found = ShellComplete(cli, {}, "paceline", "_PACELINE_COMPLETE").get_completions(list(words[:-1]), words[-1])
    return [item.value for item in found]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("help", "ru"), ["run"]),
        (("get", "res"), ["resnet-1", "resnet-2", "resnet-3"]),
        (("logs", "-f", "b"), ["bert-1"]),
        (("top", "job", "b"), ["bert-1"]),
        (("checkpoint", "show", "b"), ["bert-1", "b"]),  # and the folders, which the shell knows
        (("stop", "resnet-1", "res"), ["resnet-2", "resnet-3"]),
        (("list", "--state", "ru"), ["RUNNING"]),
        (("prune", "--state", "FAILED,ST"), ["FAILED,STARTING", "FAILED,STOPPED"]),
        (("list", "--on", "l"), ["lab", "local"]),
        (("run", "--on", "ku"), ["kubernetes"]),
        (("submit", "--framework", "te"), ["tensorflow"]),
        (("submit", "--kind", "job"), ["job", "jobset"]),
        (("arena", "su"), ["submit"]),
        (("arena", "submit", "tf", "--evaluator-s"), ["--evaluator-selector"]),
        (("arena", "--loglevel", "debug", "logs", "b"), ["bert-1"]),
        (("srun", "--par"), ["--partition"]),
        (("paddlecloud", "job", "t"), ["train"]),
    ],
)
def test_the_tab_key(words: tuple[str, ...], expected: list[str]) -> None:
    assert completed(*words) == expected


def test_ranks_and_labels_of_the_jobs_that_there_are(paceline: Paceline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(paceline.home))
    paceline.script("print('here')")
    paceline.succeeds("run", "-n", "2", "--name", "it", "--label", "team=vision", "script.py")
    assert completed("logs", "it", "-i", "") == ["0", "1", "it-master-0", "it-worker-0"]
    assert completed("attach", "it", "-i", "it-w") == ["it-worker-0"]
    assert completed("logs", "-i", "") == [], "no job runs"
    assert completed("list", "--label", "te") == ["team=vision"]


def test_settings_that_are_wrong_complete_nothing(home: Path) -> None:
    (home / "paceline.toml").write_text("targets = 1\n")
    assert completed("list", "--on", "l") == []
