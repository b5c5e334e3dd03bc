"""What TCP connections have carried, as the kernel counts it (sock_diag(7)): /proc/PID/io has no bytes of sockets."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from typing import TYPE_CHECKING, NamedTuple

from paceline.node.machine import processes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# include/uapi/linux/netlink.h, sock_diag.h, inet_diag.h, tcp.h
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP = 4, 20, 0x301
_ERROR, _DONE = 2, 3
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBI48x")
_ENDS = struct.Struct("!4xHH16s16s")
_INODE, _ATTRIBUTES = 68, 72
_INFO = 2  # the attribute with a struct tcp_info
_LISTENING = 10
_STATES = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 8 | 1 << _LISTENING  # established, either side closed, listening
_COUNTERS = struct.Struct("=120xQQ")  # bytes acknowledged by the other side, and received
_MAPPED = bytes(10) + b"\xff\xff"  # an IPv4 address as one of IPv6


class _Connection(NamedTuple):
    inode: int
    local: tuple[bytes, int]
    remote: tuple[bytes, int]
    carried: int


class Connections:
    """The connections of this machine at one moment, looked at when they are first asked for.

    Those between ranks do not count, nor those that others have made to a rank: bytes there are no work of the rank.
    """

    def __init__(self, ranks: Iterable[int], nodes: Iterable[str] = ()) -> None:
        """Look at nothing yet."""
        self._ranks, self._nodes = ranks, nodes
        self._carried: dict[int, int] | None = None
        self._is_known = False

    def carried(self, pids: Iterable[int]) -> Mapping[int, int] | None:
        """Bytes that the connections of processes have carried, by inode; None if the kernel does not say it."""
        if not self._is_known:
            self._is_known = True
            with contextlib.suppress(OSError, struct.error):
                self._carried = self._that_count([*_dump(socket.AF_INET), *_dump(socket.AF_INET6)])
        found = self._carried
        return found and {inode: found[inode] for inode in _inodes(pids) if inode in found}

    def _that_count(self, found: list[_Connection]) -> dict[int, int]:
        served = {it.local[1] for it in found if not it.remote[1]}
        made = {(it.local, it.remote): it for it in found if it.remote[1]}
        family = {*self._ranks}.union(*map(processes.parents, self._ranks))
        own, nodes = _inodes(family), set(map(_packed, self._nodes))
        return {
            it.inode: it.carried
            for it in made.values()
            if it.local[1] not in served
            and it.remote[0] not in nodes
            and not ((other := made.get((it.remote, it.local))) and other.inode in own)
        }


def _dump(family: int) -> list[_Connection]:
    """All connections of a family of addresses; raises OSError if the kernel does not know how."""
    found: list[_Connection] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as asked:
        asked.settimeout(1.0)
        request = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << _INFO - 1, 0, _STATES)
        asked.send(_HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 1, 0) + request)
        while True:
            data = asked.recv(1 << 17)
            while data:
                length, kind, *_ = _HEADER.unpack_from(data)
                if kind == _DONE:
                    return found
                if kind == _ERROR:
                    raise OSError("sock_diag")
                found += _parsed(data[_HEADER.size : length])
                data = data[length + 3 & ~3 :]


def _parsed(message: bytes) -> list[_Connection]:
    near, far, local, remote = _ENDS.unpack_from(message)
    size, mapped = (4, b"") if message[0] == socket.AF_INET else (16, _MAPPED)
    ends = [
        (it[12:] if mapped and it.startswith(mapped) else it[:size], port)
        for it, port in ((local, near), (remote, far))
    ]
    inode = int.from_bytes(message[_INODE:_ATTRIBUTES], "little")
    at, carried = _ATTRIBUTES, 0
    while at + 4 <= len(message):
        length, kind = struct.unpack_from("=HH", message, at)
        if kind == _INFO and length >= 4 + _COUNTERS.size:
            carried = sum(_COUNTERS.unpack_from(message, at + 4))
        at += max(length + 3 & ~3, 4)
    return [_Connection(inode, ends[0], ends[1], carried)]


def _packed(address: str) -> bytes:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address.partition("%")[0]).packed
    return b""


def _inodes(pids: Iterable[int]) -> set[int]:
    """The sockets that processes have open, as far as that may be seen."""
    found: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):  # closed meanwhile
                    kind, _, inode = os.readlink(f"/proc/{pid}/fd/{name}").partition(":[")
                    if kind == "socket":
                        found.add(int(inode[:-1]))
    return found
