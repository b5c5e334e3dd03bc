"""The examples learn, as one process and as two ranks.

Those of torch run with the Python of these tests, the others with that of PACELINE_FRAMEWORKS_PYTHON.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.frameworks.test_frameworks import frameworks_python

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
pytestmark = pytest.mark.frameworks
in_both = pytest.mark.parametrize("ranks", [1, 2], ids=["one process", "two ranks"])


def printed(python: str, ranks: int, home: Path, example: str, pattern: str, *args: str) -> list[float]:
    """The numbers that an example prints in lines of this pattern."""
    launcher = [] if ranks == 1 else ["-m", "paceline", "run", "-n", str(ranks)]
    done = subprocess.run(
        [python, *launcher, str(EXAMPLES / example), *args],
        env={**os.environ, "PACELINE_HOME": str(home), "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"},
        cwd=home,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    found = [float(it[it.lastindex]) for it in re.finditer(pattern, done.stdout) if it.lastindex]
    assert found, done.stdout
    return found


@in_both
@pytest.mark.torch
def test_images(ranks: int, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pattern = r"\baccuracy (?:of the average )?([\d.]+)"
    *epochs, average = printed(sys.executable, ranks, tmp_path, "images.py", pattern, "--epochs", "6")
    assert len(epochs) == 6, "rank 0, and no other, prints a line an epoch"
    assert epochs[0] < 0.5
    assert min(epochs[-1], average) > 0.85


@pytest.mark.torch
def test_language_model_is_as_good_with_two_ranks(tmp_path: Path) -> None:
    pattern = r"perplexity (?:of word frequencies )?([\d.]+)"
    one, two = (printed(sys.executable, n, tmp_path, "language_model.py", pattern, "--epochs", "2") for n in (1, 2))
    assert len(one) == len(two) == 3
    assert one[2] < one[1] < one[0] / 2, "knows more than how frequent each word is"
    assert two == pytest.approx(one, rel=0.15), "the same batches; only dropout differs"


@in_both
@pytest.mark.torch
def test_gan(ranks: int, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pattern = r"distance to real images ([\d.]+)"
    distances = printed(sys.executable, ranks, tmp_path, "gan.py", pattern, "--epochs", "15")
    assert len(distances) == 4
    assert distances[-1] < 0.6 * distances[0]


@in_both
@pytest.mark.torch
def test_reinforcement(ranks: int, tmp_path: Path) -> None:
    lengths = printed(sys.executable, ranks, tmp_path, "reinforcement.py", r"until the pole falls ([\d.]+) of 200")
    assert len(lengths) == 6
    assert lengths[-1] > 2 * lengths[0]


def test_jax_is_the_same_with_two_ranks(tmp_path: Path) -> None:
    pattern = r"loss ([\d.]+)|test accuracy ([\d.]+)"
    one, two = (printed(frameworks_python(), n, tmp_path, "jax_digits.py", pattern, "--epochs", "6") for n in (1, 2))
    assert len(one) == 12
    assert one[-1] > 0.9
    assert two == pytest.approx(one, abs=0.01)


@in_both
def test_keras(ranks: int, tmp_path: Path) -> None:
    accuracies = printed(
        frameworks_python(), ranks, tmp_path, "keras_digits.py", r"val_accuracy: ([\d.]+)", "--epochs", "6"
    )
    assert len(accuracies) == 6
    assert accuracies[-1] > 0.9
