"""What would run an image on a machine, and its command; programs are stand-ins that say what real ones do."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from paceline.contract.nodejob import NodeJob
from paceline.node.errors import Refused
from paceline.node.machine import containers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Installed = Callable[..., None]

HAS = "exit 0"
HAS_NOT = {"podman": "exit 1", "docker": "[ $1 = info ] && exit 0; echo 'Error: No such image: x' >&2; exit 1"}


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installed:
    """Install programs with these scripts, and no others."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("USER", "ann")
    monkeypatch.setattr(containers, "_has_nvidia", lambda: False)

    def install(**scripts: str) -> None:
        for name, script in scripts.items():
            (folder / name).write_text(f"#!/bin/sh\n{script}\n")
            (folder / name).chmod(0o755)

    return install


def look(root: Path, image: str = "lab/train", program: str | None = None, *, devices: bool = False) -> dict[str, Any]:
    return containers.look(root, image, program, needs_devices=devices)


def test_the_first_program_that_works_and_has_the_image(install: Installed, tmp_path: Path) -> None:
    assert look(tmp_path) == {
        "problem": "there is no podman, docker or apptainer on PATH; install one, for example podman, there"
    }
    install(podman=HAS_NOT["podman"], docker=HAS_NOT["docker"], apptainer="exit 0")
    assert look(tmp_path) == {"program": "podman", "reference": "docker.io/lab/train", "is_there": False}
    assert look(tmp_path, program="docker") == {"program": "docker", "reference": "lab/train", "is_there": False}
    install(podman="echo 'time=1 level=warning msg=\"The cgroupv2 manager is set to systemd\"' >&2; exit 1")
    assert look(tmp_path, program="podman")["is_there"] is False
    install(docker="[ $1 = info ] && exit 0; echo sha256:1")
    assert look(tmp_path) == {"program": "docker", "reference": "lab/train", "is_there": True}
    install(podman="echo 'Error: cannot set up namespace using newuidmap: exit status 1' >&2; exit 125")
    install(docker=HAS_NOT["docker"])
    assert look(tmp_path)["program"] == "docker"
    (tmp_path / "train.sif").touch()
    found = look(tmp_path, str(tmp_path / "train.sif"))
    assert found == {"program": "apptainer", "reference": str(tmp_path / "train.sif"), "is_there": True}


@pytest.mark.parametrize(
    ("image", "podman", "source"),
    [
        ("debian", "docker.io/library/debian", "docker://debian"),
        ("lab/train:3", "docker.io/lab/train:3", "docker://lab/train:3"),
        ("docker://ghcr.io/lab/train", "ghcr.io/lab/train", "docker://ghcr.io/lab/train"),
        ("host:5000/train", "host:5000/train", "docker://host:5000/train"),
        ("localhost/train", "localhost/train", "docker://localhost/train"),
        ("docker-archive:/x.tar", "docker-archive:/x.tar", "docker-archive:/x.tar"),
    ],
)
def test_names_of_images(image: str, podman: str, source: str, install: Installed, tmp_path: Path) -> None:
    install(podman="exit 1", apptainer="exit 0")
    assert look(tmp_path, image, "podman")["reference"] == podman
    assert look(tmp_path, image, "apptainer")["source"] == source


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ("Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?",
         "docker's daemon does not run; start it (sudo systemctl start docker), or install podman"),
        ("permission denied while trying to connect to the Docker daemon socket at unix:///var/run/docker.sock: Get …",
         "docker's socket is closed to ann; add ann to its group (sudo usermod -aG docker ann) and log in again, or"
         " install podman"),
        ("something else", "docker failed: something else"),
    ],
)  # fmt: skip
def test_why_docker_does_not_work(said: str, problem: str, install: Installed, tmp_path: Path) -> None:
    install(docker=f"echo '{said}' >&2; exit 1")
    assert look(tmp_path) == {"program": "docker", "problem": problem}


def test_a_rootless_docker_is_refused(install: Installed, tmp_path: Path) -> None:
    install(docker="echo '[name=seccomp,profile=builtin name=rootless]'")
    assert "docker is rootless there" in look(tmp_path)["problem"]


def test_gpus_that_containers_do_not_get(install: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers, "_has_nvidia", lambda: True)
    monkeypatch.setattr(containers, "_CDI", (str(tmp_path / "cdi"),))
    install(podman="exit 0", docker="echo 'map[runc:{runc []}]'")
    assert "none are described in" in look(tmp_path, program="podman", devices=True)["problem"]
    assert "install nvidia-container-toolkit" in look(tmp_path, program="docker", devices=True)["problem"]
    assert look(tmp_path, devices=False)["is_there"]
    (tmp_path / "cdi").mkdir()
    (tmp_path / "cdi/nvidia.yaml").write_text("kind: nvidia.com/gpu\n")
    assert look(tmp_path, devices=True)["program"] == "podman"
    words = containers.command({"program": "podman", "image": "x", "binds": [], "devices": True})
    assert "--device=nvidia.com/gpu=all" in words
    words = containers.command({"program": "docker", "image": "x", "binds": [], "devices": True})
    assert "--gpus=all" in words
    words = containers.command({"program": "apptainer", "image": "x", "binds": [], "devices": True})
    assert "--nv" in words


def test_another_container_like_the_one_around(monkeypatch: pytest.MonkeyPatch) -> None:
    assert containers.described() is None
    container = {"program": "docker", "image": "x", "binds": ["/home/ann"], "devices": False}
    words = containers.command(container, stays=False)
    monkeypatch.setenv(*next(word.split("=", 1) for word in words if word.startswith(containers.CONTAINER)))
    assert containers.is_inside()
    assert containers.described() == container
    assert {"--volume=/home/ann:/home/ann", f"--user={os.getuid()}:{os.getgid()}", "--pid=host"} <= set(words)
    assert words[-1] == "x"
    assert json.dumps(container) in "".join(words)


def test_folders_that_a_container_shows(tmp_path: Path) -> None:
    for name in ("home/jobs", "data", "work"):
        (tmp_path / name).mkdir(parents=True)
    job = NodeJob(working_dir=str(tmp_path / "work"), checkpoint_dir=str(tmp_path / "new/saved"))
    own = [tmp_path / "home/jobs", tmp_path / "home"]
    source: Any = {"path": str(tmp_path / "data")}
    assert containers.binds_of("docker", own, job, [source]) == [str(tmp_path)]
    job = replace(job, checkpoint_dir="relative")
    assert containers.binds_of("docker", own, job, [source]) == [str(tmp_path / it) for it in ("data", "home", "work")]
    (tmp_path / "a:b").mkdir()
    with pytest.raises(Refused, match="cannot show a folder with"):
        containers.binds_of("docker", own, replace(job, working_dir=str(tmp_path / "a:b")), [])
