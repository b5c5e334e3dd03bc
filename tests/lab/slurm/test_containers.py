"""Jobs in containers on a Slurm cluster; a program in place of Apptainer hides what it was not told to show."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from .client import Client

WHO = """
    import os, pathlib
    seen = [path.name for path in sorted(pathlib.Path(SCRATCH).iterdir())]
    print(os.environ["RANK"], os.environ["PASSWORD"], os.environ["SLURM_NODEID"], *seen, flush=True)
    print("in", pathlib.Path(os.environ["APPTAINER_CONTAINER"]).name, "at", os.path.basename(os.getcwd()), flush=True)
"""
APPTAINER = """\
#!/bin/sh
[ "$1 $2" = "exec --nv" ] || { echo "bad arguments: $*" >&2; exit 64; }
shift 2
binds=
while case $1 in --bind=*) true ;; *) false ;; esac; do
  path=${1#--bind=}
  shift
  [ -e "$path" ] || { echo "FATAL:   container creation failed: mount source $path doesn't exist" >&2; exit 255; }
  case $path in SCRATCH/*) binds="$binds $path" ;; esac
done
export APPTAINER_CONTAINER="$1"
shift
exec unshare --mount sh -c '
  mount -t tmpfs none /mnt
  for path in $0; do mkdir -p "/mnt$path"; mount --bind "$path" "/mnt$path"; done
  mount -t tmpfs none SCRATCH
  for path in $0; do mkdir -p "$path"; mount --bind "/mnt$path" "$path"; done
  exec "$@"' "$binds" "$@"
"""


@pytest.fixture
def scratch(client: Client) -> Path:
    """A shared disk with the root, some data, some code and what no job needs; the target has `apptainer`."""
    scratch = client.folder / "scratch"
    for name in ("root", "data", "code", "other"):
        (scratch / name).mkdir(parents=True)
    (scratch / "image.sif").touch()
    (scratch / "code" / "train.py").write_text(
        "\n".join(line.strip() for line in WHO.splitlines()).replace("SCRATCH", repr(str(scratch)))
    )
    programs = client.folder / "programs"
    programs.mkdir()
    (programs / "apptainer").write_text(APPTAINER.replace("SCRATCH", str(scratch)))
    (programs / "apptainer").chmod(0o755)
    client.env["PATH"] = f"{programs}:{client.env['PATH']}"
    client.env["PASSWORD"] = "of,mine"
    (client.folder / "paceline.toml").write_text(
        f'volumes = {{ data = "{scratch}/data" }}\n[targets.lab]\nbackend = "slurm"\nroot = "{scratch}/root"\n'
        f'python = "{sys.executable}"\ncontainers = "apptainer"\n'
    )
    return scratch


def submit(client: Client, scratch: Path, *flags: str) -> str:
    """What the ranks of a job print."""
    work = ("--working-dir", str(scratch / "code"), "--secret", "PASSWORD", "--data", "data:/inputs")
    done = client.paceline("run", "--on", "lab", "--name", "it", *work, *flags, "train.py", check=False)
    assert done.returncode == 0, (done.stderr, [path.read_text() for path in scratch.glob("root/slurm/it/slurm.out")])
    return client.paceline("logs", "--on", "lab", "--all", "it").stdout


def test_a_container_sees_what_the_job_needs(client: Client, scratch: Path) -> None:
    said = submit(client, scratch, "--nnodes", "2", "--image", "scratch/image.sif")
    assert sorted(re.findall(r"(\d of.*)$", said, re.MULTILINE)) == [
        "0 of,mine 0 code data root", "1 of,mine 1 code data root",
    ]  # fmt: skip
    assert said.count("in image.sif at code\n") == 2


def test_the_folder_of_checkpoints_is_shown(client: Client, scratch: Path) -> None:
    said = submit(client, scratch, "--image", f"{scratch}/image.sif", "--checkpoint-dir", f"{scratch}/other/new/saved")
    assert "0 of,mine 0 code data other root\n" in said


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (
            ("--image", "ubuntu:24.04"),
            r"--image .*ubuntu:24.04: no .*; name a file on the shared disk, or .*docker://.*",
        ),
        (("--image", "nowhere.sif", "--containers", "singularity"), r"--image .*/nowhere.sif: no /.*"),
        (("--image", "./no.sqsh", "--containers", "pyxis"), r"--image .*/no.sqsh: no /.*"),
    ],
)
def test_images_that_are_not_there(client: Client, scratch: Path, flags: tuple[str, ...], why: str) -> None:
    (client.folder / "train.py").write_text("pass")
    done = client.paceline("submit", "--on", "lab", "--dry-run", *flags, "train.py", check=False)
    assert done.returncode == 2 and re.fullmatch(f"paceline: {why}\n", done.stderr), done.stderr


def test_pyxis_gets_the_same_folders(client: Client, scratch: Path) -> None:
    flags = ("--image", "nvcr.io#nvidia/pytorch:25.01-py3", "--containers", "pyxis", "--data", "data:/inputs")
    work = ("--working-dir", str(scratch / "code"))
    shown = client.paceline("submit", "--on", "lab", "--dry-run", *work, *flags, "train.py").stdout
    (line,) = [line for line in shown.splitlines() if line.startswith("srun ")]
    mounts = ",".join(f"{scratch}/{name}:{scratch}/{name}" for name in ("code", "data", "root"))
    assert f" --container-image=nvcr.io#nvidia/pytorch:25.01-py3 --container-mounts={mounts} " in line.replace("'", "")
    assert "--container-mount-home" in line and f" {sys.executable} " in line


def test_a_job_in_an_allocation_is_in_its_container(client: Client, scratch: Path) -> None:
    flags = f"--image {scratch}/image.sif --working-dir {scratch}/code --secret PASSWORD"
    run = f"{sys.executable} -m paceline run --on lab {flags} train.py"
    done = client.sh(f"salloc --quiet --nodes=1 {run}")
    assert done.returncode == 0 and "in image.sif at code\n" in done.stdout, done.stderr
    shown = client.json("list", "--on", "lab", "-A")
    assert [it["state"] for it in shown] == ["SUCCEEDED"]
