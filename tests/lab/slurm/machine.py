"""A machine of a cluster."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from tests.lab import lab

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from .cluster import Cluster

NETWORK = "10.78.0"


class Machine:
    """A network namespace with a host name.

    Attributes:
        name: its host name.
        address: in the cluster's network.
    """

    def __init__(self, cluster: Cluster, name: str, number: int) -> None:
        self.name, self.address = name, f"{NETWORK}.{number}"
        self.namespace = f"{cluster.prefix}-{name}"
        self._number, self._cluster = number, cluster
        self._is_cut = False

    def start(self) -> None:
        mac = f"02:00:00:00:02:{self._number:02x}"
        lab.add_namespace(self.namespace, self._cluster.hub, f"v{self._number}", mac, f"{self.address}/24")

    def command(self, argv: Sequence[str]) -> list[str]:
        """What runs a command on it; the process is the command's from then on."""
        # A mount namespace for /etc/hosts; not `ip netns exec`, whose /sys has no cgroups, and slurmd wants them.
        unshare = ["unshare", "--uts", "--mount", "--propagation", "slave"]
        program = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'
        shell = ["sh", "-c", program, self.name, str(self._cluster.folder / "hosts")]
        return ["nsenter", f"--net=/run/netns/{self.namespace}", *unshare, *shell, *argv]

    def processes(self) -> list[int]:
        return lab.inside(self.namespace)

    def cut(self) -> None:
        """Take it off the network."""
        lab.set_link(self._cluster.hub, f"v{self._number}", up=False)
        self._is_cut = True

    def heal(self) -> None:
        """Undo `cut`."""
        if self._is_cut:
            lab.set_link(self._cluster.hub, f"v{self._number}", up=True)
            self._cluster.forget_neighbours()
            self._is_cut = False


class Login(Machine):
    """Where users are. Its host name and /etc/hosts are in namespaces that all commands there share."""

    def start(self) -> None:
        super().start()
        names = self._cluster.folder / "namespaces"
        names.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "none", names], check=True)
        subprocess.run(["mount", "--make-private", names], check=True)  # the kernel wants that
        self._uts, self._mount = names / "uts", names / "mount"
        for path in (self._uts, self._mount):
            path.touch()
        unshare = ["unshare", f"--uts={self._uts}", f"--mount={self._mount}", "--propagation", "slave"]
        program = 'hostname "$0" && mount --bind "$1" /etc/hosts'
        subprocess.run([*unshare, "sh", "-c", program, self.name, self._cluster.folder / "hosts"], check=True)

    def command(self, argv: Sequence[str], folder: Path | None = None) -> list[str]:
        """What runs a command in a folder there, else in that of the cluster; the process is the command's then."""
        spaces = [f"--net=/run/netns/{self.namespace}", f"--uts={self._uts}", f"--mount={self._mount}"]
        return ["nsenter", *spaces, f"--wdns={folder or self._cluster.folder}", *argv]
