"""Unmodified scripts of each framework find each other under `paceline run` and sum what their ranks contribute.

They run with the Python named by PACELINE_FRAMEWORKS_PYTHON, an environment with those frameworks and
paceline in it.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest

from paceline.cli.dialects.engine import names_of
from paceline.cli.dialects.paddle import PADDLE_LAUNCH


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


@pytest.mark.frameworks
@pytest.mark.parametrize("start_method", ["fork", "exec"])
@pytest.mark.parametrize("framework", ["paddle", "tensorflow", "jax"])
def test_heavy_framework(framework, start_method, tmp_path):
    run_script(frameworks_python(), framework, start_method, tmp_path)


@pytest.mark.frameworks
@pytest.mark.parametrize("script", ["operations", "training", "elastic"])
def test_horovod_of_tensorflow(script, tmp_path):
    home = {"PACELINE_HOME": str(tmp_path), "TF_CPP_MIN_LOG_LEVEL": "2"}
    restarts = "1" if script == "elastic" else "0"
    command = [frameworks_python(), "-m", "paceline", "run", "-n", "2", "--max-restarts", restarts]
    done = subprocess.run(
        [*command, str(Path(__file__).with_name(f"horovod_{script}.py"))],
        env={**os.environ, **home},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 0 of 2: all" in done.stdout


@pytest.mark.frameworks
def test_the_table_of_paddles_launcher_has_all_its_flags():
    command = [frameworks_python(), "-m", "paddle.distributed.launch", "--help"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout
    theirs = {name.replace("_", "-") for name in re.findall(r"--[a-z]\w*", said)} - {"--help"}
    ours = {name for flag in PADDLE_LAUNCH.flags for name in names_of(flag)[0]}
    assert len(theirs) > 20
    assert theirs <= ours


@pytest.mark.frameworks
@pytest.mark.timeout(120)
def test_a_rank_of_jax_that_fails_does_not_wait_for_the_others(tmp_path):
    """They would be waited for in a barrier of five minutes."""
    command = [frameworks_python(), "-m", "paceline", "run", "-n", "2", str(Path(__file__).with_name("jax_failure.py"))]
    env = {**os.environ, "PACELINE_HOME": str(tmp_path)}
    done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "rank 1 failed first: ValueError: mine" in done.stderr
