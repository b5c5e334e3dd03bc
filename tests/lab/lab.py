"""Hosts on one machine: network namespaces on a bridge, each with an address, a host name, a home and a real sshd.

A host shares the machine's files and its pid numbers, but what runs on it carries PACELINE_LAB=<host's namespace>.
Nothing of the machine's own ssh is used or changed. Namespaces carry the pid of whoever made them, so that what a
killed one has left is found and removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.conftest import Paceline, eventually

_NAME = re.compile(r"pl([0-9]+)-\w+")  # of namespaces and folders
_NETWORK = "10.77.0"
_SSHD = "/usr/sbin/sshd"


def missing() -> str:
    """What keeps this machine from being a lab, or ""."""
    if os.geteuid() != 0:
        return "the lab needs root"
    for program in ("ip", "nsenter", "unshare", "ssh", "ssh-keygen", _SSHD):
        if shutil.which(program) is None:
            return f"the lab needs {program}"
    probe = f"pl{os.getpid()}-probe"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"the lab needs network namespaces: {done.stderr.strip()}"
    _ip("netns", "del", probe)
    return ""


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True)


def _namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line]


def _remove(namespace: str) -> None:
    """End all that runs in a namespace, and the namespace."""
    listed = subprocess.run(["ip", "netns", "pids", namespace], check=False, capture_output=True, text=True).stdout
    for pid in map(int, listed.split()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _ip("netns", "del", namespace)


def remove_leftovers() -> None:
    """Remove the labs whose makers are gone."""
    for namespace in _namespaces():
        if _is_left_over(namespace):
            _remove(namespace)
    for folder in Path(tempfile.gettempdir()).glob("pl*-*"):
        if _is_left_over(folder.name):
            shutil.rmtree(folder, ignore_errors=True)


def _is_left_over(name: str) -> bool:
    found = _NAME.fullmatch(name)
    return found is not None and not Path("/proc", found[1]).exists()


class Host:
    """A machine of the lab.

    Attributes:
        name: its host name, which ssh knows as well.
        namespace: its network namespace, and the mark of its processes.
        address: in the lab's network.
        home: the home folder of its user.
    """

    def __init__(self, lab: Lab, number: int) -> None:
        self.name = f"h{number}"
        self.namespace = f"{lab.prefix}-{self.name}"
        self.address = f"{_NETWORK}.{10 + number}"
        self.home = lab.folder / self.name
        self._hub, self._link = lab.hub, f"v{number}"
        self._sshd: subprocess.Popen[bytes] | None = None
        self._folder = lab.folder

    def start(self) -> None:
        """Connect it, and start its sshd."""
        self.home.mkdir()
        _ip("netns", "add", self.namespace)
        _ip("-n", self._hub, "link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", self.namespace)
        _ip("-n", self._hub, "link", "set", self._link, "master", "br0", "up")
        _ip("-n", self.namespace, "addr", "add", f"{self.address}/24", "dev", "eth0")
        _ip("-n", self.namespace, "link", "set", "eth0", "up")
        _ip("-n", self.namespace, "link", "set", "lo", "up")
        config = self._folder / f"{self.name}.sshd_config"
        config.write_text(
            f"ListenAddress {self.address}\nHostKey {self._folder}/host_key\n"
            f"AuthorizedKeysFile {self._folder}/key.pub\nStrictModes no\nUsePAM no\nPidFile none\n"
            "PasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin prohibit-password\n"
            f"MaxStartups 100\nSetEnv PACELINE_LAB={self.namespace} HOME={self.home}\n"
        )
        program = f'hostname "$0" && exec {_SSHD} -D -e -f "$1"'
        with open(self._folder / f"{self.name}.log", "ab") as log:
            self._sshd = subprocess.Popen(
                [*self.enter(), "unshare", "--uts", "sh", "-c", program, self.name, str(config)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={"PATH": os.environ["PATH"]},
            )  # fmt: skip

    def enter(self) -> list[str]:
        """What runs a command in its network."""
        return ["nsenter", f"--net=/run/netns/{self.namespace}"]

    def cut(self) -> None:
        """Take it off the network."""
        _ip("-n", self._hub, "link", "set", self._link, "down")

    def heal(self) -> None:
        """Undo `cut`."""
        _ip("-n", self._hub, "link", "set", self._link, "up")

    def processes(self) -> list[int]:
        """Everything that lives and was started on it, however indirectly, by a user."""
        marker = f"PACELINE_LAB={self.namespace}\0".encode()
        found = []
        for path in Path("/proc").iterdir():
            if path.name.isdigit():
                with contextlib.suppress(OSError):
                    if marker in (path / "environ").read_bytes() + b"\0":
                        found.append(int(path.name))
        return found

    def stop(self) -> None:
        """End all that runs on it, and remove it."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.namespace in _namespaces():
            _remove(self.namespace)
        if self._sshd is not None:
            self._sshd.wait()


