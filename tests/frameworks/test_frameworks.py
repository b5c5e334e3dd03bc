"""Unmodified scripts of each framework find each other under `paceline run` and sum what their ranks contribute.

All but torch's run with the Python named by PACELINE_FRAMEWORKS_PYTHON, an environment with those frameworks and
paceline in it.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def frameworks_python():
    """The Python of the environment with the heavy frameworks; skips the test where there is none."""
    python = os.environ.get("PACELINE_FRAMEWORKS_PYTHON")
    if not python:
        pytest.skip("PACELINE_FRAMEWORKS_PYTHON is not set; `make test-frameworks` builds the environment")
    # Not resolved: the link in a virtual environment's bin is what tells Python where its packages are.
    return str(Path(python).absolute())


def run_script(python, framework, start_method, home):
    """Run the framework's script on two ranks; check that each rank printed the sum, once."""
    command = [python, "-m", "paceline", "run", "-n", "2", "--framework", framework, "--start-method", start_method]
    done = subprocess.run(
        [*command, "--tee", "all", str(Path(__file__).with_name(f"{framework}_sum.py"))],
        # Paddle's store on libuv aborts now and then when a rank leaves (LibUVMasterDaemon); this is its other one.
        env={**os.environ, "PACELINE_HOME": str(home), "FLAGS_tcp_store_using_libuv": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    said = f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, said
    for rank in range(2):
        assert done.stdout.count(f"rank {rank} of 2: sum=3.0\n") == 1, said


@pytest.mark.torch
@pytest.mark.parametrize("start_method", ["fork", "exec"])
def test_torch(start_method, tmp_path):
    pytest.importorskip("torch")
    run_script(sys.executable, "torch", start_method, tmp_path)


@pytest.mark.frameworks
@pytest.mark.parametrize("start_method", ["fork", "exec"])
@pytest.mark.parametrize("framework", ["paddle", "tensorflow", "jax"])
def test_heavy_framework(framework, start_method, tmp_path):
    run_script(frameworks_python(), framework, start_method, tmp_path)
