"""Hosts on one machine: network namespaces on a bridge, each with an address, a host name, a home and a real sshd.

A host shares the machine's files and its pid numbers, but what runs on it carries PACELINE_LAB=<host's namespace>, and
its home is a disk of its own. Nothing of the machine's own ssh is used or changed. Namespaces and folders carry the pid
of whoever made them, so that what a killed one has left is found and removed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests import needs
from tests.conftest import Paceline, all_end, eventually, processes_with

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_NAME = re.compile(r"pl([0-9]+)\w*-\w+")  # of namespaces and folders
# Not in the temporary folder of the tests: a longer path is no XDG_RUNTIME_DIR for paceline, whose sockets have short
# names, and labs at the same time would share their connections.
FOLDERS = Path("/tmp")
_NETWORK, _NETWORK6 = "10.77.0", "fd77:"
_FEW = 16  # hosts that may look for each other by themselves
_SSHD = "/usr/sbin/sshd"
_DISK = "2g"  # a host's home, in memory; it takes what is written
_NOBODY = "02:00:00:00:00:00"  # where packets to a host beyond a cut go


def missing() -> str:
    """What keeps this machine from being a lab, or ""."""
    if os.geteuid() != 0:
        return "the lab needs root"
    if why := needs.missing("ip", "tc", "mount", "nsenter", "unshare", "ssh", "ssh-keygen", "sshd"):
        return f"the lab {why}"
    probe = f"pl{os.getpid()}-probe"
    try:
        _ip("netns", "add", probe)
        try:
            _ip("-n", probe, "link", "add", "br0", "type", "bridge")
        finally:
            _ip("netns", "del", probe)
    except subprocess.CalledProcessError as error:
        return f"the lab needs network namespaces: {error.stderr.strip()}"
    return ""


def _ip(*args: str) -> None:
    _do("ip", *args)


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _namespaces() -> list[str]:
    folder = Path("/run/netns")
    return [path.name for path in folder.iterdir()] if folder.exists() else []


def inside(namespace: str) -> list[int]:
    """All processes in a namespace; zombies are in none."""
    try:
        wanted = os.stat(f"/run/netns/{namespace}").st_ino
    except FileNotFoundError:
        return []
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{entry}/ns/net").st_ino == wanted:
                found.append(int(entry))
    return found


def kill(pids: Iterable[int], number: int = signal.SIGKILL) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def add_hub(namespace: str, *addresses: str) -> None:
    """Make a namespace with the bridge that connects others."""
    _ip("netns", "add", namespace)
    _ip("-n", namespace, "link", "add", "br0", "type", "bridge")
    _add_addresses(namespace, "br0", addresses)


def add_namespace(namespace: str, hub: str, link: str, mac: str, *addresses: str) -> None:
    """Make a namespace that is connected to a hub; `link` is the hub's end."""
    _ip("netns", "add", namespace)
    _ip("-n", hub, "link", "add", link, "type", "veth", "peer", "name", "eth0", "address", mac, "netns", namespace)
    _ip("-n", hub, "link", "set", link, "master", "br0", "up")
    _add_addresses(namespace, "eth0", addresses)


def _add_addresses(namespace: str, device: str, addresses: Iterable[str]) -> None:
    for address in addresses:
        _ip("-n", namespace, "addr", "add", address, "dev", device, *(["nodad"] if ":" in address else []))
    _ip("-n", namespace, "link", "set", device, "up")
    _ip("-n", namespace, "link", "set", "lo", "up")


def set_link(hub: str, link: str, up: bool) -> None:
    """Connect or disconnect what is at a hub's link."""
    _ip("-n", hub, "link", "set", link, "up" if up else "down")


def forget_neighbours(hub: str, namespaces: Iterable[str]) -> None:
    """After a cut: let all ask anew who has an address. A question that was asked before may end as unanswered."""
    for namespace, device in ((hub, "br0"), *((each, "eth0") for each in namespaces)):
        _ip("-n", namespace, "neigh", "flush", "dev", device)


def remove_namespace(namespace: str) -> None:
    """End all that runs in a namespace, and the namespace."""
    while pids := inside(namespace):
        kill(pids)
    with contextlib.suppress(subprocess.CalledProcessError):  # it is gone
        _ip("netns", "del", namespace)