class Lab:
    """Some hosts, and a place in their network for clients."""

    def __init__(self, count: int) -> None:
        self.prefix = f"pl{os.getpid()}"
        self.hub = f"{self.prefix}-hub"
        self.folder = Path(tempfile.mkdtemp(prefix=f"{self.prefix}-"))
        self.hosts = [Host(self, number) for number in range(1, count + 1)]

    def start(self) -> None:
        """Make it, and wait until one can log in everywhere."""
        remove_leftovers()
        _ip("netns", "add", self.hub)
        _ip("-n", self.hub, "link", "add", "br0", "type", "bridge")
        _ip("-n", self.hub, "addr", "add", f"{_NETWORK}.1/24", "dev", "br0")
        _ip("-n", self.hub, "link", "set", "br0", "up")
        for key in ("key", "host_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / key], check=True)
        key = " ".join((self.folder / "host_key.pub").read_text().split()[:2])
        known = "".join(f"{name} {key}\n" for host in self.hosts for name in (host.name, host.address))
        (self.folder / "known_hosts").write_text(known)
        named = "".join(f"Host {host.name}\n  HostName {host.address}\n" for host in self.hosts)
        (self.folder / "ssh_config").write_text(
            f"{named}Host *\n  User root\n  IdentityFile {self.folder}/key\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {self.folder}/known_hosts\n  StrictHostKeyChecking yes\n"
        )
        programs = self.folder / "bin"
        programs.mkdir()
        ssh = programs / "ssh"
        ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.folder}/ssh_config "$@"\n')
        ssh.chmod(0o755)
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd insists on it
        for host in self.hosts:
            host.start()
        for host in self.hosts:
            eventually(lambda host=host: self.ssh(host, "true").returncode == 0, f"{host.name} lets us in")

    def ssh(self, host: Host, command: str) -> subprocess.CompletedProcess[str]:
        """Run a command on a host, as a user would."""
        return subprocess.run(
            [*self.enter(), self.folder / "bin" / "ssh", "-o", "BatchMode=yes", host.name, command],
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    def enter(self) -> list[str]:
        """What runs a command in the network, but on no host."""
        return ["nsenter", f"--net=/run/netns/{self.hub}"]

    def stop(self) -> None:
        """Remove everything."""
        for host in self.hosts:
            host.stop()
        if self.hub in _namespaces():
            _remove(self.hub)
        shutil.rmtree(self.folder, ignore_errors=True)


class Client(Paceline):
    """`paceline` in the lab's network, with the lab as its target `lab`; every client has a folder of its own there."""

    def __init__(self, folder: Path, lab: Lab) -> None:
        super().__init__(folder)
        self.lab = lab
        self.root = f"state/{folder.name}"
        self.env.update(XDG_RUNTIME_DIR=str(lab.folder), PATH=f"{lab.folder}/bin:{self.env['PATH']}")
        self.settings()

    def settings(self, **changes: object) -> None:
        """Write the settings of the target; values are as in TOML."""
        options = {"hosts": [host.name for host in self.lab.hosts], "root": f"~/{self.root}", **changes}
        lines = "".join(f"{name} = {value!r}\n" for name, value in options.items())
        (self.folder / "paceline.toml").write_text(f'[targets.lab]\nbackend = "ssh"\n{lines}')

    def start(self, *args: str, python: tuple[str, ...] = (sys.executable,), **kwargs: object) -> subprocess.Popen[str]:
        """Start a command line and go on."""
        return super().start(*args, python=(*self.lab.enter(), *python), **kwargs)

    def run_directory(self, host: Host, name: str) -> Path:
        """Where a host has a job."""
        return host.home / self.root / "jobs" / name

    def hang_up(self) -> None:
        """End the connections that are kept for the next command."""
        for pid in self._connections():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        eventually(lambda: not self._connections(), "no connection is kept")

    def _connections(self) -> list[int]:
        found = []
        for pid in self.processes():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ssh: "):
                    found.append(pid)
        return found
