"""`paceline submit job.yaml --dry-run`: the file and the flags together."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.typed import refusal, typed

if TYPE_CHECKING:
    from tests.conftest import Paceline


def test_flags_go_over_the_file(paceline: Paceline) -> None:
    paceline.script("print('ran')", "train.py")
    paceline.script("script: train.py\nranks: 2\nargs: [--lr, 1e-3]\nenv: {A: 1, B: 2}\n", "job.yaml")
    done = typed(paceline, "submit", "--dry-run", "-n", "3", "--env", "B=3", "job.yaml")
    assert (done.returncode, done.stderr) == (0, "")
    job = json.loads(done.stdout)["job"]
    assert (job["script"], job["ranks"], job["args"]) == ("train.py", 3, ["--lr", "1e-3"])
    assert {name: job["env"][name] for name in "AB"} == {"A": "1", "B": "3"}
    assert not paceline.home.exists()


def test_flags_behind_the_file_are_as_those_before_it(paceline: Paceline) -> None:
    paceline.script("print('ran')", "train.py")
    paceline.script("script: train.py\nranks: 2\nmax_restarts: 3\npriority: 5\n", "job.yaml")
    paceline.env["PET_MAX_RESTARTS"] = "7"
    before = ("--env", "A=1", "--max-restarts", "0", "-n", "3")
    done = typed(paceline, "submit", *before, "job.yaml", "--dry-run", "--env", "B=2", "--priority", "0")
    assert (done.returncode, done.stderr) == (0, "")
    job = json.loads(done.stdout)["job"]
    assert (job["ranks"], job["max_restarts"], job["priority"]) == (3, 0, 0)
    assert {name: job["env"].get(name) for name in "AB"} == {"A": "1", "B": "2"}


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ((), "job.yaml:2: rank: unknown key; did you mean ranks?"),
        (("--label", "a=b", "--ttl", "soon"), "job.yaml:2: rank: unknown key; did you mean ranks?"),
    ],
)
def test_one_line(paceline: Paceline, flags: tuple[str, ...], line: str) -> None:
    paceline.script("script: train.py\nrank: 2\n", "job.yaml")
    assert refusal(paceline, "submit", *flags, "job.yaml") == line
    assert not paceline.home.exists()


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--ttl", "soon"), "--ttl: 'soon' is not a duration; write for example 90s, 10m, 2h or 7d"),
        (("--ttl", "7"), "--ttl: '7' has no unit; did you mean 7d?"),
        (("--time-limit", "2"), "--time-limit: '2' has no unit; did you mean 2m or 2h?"),
        (("--time-limit", "3600"), "--time-limit: '3600' has no unit; did you mean 3600s?"),
        (("--data", "nonsense"), "--data 'nonsense': not VOLUME:/PATH; write for example training-data:/mnist_data"),
        (("--secret", "A B"), "--secret: 'A B' is not a valid name of an environment variable"),
    ],
)
def test_flags_are_called_by_their_names(paceline: Paceline, flags: tuple[str, ...], line: str) -> None:
    paceline.script("print('ran')", "train.py")
    paceline.script("script: train.py\n", "job.yaml")
    for what in ("train.py", "job.yaml"):
        assert refusal(paceline, "submit", *flags, what) == line
    assert not paceline.home.exists()


BOMB = "\n".join(["a0: &a0 {k: v}", *(f"a{n}: &a{n} {{<<: [{', '.join(9 * [f'*a{n - 1}'])}]}}" for n in range(1, 9))])


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (("submit", "--dry-run", "bomb.yaml"), "bomb.yaml:1: not valid YAML: "),
        (("accelerate", "launch", "--config_file", "bomb.yaml", "t.py"), "--config-file bomb.yaml: it is no YAML"),
        (("submit", "--dry-run", "--on", "kubernetes", "--pod-template", "bomb.yaml", "true"), "--pod-template "),
    ],
)
def test_aliases_that_stand_for_too_much_are_refused(paceline: Paceline, words: tuple[str, ...], where: str) -> None:
    """Each line stands for nine times the one before it."""
    (paceline.folder / "bomb.yaml").write_text(f"{BOMB}\n")
    done = typed(paceline, *words)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert where in done.stderr
