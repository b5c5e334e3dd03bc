"""Volumes that are mounted for a job alone."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from paceline.node.machine import volumes

if TYPE_CHECKING:
    from tests.conftest import Paceline

here = volumes.mount_problem(os.path.dirname(__file__), "/mnt")
needs_mounts = pytest.mark.skipif(here is not None, reason=f"this machine does not allow mounts: {here}")

SCRIPT = """
    import os
    where = os.environ["WANTED"]
    print(os.environ["RANK"], sorted(os.listdir(where)), os.environ["PACELINE_DATA_DIGITS"])
    open(os.path.join(where, "rank-" + os.environ["RANK"]), "w").close()
"""


def volume(paceline: Paceline) -> Path:
    data = paceline.folder / "data"
    data.mkdir()
    (data / "train.bin").touch()
    (paceline.folder / "paceline.toml").write_text(f'[volumes]\ndigits = "{data}"\n')
    paceline.script(SCRIPT)
    return data


@needs_mounts
@pytest.mark.parametrize("method", ["fork", "exec"])
def test_a_volume_is_mounted_for_the_job_alone(paceline: Paceline, method: str) -> None:
    data = volume(paceline)
    wanted = paceline.folder / "wanted"
    wanted.mkdir()
    (wanted / "hidden").touch()
    done = paceline.run(
        "-n", "1", "--name", "it", "--data", f"digits:{wanted}", "--env", f"WANTED={wanted}",
        "--start-method", method, "script.py",
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, f"0 ['train.bin'] {data}\n"), done.stderr
    assert "cannot be mounted" not in done.stderr
    assert os.listdir(wanted) == ["hidden"]
    assert sorted(os.listdir(data)) == ["rank-0", "train.bin"]
    assert f"digits at {data}, which the job sees at {wanted}\n" in paceline("get", "it").stdout


@needs_mounts
@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes the folder")
def test_a_missing_folder_is_made_at_the_start_alone(paceline: Paceline) -> None:
    data = volume(paceline)
    wanted = paceline.folder / "not" / "there"
    line = ("--data", f"digits:{wanted}", "--env", f"WANTED={wanted}", "script.py")
    assert paceline("submit", "--dry-run", *line).returncode == 0
    assert not wanted.parent.exists()
    done = paceline.run(*line)
    assert (done.returncode, done.stdout) == (0, f"0 ['train.bin'] {data}\n"), done.stderr
    assert os.listdir(wanted) == []


def test_what_cannot_be_mounted_is_said_at_submit(paceline: Paceline) -> None:
    data = volume(paceline)
    wanted = paceline.folder  # has the working directory in it
    line = ("--data", f"digits:{wanted}", "--env", f"WANTED={data}", "script.py")
    said = (
        f"volume digits cannot be mounted at {wanted}: it would hide {paceline.home}; "
        f"the job reads its path, {data}, from PACELINE_DATA_DIGITS\n"
    )
    done = paceline("submit", "--name", "it", *line)
    assert (done.returncode, said in done.stderr) == (0, True), done.stderr
    assert paceline("wait", "it").returncode == 0
    assert f"(not mounted at {wanted}: it would hide {paceline.home}; the job reads PACELINE_DATA_DIGITS)" in (
        paceline("get", "it").stdout
    )
    assert said in paceline.run(*line).stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_users_mount_in_a_user_namespace(tmp_path: Path) -> None:
    script = """
        import ctypes, os, sys
        from paceline.node.machine import volumes
        os.setgroups([]); os.setgid(65534); os.setuid(65534)
        ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE: as a process that has not been root
        try:
            os.close(os.open("/proc/self/uid_map", os.O_WRONLY))
            volumes.enter([(sys.argv[1], sys.argv[2])])
        except PermissionError as error:
            sys.exit(f"not allowed here: {error}")
        print(os.getuid(), os.listdir(sys.argv[2]))
    """
    data, wanted = tmp_path / "data", tmp_path / "wanted"
    for folder in (data, wanted):
        folder.mkdir()
    (data / "train.bin").touch()
    for folder in (tmp_path, *tmp_path.parents):
        if folder.owner() == "root" and not folder.stat().st_mode & 1:
            pytest.skip(f"{folder} is closed to other users") if folder.parent == folder else folder.chmod(0o711)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(data), str(wanted)],
        capture_output=True,
        text=True,
        check=False,
    )
    if "not allowed here" in done.stderr:
        pytest.skip(done.stderr)
    assert (done.returncode, done.stdout) == (0, "65534 ['train.bin']\n"), done.stderr
    assert os.listdir(wanted) == []
