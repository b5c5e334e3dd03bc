"""A machine's network as a job sees it: interfaces, the host name, and the address that gloo would choose."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import re
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

from paceline.contract.memory import read
from paceline.contract.placement import MAIN_PORT
from paceline.node.readers import Begun

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

NET = Path("/sys/class/net")
IF_INET6 = Path("/proc/net/if_inet6")
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915
_UP, _LOOPBACK = 0x1, 0x8  # linux/if.h


@dataclass(frozen=True)
class Interface:
    """A network interface; `speed` is in Mbit/s, and None is what is not known."""

    name: str
    up: bool | None
    loopback: bool
    ipv4: str | None = None
    ipv6: tuple[str, ...] = ()
    speed: int | None = None


@dataclass(frozen=True)
class HostName:
    """This machine's name."""

    name: str  # the kernel's name for it
    addresses: tuple[str, ...] = ()  # what it resolves to, in the resolver's order
    usable: str | None = None  # the first of them that is an address of this machine
    problem: str | None = None  # why it does not resolve


@dataclass(frozen=True)
class Choice:
    """The interface and address that gloo takes, and why; both None when it cannot start."""

    interface: str | None
    address: str | None
    why: str


@dataclass(frozen=True)
class PortRange:
    """The TCP ports from which the kernel takes the free ones that gloo, NCCL and paceline ask for."""

    first: int
    last: int


def port_range() -> PortRange | None:
    """The range in this network namespace; None if it is not known.

    Source: https://docs.kernel.org/networking/ip-sysctl.html (ip_local_port_range)
    """
    found = re.fullmatch(r"(\d{1,5})\s+(\d{1,5})", read(PORT_RANGE))
    return None if found is None else PortRange(int(found[1]), int(found[2]))


def interfaces(
    names: Iterable[str] | None = None,
    ipv4: Callable[[str], str | None] | None = None,
    net: Path = NET,
    if_inet6: Path = IF_INET6,
) -> tuple[Interface, ...]:
    """The interfaces of this network namespace."""
    if names is None:
        names = [name for _, name in socket.if_nameindex()]
    ipv6 = parse_if_inet6(read(if_inet6))
    found = []
    for name in names:
        flags, speed = read(net / name / "flags"), read(net / name / "speed")
        number = int(flags, 16) if re.fullmatch(r"0x[0-9a-fA-F]{1,8}", flags) else None
        found.append(
            Interface(
                name=name,
                up=None if number is None else bool(number & _UP),
                loopback=name == "lo" if number is None else bool(number & _LOOPBACK),
                ipv4=(ipv4 or _ipv4_of)(name),
                ipv6=tuple(ipv6.get(name, ())),
                speed=int(speed) if re.fullmatch(r"[1-9][0-9]{0,9}", speed) else None,  # -1 is unknown
            )
        )
    return tuple(found)


def _ipv4_of(name: str) -> str | None:
    request = struct.pack("256s", name.encode()[:15])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            answer = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, request)
    except OSError:
        return None  # it has no address
    return socket.inet_ntoa(answer[20:24])


def parse_if_inet6(text: str) -> dict[str, list[str]]:
    """The IPv6 addresses in /proc/net/if_inet6 by interface; lines of another form are left out."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        fields = line.split()
        if len(fields) == 6 and re.fullmatch(r"[0-9a-fA-F]{32}", fields[0]):
            found.setdefault(fields[5], []).append(str(ipaddress.IPv6Address(int(fields[0], 16))))
    return found


def host_name(
    name: str | None = None,
    lookup: Callable[..., list[Any]] = socket.getaddrinfo,
    seconds: float = 1.0,
) -> HostName:
    """This machine's name and what it resolves to; a resolver that does not answer in time counts as a failure."""
    name = socket.gethostname() if name is None else name
    try:
        answer = Begun(lambda: lookup(name, None, type=socket.SOCK_STREAM)).result(seconds)
    except TimeoutError:
        return HostName(name, problem=f"no answer within {seconds:g} s")
    except (OSError, UnicodeError) as error:  # a name that is empty or too long cannot be encoded
        return HostName(name, problem=getattr(error, "strerror", None) or str(error))
    usable = next((entry[4][0] for entry in answer if _binds(entry)), None)
    return HostName(name, tuple(dict.fromkeys(entry[4][0] for entry in answer)), usable)


