"""A single-process script becomes a distributed one by a few lines: how many, which, and that it then works."""

import difflib
import json
import os
import re
import signal
from pathlib import Path

import pytest
from tests.conftest import GENEROUS, eventually
from tests.examples.conftest import launchers

pytestmark = pytest.mark.torch

ROOT = Path(__file__).resolve().parents[2]
SHOWN_IN = {"digits": ROOT / "README.md", "chargpt": ROOT / "docs" / "library.md"}


def lines(name):
    return (ROOT / "examples" / name).read_text().splitlines()


def changed_lines(before, after):
    """A changed line counts once, whether it is another, a new or a missing one."""
    changes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for kind, i1, i2, j1, j2 in changes if kind != "equal")


def as_diff(before, after):
    """The unified diff without file names, line numbers and context."""
    changes = difflib.unified_diff(before, after, n=0, lineterm="")
    return "\n".join(line for line in changes if not line.startswith(("---", "+++", "@@")))


@pytest.mark.parametrize("example", SHOWN_IN)
def test_at_most_eleven_lines_differ(example):
    before, after = lines(f"{example}_single.py"), lines(f"{example}_library.py")
    assert 0 < changed_lines(before, after) <= 11, "\n".join(difflib.unified_diff(before, after, n=0, lineterm=""))


@pytest.mark.parametrize(("example", "page"), SHOWN_IN.items())
def test_the_documentation_shows_the_lines_that_differ(example, page):
    real = as_diff(lines(f"{example}_single.py"), lines(f"{example}_library.py"))
    shown = re.findall(r"^```diff\n(.*?)\n```$", page.read_text(), re.MULTILINE | re.DOTALL)
    assert real in shown, f"let the block of {page.relative_to(ROOT)} that begins with ```diff be this:\n{real}"


def evaluations(output):
    """What an example printed at the end of each epoch: its number, and the test accuracy or validation loss."""
    return [
        (int(epoch), float(value))
        for epoch, value in re.findall(r"epoch (\d+)/\d+ .*?(?:accuracy|validation loss) ([\d.]+)", output)
    ]


@launchers("python")
def test_digits_are_read_as_well_by_one_process_as_by_two_ranks(launcher):
    pytest.importorskip("sklearn")
    _, launch = launcher
    found = evaluations(launch("digits_library.py", "--epochs", "8"))
    assert [epoch for epoch, _ in found] == list(range(1, 9)), "rank 0, and no other, prints a line an epoch"
    assert found[-1][1] >= 0.96
    assert found[-1][1] * 360 == pytest.approx(round(found[-1][1] * 360), abs=0.02), "every test digit counts once"


@launchers("paceline")
def test_python_source_is_learnt_as_well_by_one_process_as_by_two_ranks(launcher, single):
    _, launch = launcher
    small = ("--characters", "200000", "--width", "32", "--layers", "1", "--lr", "1e-2")
    output = launch("chargpt_library.py", *small)
    assert re.findall(r"step (\d+)/98 loss", output) == ["50", "98"], "rank 0, and no other, prints the steps"
    [(_, loss)] = evaluations(output)
    [(_, expected)] = evaluations(single("chargpt_single.py", *small))
    assert loss == pytest.approx(expected, abs=0.1)


def test_a_killed_rank_costs_no_epoch(paceline):
    pytest.importorskip("sklearn")
    script = str(ROOT / "examples" / "digits_library.py")
    process = paceline.start("run", "-n", "2", "--max-restarts", "1", script, "--epochs", "8")
    eventually(lambda: [*paceline.home.glob("jobs/*/checkpoints/step-000100")], "a checkpoint is committed")
    status = json.loads((paceline.job() / "status.json").read_text())
    os.kill(status["ranks"][1]["pid"], signal.SIGKILL)
    out, err = process.communicate(timeout=GENEROUS)
    assert process.returncode == 0, err
    assert "starting again" in err
    found = evaluations(out + err)
    epochs = [epoch for epoch, _ in found]
    assert epochs.count(1) == 1, "the second attempt goes on where the first one stopped"
    assert set(epochs) == set(range(1, 9))
    assert found[-1][1] >= 0.96
