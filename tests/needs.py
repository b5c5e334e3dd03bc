"""What tests need of the machine: where that is missing they are skipped, and in CI, which installs it, they fail."""

from __future__ import annotations

import importlib.util
import os
import shutil
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

PACKAGES = {  # of Debian, by the programs that tests start; .ci/run installs them
    "chromium": "chromium",
    "git": "git",
    "groff": "groff-base",
    "ip": "iproute2",
    "iptables": "iptables",
    "mariadbd": "mariadb-server-core",
    "mount": "mount",
    "mpirun": "openmpi-bin",
    "munged": "munge",
    "nsenter": "util-linux",
    "newuidmap": "uidmap",
    "podman": "podman",
    "rsync": "rsync",
    "runc": "runc",
    "sacct": "slurm-client",
    "sacctmgr": "slurm-client",
    "salloc": "slurm-client",
    "sbatch": "slurm-client",
    "scancel": "slurm-client",
    "scontrol": "slurm-client",
    "setsid": "util-linux",
    "sinfo": "slurm-client",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "slurmdbd": "slurmdbd",
    "squeue": "slurm-client",
    "srun": "slurm-client",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
    "tc": "iproute2",
    "unshare": "util-linux",
}


def find(program: str) -> str | None:
    """The path of a program; None if it is missing. Those of the administrator are found too."""
    return shutil.which(program, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


def missing(*programs: str, find: Callable[[str], str | None] = find) -> str:
    """What to install, for the first of these programs that is missing, or ""."""
    for program in programs:
        if find(program) is None:
            return f"needs {program} (Debian package {PACKAGES[program]})"
    return ""


def need(why: str) -> None:
    """Skip a test that this machine cannot do, for this reason, unless it is empty; in CI the test fails."""
    if why and os.environ.get("CI") == "true":
        pytest.fail(why, pytrace=False)
    if why:
        pytest.skip(why)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """`@pytest.mark.needs("rsync", "ssh")`: the test starts these programs; `@pytest.mark.torch`: it needs torch."""
    if item.get_closest_marker("torch") and importlib.util.find_spec("torch") is None:
        need("needs torch (pip install torch)")
    for mark in item.iter_markers("needs"):
        need(missing(*mark.args))
