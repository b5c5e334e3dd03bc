"""What a cluster takes of this machine: programs, processes, network namespaces and a folder.

Namespaces and folders carry the pid of whoever made them, so that what a killed one has left is found and removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

MARK = "FAKE_KUBERNETES"  # a variable of everything that a cluster starts; its value is the cluster's prefix
_NAME = re.compile(r"fk([0-9]+)k[0-9]+-\w+")  # of namespaces and folders
_PACKAGES = {
    "ip": "iproute2",
    "mount": "mount",
    "nsenter": "util-linux",
    "setsid": "util-linux",
    "unshare": "util-linux",
}
_PROBE = (
    "mount -t tmpfs x /mnt && mkdir /mnt/u /mnt/w /mnt/r && "
    "mount -t overlay x -o lowerdir=/,upperdir=/mnt/u,workdir=/mnt/w /mnt/r && ip link set lo up"
)


def missing() -> str:
    """What keeps this machine from having a cluster, or ""."""
    if os.geteuid() != 0:
        return "the cluster needs root"
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
    for program, package in _PACKAGES.items():
        if shutil.which(program, path=path) is None:
            return f"the cluster needs {program} (Debian package {package})"
    probe = ["unshare", "--mount", "--net", "sh", "-c", _PROBE]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    return f"the cluster needs overlays and namespaces: {done.stderr.strip()}" if done.returncode else ""


def prefix(number: int) -> str:
    """How the names of all that belongs to a cluster of this process begin."""
    return f"fk{os.getpid()}k{number}"


def processes_of(prefix: str) -> list[int]:
    """Everything that lives and was started by the cluster of this prefix."""
    marker = f"{MARK}={prefix}\0".encode()
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if marker in Path("/proc", pid, "environ").read_bytes() + b"\0":
                found.append(int(pid))
    return found


def remove(prefix: str, folder: Path) -> None:
    """Remove all that is left of a cluster: networks, with what runs in them, and its folder, with what is mounted there."""
    for path in Path("/run/netns").glob(f"{prefix}-*"):
        _remove_namespace(path)
    _remove_folder(folder)


def remove_leftovers() -> None:
    """Remove the clusters whose makers are gone."""
    for path in Path("/run/netns").glob("fk*-*"):
        if _is_left_over(path.name):
            _remove_namespace(path)
    for path in Path(tempfile.gettempdir()).glob("fk*-*"):
        if _is_left_over(path.name):
            _remove_folder(path)


def _is_left_over(name: str) -> bool:
    found = _NAME.fullmatch(name)
    return found is not None and not Path("/proc", found[1]).exists()


def _remove_namespace(path: Path) -> None:
    while pids := _inside(path):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    subprocess.run(["ip", "netns", "del", path.name], check=False, capture_output=True)


def _inside(namespace: Path) -> list[int]:
    """All processes in a namespace; zombies are in none."""
    try:
        wanted = namespace.stat().st_ino
    except FileNotFoundError:
        return []
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}/ns/net").st_ino == wanted:
                found.append(int(pid))
    return found


def _remove_folder(folder: Path) -> None:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        path = line.split()[4]
        if path.startswith(f"{folder}/"):
            subprocess.run(["umount", "--lazy", path], check=False, capture_output=True)
    shutil.rmtree(folder, ignore_errors=True)
