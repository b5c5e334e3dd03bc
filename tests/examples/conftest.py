"""Running the examples as their readers do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAUNCHERS = {
    "python": (1, [sys.executable]),
    "torchrun": (2, [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]),
    "paceline": (2, [sys.executable, "-m", "paceline", "run", "-n", "2"]),
}


def launchers(here):
    """Runs a test behind this launcher, and at night behind the others too."""
    marks = {name: () if name == here else pytest.mark.nightly for name in LAUNCHERS}
    return pytest.mark.parametrize(
        "launcher", [pytest.param(name, marks=marks[name]) for name in LAUNCHERS], indirect=True
    )


@pytest.fixture
def start(tmp_path):
    """A function that runs an example behind a command line and returns what it printed."""

    def run(command, script, *args):
        done = subprocess.run(
            [*command, str(ROOT / "examples" / script), *args],
            cwd=ROOT,
            # Threads that wait do not keep those of other tests from working.
            env={**os.environ, "PACELINE_HOME": str(tmp_path), "OMP_WAIT_POLICY": "passive"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, f"{command} exited with {done.returncode}\n{done.stdout}"
        return done.stdout

    return run


@pytest.fixture
def launcher(request, start):
    """Return the number of ranks, and a function that runs an example with them and returns what it printed."""
    ranks, command = LAUNCHERS[request.param]
    return ranks, lambda script, *args: start(command, script, *args)


@pytest.fixture
def single(start):
    """A function that runs an example as one process and returns what it printed."""
    return lambda script, *args: start(LAUNCHERS["python"][1], script, *args)
