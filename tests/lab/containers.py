"""A lab whose hosts run containers: h1 by podman, h2 by podman of one who is not root, h3 by docker, h4 by apptainer.

The last two are stand-ins (`engine.py`). Nothing of the machine's own containers is used or changed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests import needs

from .lab import Lab

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .lab import Host

USER, UID = "ann", 4711
IMAGE = "lab/python"
_LINKED = ("sh", "env", "setsid", "newuidmap", "newgidmap", "mount", "conmon", "runc", "cat")
_ENGINE = Path(__file__).with_name("engine.py")
# Of a machine that is itself a container, these are the most that it may have.
_LIMITS = '[containers]\ndefault_ulimits = ["nofile=1024:4096", "nproc=20000:20000"]\n'
_PODMAN = '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'


def missing() -> str:
    """What keeps this machine from running containers, or ""."""
    return needs.missing("podman", "runc", "newuidmap")


def make_root(folder: Path) -> Path:
    """The root of an image with a Python, and nothing else."""
    root, python = folder / "root", Path("/usr/bin/python3").resolve()
    for name in ("bin", "usr/bin", "usr/lib", "etc", "proc", "sys", "dev", "tmp", "root"):
        (root / name).mkdir(parents=True)
    shutil.copy("/bin/sh", root / "bin/sh")
    shutil.copy(python, root / "usr/bin/python3")
    left_out = shutil.ignore_patterns("test", "idlelib", "tkinter", "ensurepip", "__pycache__", "lib2to3", "*.a")
    library = root / "usr/lib" / python.name
    shutil.copytree(Path("/usr/lib", python.name), library, ignore=left_out, symlinks=True)
    needed: set[str] = set()
    for file in (python, Path("/bin/sh"), *library.glob("lib-dynload/*.so")):
        said = subprocess.run(["ldd", file], capture_output=True, text=True, check=False).stdout
        needed.update(word for word in said.split() if word.startswith("/"))
    for file in map(Path, needed):
        (root / file.relative_to("/")).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, root / file.relative_to("/"))
    (root / "etc/os-release").write_text("ID=lab-image\n")
    (root / "tmp").chmod(0o1777)
    return root


def _why_no_podman(folder: Path, root: Path) -> str:
    """Why podman runs no container of root on this machine, which may itself be a container; "" if it does."""
    place = [f"--root={folder}/probe/root", f"--runroot={folder}/probe/run", "--storage-driver=vfs"]
    command = ["podman", *place, "run", "--rm", "--network=host", "--pid=host", "--rootfs", root, "python3", "-c", ""]
    env = {**os.environ, "CONTAINERS_CONF": str(folder / "containers.conf")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    return done.stderr.strip() if done.returncode else ""


class Containers:
    """The lab, with an image on each host that is called `lab/python`."""

    def __init__(self) -> None:
        self.lab = Lab(4, "c")
        folder = self.lab.folder
        self.root, self.images = make_root(folder), folder / "images"
        (self.images / "registry").mkdir(parents=True)
        (self.images / "lab_python").symlink_to(self.root)
        for name in ("lab_new", "lab_python"):
            (self.images / "registry" / name).symlink_to(self.root)
        no_python = folder / "no-python"
        (no_python / "bin").mkdir(parents=True)
        (self.images / "lab_none").symlink_to(no_python)
        os.chmod(folder, 0o755)
        (folder / "containers.conf").write_text(_LIMITS + _PODMAN)
        self.why_no_podman = _why_no_podman(folder, self.root)
        engines = ["podman", "podman", "docker", "apptainer"]
        if self.why_no_podman:  # then stand-ins take its place
            print(f"tests/lab: podman runs no container here: {self.why_no_podman}", file=sys.stderr)
            engines[:2] = ["docker", "docker"]
        for host, engine in zip(self.lab.hosts, engines, strict=True):
            self._equip(host, engine)
        self.users = [0, 0, 0, 0]
        if not self.why_no_podman:
            self._give_user(self.lab.hosts[1])
            self.users[1] = UID

    def _equip(self, host: Host, engine: str) -> None:
        """Let a host find one engine alone."""
        programs = self.lab.folder / f"{host.name}.bin"
        programs.mkdir()
        for name in (*_LINKED, *(["podman"] if engine == "podman" else [])):
            if (path := needs.find(name)) is not None:
                (programs / name).symlink_to(path)
        (programs / "python3").symlink_to("/usr/bin/python3")
        if engine != "podman":
            (programs / engine).write_text(f'#!/bin/sh\nexec {sys.executable} {_ENGINE} {engine} "$@"\n')
            (programs / engine).chmod(0o755)
        storage = self.lab.folder / f"{host.name}.storage.conf"
        place = self.lab.folder / f"{host.name}.storage"
        storage.write_text(f'[storage]\ndriver = "vfs"\ngraphroot = "{place}/graph"\nrunroot = "{place}/run"\n')
        host.variables = {
            "PATH": str(programs), "LAB_IMAGES": str(self.images), "USER": "root",
            "CONTAINERS_CONF": str(self.lab.folder / "containers.conf"), "CONTAINERS_STORAGE_CONF": str(storage),
        }  # fmt: skip

    def _give_user(self, host: Host) -> None:
        """Let somebody log in who is not root, and whom this machine does not know."""
        folder = self.lab.folder
        for name, line in (
            ("passwd", f"{USER}:x:{UID}:{UID}::{host.home}:/bin/sh"), ("group", f"{USER}:x:{UID}:"),
            ("subuid", f"{USER}:100000:65536"), ("subgid", f"{USER}:100000:65536"), ("shadow", f"{USER}:*:1::::::"),
        ):  # fmt: skip
            before = Path("/etc", name)
            (folder / name).write_text((before.read_text() if before.exists() else "") + line + "\n")
        (folder / "shadow").chmod(0o600)
        binds = " && ".join(f"mount --bind {folder}/{name} /etc/{name}" for name in ("passwd", "group", "shadow"))
        ids = " && ".join(
            f"touch /etc/{name} && mount --bind {folder}/{name} /etc/{name}" for name in ("subuid", "subgid")
        )
        host.user, host.prepares = USER, f"{binds} && {ids} && chown {UID}:{UID} {host.home}"
        (folder / "x").mkdir()
        os.chown(folder / "x", UID, UID)
        place = folder / f"{host.name}.storage"
        place.mkdir()
        os.chown(place, UID, UID)
        host.variables = {**host.variables, "USER": USER, "XDG_RUNTIME_DIR": str(folder / "x")}

    def start(self) -> None:
        self.lab.start()
        if self.why_no_podman:
            return
        archive = self.lab.folder / "image.tar"
        with tarfile.open(archive, "w") as tar:
            tar.add(self.root, ".")
        for host in self.lab.hosts[:2]:
            done = self.lab.ssh(host, f"podman import -q {archive} {IMAGE}")
            assert done.returncode == 0, done.stderr

    def running(self) -> str:
        """The containers of all hosts; their first and last words are whatever the engines say."""
        of_podman = "docker ps" if self.why_no_podman else "podman ps -aq"
        asked = {"h1": of_podman, "h2": of_podman, "h3": "docker ps"}
        return "".join(self.lab.ssh(host, asked[host.name]).stdout for host in self.lab.hosts if host.name in asked)

    def end_podman(self) -> None:
        """End the process that keeps the namespaces of a user's podman."""
        self.lab.ssh(self.lab.hosts[1], "podman system migrate")

    def stop(self) -> None:
        self.lab.stop()


@contextlib.contextmanager
def containers() -> Iterator[Containers]:
    """A lab of containers."""
    needs.need(missing())
    it = Containers()
    try:
        it.start()
        yield it
    finally:
        it.stop()
