"""The examples run unchanged as one process, under torchrun and under paceline, and learn."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
LAUNCHERS = {
    "python": (1, [sys.executable]),
    "torchrun": (2, [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]),
    "paceline": (2, [sys.executable, "-m", "paceline", "run", "-n", "2"]),
}


@pytest.fixture(params=LAUNCHERS)
def launcher(request, tmp_path):
    """Return the number of ranks, and a function that runs an example with them and returns what it printed."""
    ranks, command = LAUNCHERS[request.param]

    def launch(script, *args):
        done = subprocess.run(
            [*command, str(ROOT / "examples" / script), *args],
            cwd=ROOT,
            env={**os.environ, "PACELINE_HOME": str(tmp_path)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, f"{request.param} exited with {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return ranks, launch


def test_digits_are_read(launcher):
    pytest.importorskip("sklearn")
    ranks, launch = launcher
    output = launch("digits.py", "--epochs", "10")

    losses = [float(loss) for loss in re.findall(r"epoch \d+/10 loss ([\d.]+)", output)]
    assert len(losses) == 10, f"rank 0, and no other, prints a line an epoch:\n{output}"
    assert losses[-1] < 0.2 < losses[0]
    [(accuracy, correct, total, world_size)] = re.findall(
        r"test accuracy ([\d.]+) \((\d+)/(\d+)\), (\d+) ranks", output
    )
    assert float(accuracy) >= 0.95
    assert float(accuracy) == pytest.approx(int(correct) / int(total), abs=1e-4)
    assert int(total) == 360, "every test digit is counted exactly once"
    assert int(world_size) == ranks


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


def test_library_reads_digits(launcher):
    pytest.importorskip("sklearn")
    ranks, launch = launcher
    lines = re.findall(r"epoch (\d+) test accuracy ([\d.]+), (\d+) ranks", launch("digits_library.py"))
    assert [int(epoch) for epoch, _, _ in lines] == list(range(1, 11))
    assert float(lines[-1][1]) >= 0.95
    assert {int(world_size) for _, _, world_size in lines} == {ranks}
