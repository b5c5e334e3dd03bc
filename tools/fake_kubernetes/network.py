"""The pods' network: a bridge per node below one in the middle, and names for pods behind headless Services."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
import struct
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any

from . import resources

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .errors import Object
    from .storage import Storage

_LIBC = ctypes.CDLL(None, use_errno=True)
_DOMAIN = "cluster.local"
_A, _AAAA = 1, 28


def ip(*args: str, lines: list[str] | None = None) -> None:
    """`ip …`, or several of its commands at once."""
    command = ["ip", *args, *(["-batch", "-"] if lines else [])]
    text = "\n".join(lines or [])
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}\n{text}")


@contextlib.contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Let this thread make sockets in another network for a moment; they stay there."""
    home = os.open(f"/proc/self/task/{threading.get_native_id()}/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if _LIBC.setns(there, 0x40000000):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
        yield
    finally:
        _LIBC.setns(home, 0x40000000)
        os.close(home)
        os.close(there)


class Network:
    """The wires: 10.P.0.1 is the middle, pods of node N are 10.P.N.x."""

    def __init__(self, prefix: str, number: int) -> None:
        self.prefix, self.number = prefix, number
        self.hub = f"{prefix}-hub"
        self.address = f"10.{number}.0.1"
        self._last: dict[int, int] = {}

    def start(self, nodes: int) -> None:
        ip("netns", "add", self.hub)
        lines = ["link add br0 type bridge", f"addr add {self.address}/16 dev br0", "link set br0 up", "link set lo up"]
        for node in range(1, nodes + 1):
            lines += [
                f"link add bn{node} type bridge", f"link set bn{node} up",
                f"link add up{node} type veth peer name dn{node}",
                f"link set up{node} master br0 up", f"link set dn{node} master bn{node} up",
            ]  # fmt: skip
        ip("-n", self.hub, lines=lines)

    def cut(self, node: int) -> None:
        ip("-n", self.hub, "link", "set", f"up{node}", "down")

    def heal(self, node: int) -> None:
        ip("-n", self.hub, "link", "set", f"up{node}", "up")

    def address_of(self, node: int) -> str:
        """The next free address of a node's pods."""
        last = self._last[node] = self._last.get(node, 9) + 1
        return f"10.{self.number}.{node + 100 * (last // 250)}.{last % 250 + 1}"

    def connect(self, node: int, namespace: str, link: str, address: str) -> None:
        """Make a pod's network."""
        ip("netns", "add", namespace)
        lines = [f"link add {link} type veth peer name eth0 netns {namespace}", f"link set {link} master bn{node} up"]
        ip("-n", self.hub, lines=lines)
        ip("-n", namespace, lines=[
            f"addr add {address}/16 dev eth0", "link set eth0 up", "link set lo up", f"route add default via {self.address}",
        ])  # fmt: skip


class Names(asyncio.DatagramProtocol):
    """The name server of the pods."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.remembers_missing = 0.0  # seconds; CoreDNS does so for 30
        self._missing: dict[str, float] = {}

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, sender: Any) -> None:
        with contextlib.suppress(IndexError, struct.error, UnicodeDecodeError):
            self.transport.sendto(self._answer(data), sender)

    def _answer(self, data: bytes) -> bytes:
        labels, place = [], 12
        while data[place]:
            labels.append(data[place + 1 : place + 1 + data[place]].decode())
            place += 1 + data[place]
        kind = struct.unpack(">H", data[place + 1 : place + 3])[0]
        question = data[12 : place + 5]
        found = self._find_once(".".join(labels).lower())
        code = 3 if found is None else 0
        addresses = found or [] if kind == _A else []
        head = data[:2] + struct.pack(">HHHHH", 0x8580 | code, 1, len(addresses), 0, 0)
        records = b"".join(b"\xc0\x0c" + struct.pack(">HHIH", _A, 1, 5, 4) + socket.inet_aton(one) for one in addresses)
        return head + question + records

    def _find_once(self, name: str) -> list[str] | None:
        clock = time.monotonic()
        if self._missing.get(name, 0.0) > clock:
            return None
        found = self.find(name)
        if found is None and self.remembers_missing:
            self._missing[name] = clock + self.remembers_missing
        return found

    def find(self, name: str) -> list[str] | None:
        """The addresses of a name, None if there is no such name."""
        if not name.endswith(f".svc.{_DOMAIN}"):
            return None
        parts = name[: -len(f".svc.{_DOMAIN}")].split(".")
        if len(parts) not in (2, 3):
            return None
        host, service, namespace = ("", *parts) if len(parts) == 2 else parts
        found = self.storage.get(resources.SERVICES, namespace, service)
        if found is None:
            return None
        selector = found["spec"].get("selector") or {}
        addresses = [
            pod["status"]["podIP"]
            for pod in self.storage.all(resources.PODS, namespace)
            if selector and _answers(pod, found, selector)
            and (not host or (pod["spec"].get("hostname"), pod["spec"].get("subdomain")) == (host, service))
        ]  # fmt: skip
        return addresses or (None if host else [])


def _answers(pod: Object, service: Object, selector: dict[str, str]) -> bool:
    labels, status = pod["metadata"].get("labels") or {}, pod["status"]
    if any(labels.get(name) != value for name, value in selector.items()) or not status.get("podIP"):
        return False
    if status.get("phase") in ("Succeeded", "Failed"):
        return False
    if service["spec"].get("publishNotReadyAddresses"):
        return True
    ready = any(one["type"] == "Ready" and one["status"] == "True" for one in status.get("conditions") or [])
    return ready and not pod["metadata"].get("deletionTimestamp")
