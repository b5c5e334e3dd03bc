"""Connections of every rank to rank 0, apart from everything the training sends."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable

_HELLO = struct.Struct("!32sI")  # the token, and the rank that connects
_CONNECT = 5.0  # seconds to try one address, and for a stranger to say hello
_MEET = 300.0  # seconds until all ranks must have connected

Offer = tuple[int, list[str], str]  # rank 0's port, its addresses, the token
Share = Callable[["Offer | None"], Offer]  # what rank 0 passes comes back on every rank


class NotConnected(ConnectionError):
    """Some rank could not connect to rank 0."""

    __module__ = "paceline"  # where users find it


def connect(rank: int, world_size: int, share: Share) -> dict[int, socket.socket]:
    """Connect all ranks to rank 0; every rank calls it at the same place.

    The connections are not inherited by programs that a rank starts, and close by themselves within half a minute when
    the other machine is gone.

    Args:
        rank: this rank.
        world_size: number of ranks.
        share: hands what rank 0 passes to every rank.

    Returns:
        On rank 0 the connections by rank, elsewhere that to rank 0 under 0.

    Raises:
        NotConnected: a rank did not come within five minutes, or does not reach rank 0.
    """
    if rank:
        return {0: _reach(rank, *share(None))}
    with listen() as server:
        token = secrets.token_hex(16)
        share((server.getsockname()[1], addresses(), token))
        return _accept(server, world_size, token.encode())


def _accept(server: socket.socket, world_size: int, token: bytes) -> dict[int, socket.socket]:
    peers: dict[int, socket.socket] = {}
    deadline = time.monotonic() + _MEET
    try:
        while len(peers) < world_size - 1:
            server.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                peer, _ = server.accept()
            except TimeoutError:
                missing = sorted({*range(1, world_size)} - peers.keys())
                raise NotConnected(f"ranks {missing} did not connect to rank 0 within {_MEET:.0f} s") from None
            try:
                peer.settimeout(_CONNECT)
                said, rank = _HELLO.unpack(read(peer, _HELLO.size))
                if not hmac.compare_digest(said, token):
                    raise ConnectionError("a stranger")
                peer.sendall(token)
            except OSError:
                peer.close()
            else:
                peers[rank] = _prepared(peer)
    except BaseException:
        for peer in peers.values():
            peer.close()
        raise
    return peers


def _reach(rank: int, port: int, addresses: list[str], token: str) -> socket.socket:
    for address in addresses:
        try:
            peer = socket.create_connection((address, port), _CONNECT)
        except OSError:
            continue
        with contextlib.suppress(OSError):
            peer.sendall(_HELLO.pack(token.encode(), rank))
            if hmac.compare_digest(read(peer, len(token)), token.encode()):
                return _prepared(peer)
        peer.close()
    raise NotConnected(
        f"rank {rank} on {socket.gethostname()} cannot connect to rank 0, port {port} at {', '.join(addresses)}"
    )


def read(peer: socket.socket, size: int) -> bytes:
    """Exactly `size` bytes.

    Raises:
        OSError: the other side ended, or does not answer within the socket's timeout.
    """
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = peer.recv_into(view)
        if not count:
            raise ConnectionError("the other side ended")
        view = view[count:]
    return bytes(data)


def listen() -> socket.socket:
    """A port of this machine, for all its addresses."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


def addresses() -> list[str]:
    """Where this machine may be reached, the likeliest first; who connects sees by the token whether it is."""
    found = [os.environ.get("MASTER_ADDR", ""), socket.gethostname()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route, contextlib.suppress(OSError):
        route.connect(("192.0.2.1", 9))  # sends nothing; tells which address of ours leads outside
        found.append(route.getsockname()[0])
    return list(dict.fromkeys(address for address in [*found, "127.0.0.1", "::1"] if address))


def _prepared(peer: socket.socket) -> socket.socket:
    peer.settimeout(None)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 25_000)):
        if hasattr(socket, option):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return peer