def _binds(entry: Any) -> bool:
    family, kind, protocol, _, address = entry
    try:
        with socket.socket(family, kind, protocol) as sock:
            sock.bind(address)
    except OSError:
        return False
    return True


def gloo_choice(env: Mapping[str, str], found: tuple[Interface, ...], host: HostName) -> Choice:
    """What torch's gloo does: GLOO_SOCKET_IFNAME, else the host name's first address here, else loopback.

    Source: https://github.com/pytorch/pytorch/blob/main/torch/csrc/distributed/c10d/ProcessGroupGloo.cpp
    """
    named = env.get("GLOO_SOCKET_IFNAME")
    if named:
        addresses = {interface.name: interface.ipv4 or next(iter(interface.ipv6), None) for interface in found}
        for name in named.split(","):
            if name not in addresses:
                return Choice(None, None, f"{name} in GLOO_SOCKET_IFNAME={named} is not an interface here")
            if addresses[name] is None:
                return Choice(None, None, f"{name} in GLOO_SOCKET_IFNAME={named} has no address")
        first = named.split(",")[0]
        return Choice(first, addresses[first], "named by GLOO_SOCKET_IFNAME")
    if host.usable is not None:
        return Choice(interface_of(host.usable, found), host.usable, f"{host.name} resolves to it")
    loopback = next((interface.name for interface in found if interface.loopback), None)
    return Choice(loopback, LOOPBACK, f"{host.name} does not resolve to an address here")


def gloo_interface(env: Mapping[str, str], addresses: Iterable[str]) -> str | None:
    """The interface to set in GLOO_SOCKET_IFNAME if gloo itself would choose one that no other machine can reach."""
    if env.get("GLOO_SOCKET_IFNAME"):
        return None
    found = interfaces()
    chosen = gloo_choice(env, found, host_name())
    if chosen.address is not None and not is_loopback(chosen.address):
        return None
    return next(filter(None, (interface_of(it, found) for it in addresses if it and not is_loopback(it))), None)


def address_towards(host: str) -> str:
    """This machine's address on the way to another one; "" if there is no way."""
    with contextlib.suppress(OSError, UnicodeError):
        family, kind, protocol, _, there = socket.getaddrinfo(host, MAIN_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(there)  # sends nothing: the kernel picks the route
            return str(probe.getsockname()[0])
    return ""


def interface_of(address: str, found: tuple[Interface, ...]) -> str | None:
    """The interface that has an address, None if none has it."""
    text = address.partition("%")[0]
    for interface in found:
        if text == interface.ipv4 or text in interface.ipv6:
            return interface.name
    return next((i.name for i in found if i.loopback and is_loopback(text)), None)  # all of 127.0.0.0/8 is lo's


def is_loopback(address: str) -> bool:
    """Whether no other machine can reach an address. A host name may resolve to such an address on its own machine."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def is_here(address: str, flags: int = 0) -> bool:
    """Whether an address belongs to this machine: only then can it be bound."""
    try:
        return any(map(_binds, socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM, flags=flags)))
    except (OSError, UnicodeError):
        return False


def is_own_ip(address: str) -> bool:
    """Whether this is an IP address, not a name, and this machine has it."""
    return is_here(address, socket.AI_NUMERICHOST)


def own_address() -> str:
    """The address at which others reach this machine: the server's address of this ssh connection, else its name."""
    connection = os.environ.get("SSH_CONNECTION", "").split()
    return connection[2] if len(connection) == 4 else socket.gethostname()


def visible_address() -> str:
    """An address at which others may reach this machine; "" if it has none but the loopback's."""
    found = [it.ipv4 or next(iter(it.ipv6), "") for it in interfaces() if it.up is not False and not it.loopback]
    return next(filter(None, found), "")
