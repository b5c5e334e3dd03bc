"""Connections of every rank to rank 0, apart from everything the training sends.

Both sides of each prove that they know the job's key (`contract/handshake.py`). It comes from the agent that started
the rank, or from PACELINE_TOKEN. Without either the ranks share a random number over the process group instead, which
is as good as that is: torch sends it unencrypted.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable

from paceline.contract import RANK_KEY, TOKEN
from paceline.contract.handshake import HandshakeError, derive_key
from paceline.contract.links import Acceptor, Link, initiate, keep_alive, listen

_CONNECT = 5.0  # seconds to try one address
_MEET = 300.0  # seconds until all ranks must have connected
_RETRY = 60.0  # seconds in which a rank tries again whose connection was accepted, and ended
_PAUSE = 0.2  # seconds between two tries
LOOPBACK = "127.0.0.1"

Offer = tuple[int, list[str], str]  # rank 0's port, its addresses, a random number for the key
Share = Callable[["Offer | None"], Offer]  # what rank 0 passes comes back on every rank


class NotConnected(ConnectionError):
    """Some rank could not connect to rank 0."""

    __module__ = "paceline"  # where users find it


def connect(rank: int, world_size: int, share: Share, purpose: str, *, local: bool) -> dict[int, Link]:
    """Connect all ranks to rank 0; every rank calls it at the same place.

    The connections are not inherited by programs that a rank starts, and close by themselves within half a minute when
    the other machine is gone.
    """
    if rank:
        port, places, salt = share(None)
        return {0: _reach(rank, port, places, job_key(purpose, salt))}
    with listen(address=LOOPBACK if local else "") as server:
        salt = secrets.token_hex(32)
        share((server.getsockname()[1], addresses(local=local), salt))
        return _accept(server, world_size, job_key(purpose, salt))


def job_key(purpose: str, salt: str) -> bytes:
    """The key for one purpose, which only the ranks of this attempt know."""
    secret = os.environ.get(RANK_KEY, "") or os.environ.get(TOKEN, "")
    return derive_key(secret.encode(), purpose, salt)


def _accept(server: socket.socket, world_size: int, key: bytes) -> dict[int, Link]:
    peers: dict[int, Link] = {}
    deadline = time.monotonic() + _MEET
    acceptor = Acceptor(server, key, lambda rank: 0 < rank < world_size and rank not in peers, world_size)
    try:
        while len(peers) < world_size - 1:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                missing = sorted({*range(1, world_size)} - peers.keys())
                raise NotConnected(f"ranks {missing} did not connect to rank 0 within {_MEET:.0f} s")
            for rank, link in acceptor.accept(remaining):
                keep_alive(link.socket)
                peers[rank] = link
    except BaseException:
        for link in peers.values():
            link.socket.close()
        raise
    finally:
        acceptor.close()
    return peers


def _reach(rank: int, port: int, places: list[str], key: bytes) -> Link:
    link, why = try_addresses(rank, port, places, key)
    if link is not None:
        return link
    where = f"port {port} at {', '.join(places)}"
    raise NotConnected(f"rank {rank} on {socket.gethostname()} cannot connect to rank 0, {where}{why}")


def try_addresses(number: int, port: int, places: list[str], key: bytes) -> tuple[Link | None, str]:
    """Connect to the first of some addresses at which a peer knows the key; else say why none does.

    A connection that was accepted and ended is tried again: the other side may have had too many at a time.
    """
    deadline, why = time.monotonic() + _RETRY, ""
    while True:
        again = False
        for address in places:
            try:
                sock = socket.create_connection((address, port), _CONNECT)
            except OSError:
                continue
            try:
                keep_alive(sock)
                return initiate(sock, key, number), ""
            except HandshakeError:
                why = ": what answers there does not know this job's key; PACELINE_TOKEN must be the same on all ranks"
            except OSError:
                again = True
            sock.close()
        if not again or time.monotonic() > deadline:
            return None, why
        time.sleep(_PAUSE)


def addresses(*, local: bool) -> list[str]:
    """Addresses at which this machine may be reached, the likeliest first; peers check that it is the right one."""
    if local:
        return [LOOPBACK]
    found = [os.environ.get(name, "") for name in ("MASTER_ADDR", "PACELINE_MAIN_ADDRESS")]
    found.append(socket.gethostname())
    for family, outside in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as route:
            route.connect((outside, 9))  # sends nothing; tells which address of ours leads outside
            found.append(route.getsockname()[0])
    return list(dict.fromkeys(address for address in [*found, LOOPBACK, "::1"] if address))