def remove_folder(folder: Path) -> None:
    """Remove a lab's folder, with the disks in it."""
    mounted = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for path in mounted:
        if path.startswith(f"{folder}/"):
            subprocess.run(["umount", "--lazy", path], check=False, capture_output=True)
    shutil.rmtree(folder, ignore_errors=True)


def remove_leftovers() -> None:
    """Remove the labs whose makers are gone."""
    for namespace in _namespaces():
        if _is_left_over(namespace):
            remove_namespace(namespace)
    for folder in FOLDERS.glob("pl*-*"):
        if _is_left_over(folder.name):
            remove_folder(folder)


def _is_left_over(name: str) -> bool:
    found = _NAME.fullmatch(name)
    return found is not None and not Path("/proc", found[1]).exists()


class Host:
    """A machine of the lab.

    Attributes:
        name: its host name, which ssh knows as well.
        namespace: its network namespace, and the mark of its processes.
        address: in the lab's network.
        address6: the same of IPv6.
        home: the home folder of its user.
        mac: of its network card.
        user: who logs in there.
        variables: of its users, besides those of the lab.
        prepares: a command of the shell before its sshd starts, with mounts of its own.
    """

    def __init__(self, lab: Lab, number: int) -> None:
        self.name = f"h{number}"
        self.namespace = f"{lab.prefix}-{self.name}"
        self.address = f"{_NETWORK}.{10 + number}"
        self.address6 = f"{_NETWORK6}:{10 + number}"
        self.home = lab.folder / self.name
        self.user, self.prepares = "root", "true"
        self.variables: dict[str, str] = {}
        self._hub, self._link, self.mac = lab.hub, f"v{number}", f"02:00:00:00:01:{number:02x}"
        self._lab = lab
        self._is_cut = False
        self._lacks_ipv4 = False
        self._has_no_route = False
        self._sshd: subprocess.Popen[bytes] | None = None
        self._folder = lab.folder

    def start(self) -> None:
        """Make it, and switch it on."""
        self.home.mkdir()
        self._mount()
        self._config = self._folder / f"{self.name}.sshd_config"
        self._config.write_text(
            f"ListenAddress {self.address}\nListenAddress [{self.address6}]\nHostKey {self._folder}/host_key\n"
            f"AuthorizedKeysFile {self._folder}/key.pub\nStrictModes no\nUsePAM no\nPidFile none\n"
            "PasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin prohibit-password\n"
            f"MaxStartups 100\nSetEnv PACELINE_LAB={self.namespace} HOME={self.home}"
            f" PACELINE_WARM_DIR={self.home}/warm{''.join(f' {name}={it}' for name, it in self.variables.items())}\n"
        )
        self._switch_on()

    def enter(self) -> list[str]:
        """What runs a command in its network."""
        return ["nsenter", f"--net=/run/netns/{self.namespace}"]

    @property
    def sshd(self) -> int | None:
        """The pid of its sshd while it is on."""
        return None if self._sshd is None else self._sshd.pid

    # -- power ---------------------------------------------------------------------------------------------------------

    def power_on(self) -> None:
        """Connect it to the network, and start its sshd; comes back when one can log in."""
        self._switch_on()
        self._lab.forget_neighbours()

    def _switch_on(self) -> None:
        addresses = (f"{self.address}/24", f"{self.address6}/64")
        add_namespace(self.namespace, self._hub, self._link, self.mac, *addresses)
        apart = ["--mount"] if self.prepares != "true" else []
        program = f'hostname "$0" && {self.prepares} && exec {_SSHD} -D -e -f "$1"'
        path = self._folder / f"{self.name}.log"
        with open(path, "wb") as log:
            self._sshd = subprocess.Popen(
                [*self.enter(), "unshare", "--uts", *apart, "sh", "-c", program, self.name, f"{self.home}.sshd_config"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={"PATH": os.environ["PATH"]},
            )  # fmt: skip
        eventually(lambda: path.read_text().count("Server listening") == 2, f"{self.name} lets us in")

    def power_off(self) -> None:
        """Disconnect it from the network, then end all its processes, so that no peer detects it. Its disk remains."""
        if self._sshd is not None:
            _ip("-n", self._hub, "link", "del", self._link)
            remove_namespace(self.namespace)
            self._sshd.wait()
            self._sshd = None

    def hang(self, logins: bool = True) -> None:
        """Stop all that runs on it, without an end; its sshd still lets new users in, unless `logins` is false."""
        spared = self.sshd if logins else None
        told: set[int] = set()

        def is_still() -> bool:
            going = {pid for pid in inside(self.namespace) if pid != spared and _state(pid) not in ("T", "Z", "")}
            # "D": it waits in the kernel, and stops before it comes back; the parent of a child that was stopped
            # between vfork and exec, as those of subprocess are, stays there.
            new = {pid for pid in going if pid not in told or _state(pid) != "D"}
            kill(new, signal.SIGSTOP)
            told.update(new)
            return not new

        eventually(is_still, f"{self.name} hangs")

    def wake(self) -> None:
        """Undo `hang`."""
        kill(inside(self.namespace), signal.SIGCONT)

    def hang_logins(self) -> None:
        """Let users in, whose shells then never start, as where homes are on a dead server; what runs goes on."""
        self._configure("ForceCommand exec cat > /dev/null")  # it ends with the connection

    def delay_logins(self, seconds: float) -> None:
        """Let shells of users start only after so long, as where a machine has just booted; what runs goes on."""
        self._configure(f'ForceCommand sleep {seconds}; exec sh -c "$SSH_ORIGINAL_COMMAND"')

    def refuse_logins(self) -> None:
        """Let nobody in any more, and end the sessions that there are; what runs goes on."""
        self._configure("AllowUsers nobody")
        self.end_sessions()

    def end_sessions(self) -> None:
        """Kill the processes of its sshd that serve users who are logged in."""
        kill(map(int, Path(f"/proc/{self.sshd}/task/{self.sshd}/children").read_text().split()))

    def heal_logins(self) -> None:
        """Undo `hang_logins`, `delay_logins` and `refuse_logins`."""
        self._configure("")

    def _configure(self, last: str) -> None:
        """Give its sshd another last line; connections that are open keep what they had."""
        lines = self._config.read_text().splitlines()
        kept = [line for line in lines if not line.startswith(("ForceCommand", "AllowUsers"))]
        if [*kept, *filter(None, [last])] == lines or self._sshd is None:
            return
        self._config.write_text("".join(f"{line}\n" for line in (*kept, last)))
        log = self._folder / f"{self.name}.log"
        count = log.read_text().count("Server listening")
        os.kill(self._sshd.pid, signal.SIGHUP)
        eventually(lambda: log.read_text().count("Server listening") == count + 2, f"{self.name} has read its settings")

    # -- network and disk ----------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Take it off the network."""
        set_link(self._hub, self._link, up=False)
        self._is_cut = True

    def heal(self) -> None:
        """Undo `cut`."""
        if self._is_cut:
            set_link(self._hub, self._link, up=True)
            self._lab.forget_neighbours()
            self._is_cut = False

    def lose_route(self) -> None:
        """Keep the client from reaching it, which learns so at once, while one who is `cut` waits; others reach it."""
        _ip("-n", self._hub, "route", "add", "unreachable", self.address)
        self._has_no_route = True

    def find_route(self) -> None:
        """Undo `lose_route`."""
        if self._has_no_route:
            _ip("-n", self._hub, "route", "del", "unreachable", self.address)
            self._has_no_route = False

    def use_ipv6_alone(self) -> None:
        """Take its IPv4 address away."""
        _ip("-n", self.namespace, "addr", "del", f"{self.address}/24", "dev", "eth0")
        self._lacks_ipv4 = True

    def use_ipv4_too(self) -> None:
        """Undo `use_ipv6_alone`."""
        if self._lacks_ipv4:
            _ip("-n", self.namespace, "addr", "add", f"{self.address}/24", "dev", "eth0")
            self._lacks_ipv4 = False

    def limit(self, mbit: float) -> None:
        """Let no more megabits a second through, either way."""
        burst = max(64_000, int(mbit * 1e6 / 8 / 100))  # bytes: what comes in 10 ms
        shape = ["root", "tbf", "rate", f"{mbit}mbit", "burst", str(burst), "latency", "100ms"]
        _do("tc", "-n", self._hub, "qdisc", "replace", "dev", self._link, *shape)
        _do("tc", "-n", self.namespace, "qdisc", "replace", "dev", "eth0", *shape)

    def unlimit(self) -> None:
        """Undo `limit`."""
        for namespace, device in ((self._hub, self._link), (self.namespace, "eth0")):
            _do("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "noqueue")

    def fill(self) -> None:
        """Leave no room on its disk, which is its home."""

        def fits() -> bool:
            space = os.statvfs(self.home)
            used = max(1, space.f_blocks - space.f_bfree) * space.f_frsize
            return self._resize(str(used)) == 0  # not if more was written meanwhile

        eventually(fits, f"{self.name} is full")

    def make_room(self) -> None:
        """Undo `fill`."""
        self._resize(_DISK)

    def lose_disk(self) -> None:
        """Switch it off, and replace its disk by an empty one."""
        self.power_off()
        _do("umount", "--lazy", str(self.home))
        self._mount()

    def _mount(self) -> None:
        _do("mount", "-t", "tmpfs", "-o", f"size={_DISK},mode=755", self.namespace, str(self.home))

    def _resize(self, size: str) -> int:
        command = ["mount", "-o", f"remount,size={size}", str(self.home)]
        return subprocess.run(command, check=False, capture_output=True).returncode

    # -- all of it -----------------------------------------------------------------------------------------------------

    def repair(self) -> None:
        """Undo all that was done to it."""
        if self._sshd is None:
            self.power_on()
        self.wake()
        self.heal_logins()
        self.heal()
        self.find_route()
        self.use_ipv4_too()
        self.unlimit()
        self.make_room()

    def processes(self) -> list[int]:
        """Everything that lives and was started on it, however indirectly, by a user."""
        return processes_with(f"PACELINE_LAB={self.namespace}")

    def stop(self) -> None:
        """End all that runs on it, and remove it."""
        self.power_off()
        remove_namespace(self.namespace)
        kill(self.processes())


def _state(pid: int) -> str:
    """A process's state, "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return ""


class Lab:
    """Some hosts, and a place in their network for clients."""

    def __init__(self, count: int, tag: str = "") -> None:
        """Nothing is made yet; `tag` tells it from another one of this process: a letter and more of these."""
        self.prefix = f"pl{os.getpid()}{tag}"
        self.hub = f"{self.prefix}-hub"
        self.folder = Path(tempfile.mkdtemp(prefix=f"{self.prefix}-", dir=FOLDERS))
        self.hosts = [Host(self, number) for number in range(1, count + 1)]

    def start(self) -> None:
        """Make it; comes back when one can log in everywhere."""
        remove_leftovers()
        add_hub(self.hub, f"{_NETWORK}.1/24", f"{_NETWORK6}:1/64")
        for key in ("key", "host_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / key], check=True)
        key = " ".join((self.folder / "host_key.pub").read_text().split()[:2])
        known = "".join(f"{name} {key}\n" for host in self.hosts for name in (host.name, host.address, host.address6))
        (self.folder / "known_hosts").write_text(known)
        named = "".join(f"Host {host.name}\n  HostName {host.address}\n  User {host.user}\n" for host in self.hosts)
        (self.folder / "ssh_config").write_text(
            f"{named}Host *\n  IdentityFile {self.folder}/key\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {self.folder}/known_hosts\n  StrictHostKeyChecking yes\n"
        )
        programs = self.folder / "bin"
        programs.mkdir()
        ssh = programs / "ssh"
        ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.folder}/ssh_config "$@"\n')
        ssh.chmod(0o755)
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd insists on it
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(Host.start, self.hosts))
            if len(self.hosts) > _FEW:
                list(pool.map(self._introduce, self.hosts))

    def _introduce(self, host: Host) -> None:
        """Let a host know the others: all of them asking each other overflow the kernel's one table of neighbours."""
        known = "".join(
            f"neigh replace {other.address} lladdr {other.mac} dev eth0 nud permanent\n"
            for other in self.hosts
            if other is not host
        )
        command = ["ip", "-n", host.namespace, "-batch", "-"]
        subprocess.run(command, input=known, text=True, check=True, capture_output=True)

    def part(self, *groups: Sequence[Host]) -> None:
        """Lose every packet between hosts of different groups; the client reaches all of them."""
        for here, there in itertools.permutations(groups, 2):
            for host, other in itertools.product(here, there):
                entry = [other.address, "lladdr", _NOBODY, "dev", "eth0", "nud", "permanent"]
                _ip("-n", host.namespace, "neigh", "replace", *entry)

    def silence(self, host: Host) -> None:
        """Lose every packet from a host to the others; those from them to it, and to and from the client, arrive."""
        for other in self.hosts:
            if other is not host:
                entry = [other.address, "lladdr", _NOBODY, "dev", "eth0", "nud", "permanent"]
                _ip("-n", host.namespace, "neigh", "replace", *entry)

    def part_from_client(self, host: Host) -> None:
        """Lose every packet between a host and the client; the other hosts reach both."""
        for namespace, device, address in (
            (self.hub, "br0", host.address),
            (host.namespace, "eth0", f"{_NETWORK}.1"),
        ):
            entry = [address, "lladdr", _NOBODY, "dev", device, "nud", "permanent"]
            _ip("-n", namespace, "neigh", "replace", *entry)

    def join(self) -> None:
        """Undo `part`, `silence` and `part_from_client`."""
        _ip("-n", self.hub, "neigh", "flush", "dev", "br0", "nud", "permanent")
        for host in self.hosts:
            _ip("-n", host.namespace, "neigh", "flush", "dev", "eth0", "nud", "permanent")

    def forget_neighbours(self) -> None:
        """Let the client and the hosts that are on find each other anew."""
        forget_neighbours(self.hub, [host.namespace for host in self.hosts if host.sshd is not None])

    def repair(self) -> None:
        """Undo all that was done to it and to its hosts."""
        for host in self.hosts:
            host.repair()
        self.join()

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
        remove_namespace(self.hub)
        remove_folder(self.folder)


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
        self.write_settings({"lab": {"hosts": [host.name for host in self.lab.hosts], **changes}})

    def write_settings(self, targets: dict[str, dict[str, object]], **tables: dict[str, object]) -> None:
        """Write the settings of several targets, and other tables."""
        both = {"backend": "ssh", "root": f"~/{self.root}"}
        of_targets = {f"targets.{name}": {**both, **options} for name, options in targets.items()}
        (self.folder / "paceline.toml").write_text(
            "".join(
                f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
                for name, table in {**tables, **of_targets}.items()
            )
        )

    def start(self, *args: str, python: tuple[str, ...] = (sys.executable,), **kwargs: object) -> subprocess.Popen[str]:
        """Start a command line and go on."""
        return super().start(*args, python=(*self.lab.enter(), *python), **kwargs)

    def run_directory(self, host: Host, name: str) -> Path:
        """Where a host has a job."""
        return host.home / self.root / "hosts" / host.name / "jobs" / name

    def status(self, host: Host, name: str = "it") -> dict[str, Any]:
        """What the agent on a host last said of its part of a job, which costs no command; {} before it did."""
        try:
            found: dict[str, Any] = json.loads((self.run_directory(host, name) / "status.json").read_text())
        except FileNotFoundError:
            return {}
        return found

    def are(self, state: str, *numbers: int, name: str = "it") -> None:
        """Wait until the parts of a job on these hosts, counted from one, are in a state."""
        hosts = [self.lab.hosts[number - 1] for number in numbers]
        states = lambda: [self.status(host, name).get("state") for host in hosts]  # noqa: E731
        eventually(lambda: states() == [state] * len(hosts), lambda: f"{name} is {state}; it is {states()}")

    def logs(self, name: str = "it") -> str:
        """What all ranks of a job have written on all hosts and here, without a command."""
        homes = [self.home, *(host.home / self.root / "hosts" / host.name for host in self.lab.hosts)]
        found = [path for home in homes for path in sorted(home.glob(f"jobs/{name}/logs/*/rank-*.log"))]
        return "".join(path.read_text() for path in found)

    def nothing_runs(self, *numbers: int) -> None:
        """Wait until nothing of a user's runs on these hosts, counted from one, or on any."""
        hosts = [self.lab.hosts[number - 1] for number in numbers] or self.lab.hosts
        eventually(lambda: not any(host.processes() for host in hosts), "nothing runs there any more")

    def hang_up(self) -> None:
        """End the connections that are kept for the next command."""
        kill(self._connections(), signal.SIGTERM)
        eventually(lambda: not self._connections(), "no connection is kept")

    def _connections(self) -> list[int]:
        found = []
        for pid in inside(self.lab.hub):  # ssh writes its title over its environment
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes()
                if line.startswith(b"ssh: ") or b"/remote/login.py" in line:
                    found.append(pid)
        return found


@contextlib.contextmanager
def client_of(lab: Lab, folder: Path) -> Iterator[Client]:
    """A client; in the end nothing that it started may be left, here or on any host."""
    it = Client(folder, lab)
    yield it
    lab.repair()
    it.hang_up()

    def left() -> list[int]:
        return [*it.processes(), *(pid for host in lab.hosts for pid in host.processes())]

    all_end(left, "the client, here and on the hosts", folder)
