"""The examples run unchanged as one process, under torchrun and under paceline, and learn."""

import re

import pytest
from tests.examples.conftest import launchers

pytestmark = pytest.mark.torch


@launchers("torchrun")
def test_digits_are_read(launcher):
    pytest.importorskip("sklearn")
    ranks, launch = launcher
    output = launch("digits.py", "--epochs", "7")

    losses = [float(loss) for loss in re.findall(r"epoch \d+/7 loss ([\d.]+)", output)]
    assert len(losses) == 7, f"rank 0, and no other, prints a line an epoch:\n{output}"
    assert losses[-1] < 0.2 < losses[0]
    [(accuracy, correct, total, world_size)] = re.findall(
        r"test accuracy ([\d.]+) \((\d+)/(\d+)\), (\d+) ranks", output
    )
    assert float(accuracy) >= 0.95
    assert float(accuracy) == pytest.approx(int(correct) / int(total), abs=1e-4)
    assert int(total) == 360, "every test digit is counted exactly once"
    assert int(world_size) == ranks


@launchers("paceline")
def test_python_source_is_learnt(launcher):
    ranks, launch = launcher
    output = launch("chargpt.py", "--steps", "100", "--width", "64", "--layers", "2", "--sample", "40")

    assert re.findall(r"step (\d+)/100 loss [\d.]+ [\d,]+ tokens/s", output) == ["50", "100"]
    [(loss, entropy, world_size)] = re.findall(
        r"validation loss ([\d.]+), unigram entropy ([\d.]+), (\d+) ranks", output
    )
    assert float(loss) < float(entropy) - 0.4, "knows more than how frequent each character is"
    assert int(world_size) == ranks
    assert output.count("def ") >= 1, "a sample is written at the end"
