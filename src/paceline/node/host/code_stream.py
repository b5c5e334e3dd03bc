"""Code of a job that is too large to come with a pod: it is sent into one pod, and the other pods get it from there.

A client writes it to the stdin of `receive`. A pod that has the code gives it to pods that prove that they know the
job's token (`contract/handshake.py`). What comes is checked by its SHA-256, which the pod has from the job.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, TypedDict

from paceline.contract.handshake import Acceptance, HandshakeError, Initiation, derive_key
from paceline.node.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from typing import BinaryIO

_PATIENCE = 900.0  # seconds for the code to come
_PAUSE = 0.5
_BLOCK = 1 << 18
_SECONDS = 30.0  # for a peer to send anything
_AT_ONCE = 3  # peers that are asked in a round


class Stream(TypedDict):
    """Code that comes after the pod has begun.

    Keys:
        bytes: its size.
        sha256: of it, in hexadecimal digits.
        peers: the names of the job's pods; empty if there is only one.
        port: at which a pod that has the code gives it to others.
    """

    bytes: int
    sha256: str
    peers: Sequence[str]
    port: int


def receive(path: Path, stream: Mapping[str, Any]) -> None:
    """Put the code that comes on stdin at a path, complete or not at all, and say so on stdout."""
    _store(path, stream, lambda size: os.read(0, size))
    print("ok", flush=True)


def wait_for(path: Path, stream: Stream, token: str) -> None:
    """Wait until the code is at a path: a client puts it there, or another pod of the job has it.

    Raises:
        Refused: it does not come.
    """
    if path.exists():
        return
    size = f"{stream['bytes'] / (1 << 20):.0f} MiB"
    print(f"paceline: waiting for the job's code ({size})", file=sys.stderr, flush=True)
    key, until = _key(token), time.monotonic() + _PATIENCE
    while not path.exists():
        peers = stream["peers"]
        asked = peers if len(peers) <= _AT_ONCE else [peers[0], *random.sample(list(peers[1:]), _AT_ONCE - 1)]
        if any(_get(path, stream, peer, key) for peer in asked):
            return
        if time.monotonic() > until:
            where = "no pod of the job has it" if peers else "its client did not send it"
            raise Refused(f"the job's code has not come within {_PATIENCE / 60:.0f} minutes: {where}; submit it again")
        time.sleep(_PAUSE)


def share(path: Path, stream: Stream, token: str) -> None:
    """From now on, give the code to other pods of the job that ask for it, in a thread."""
    if not stream["peers"]:
        return
    listener = socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET)
    with contextlib.suppress(OSError, ValueError):
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("", stream["port"]))
        listener.listen(64)
    except OSError:  # another pod in the network of this node has the port
        listener.close()
        return
    threading.Thread(target=_accept, args=(listener, path, _key(token)), daemon=True).start()


def _key(token: str) -> bytes:
    return derive_key(token.encode(), "code")


def _accept(listener: socket.socket, path: Path, key: bytes) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            time.sleep(_PAUSE)  # such as no descriptor being left
            continue
        threading.Thread(target=_give, args=(connection, path, key), daemon=True).start()


def _give(connection: socket.socket, path: Path, key: bytes) -> None:
    """Give the code to who knows the key."""
    with connection, contextlib.suppress(OSError, HandshakeError):
        connection.settimeout(_SECONDS)
        acceptance = Acceptance(key, lambda _: True)
        while acceptance.needs:
            connection.sendall(acceptance.receive(_exactly(connection, acceptance.needs)))
        with open(path, "rb") as file:
            connection.sendfile(file)


def _get(path: Path, stream: Stream, peer: str, key: bytes) -> bool:
    """Get the code from a pod; returns False if it does not have it."""
    try:
        with socket.create_connection((peer, stream["port"]), timeout=_PAUSE * 4) as connection:
            connection.settimeout(_SECONDS)
            initiation = Initiation(key, 0)
            connection.sendall(initiation.hello)
            while initiation.needs:
                connection.sendall(initiation.receive(_exactly(connection, initiation.needs)))
            _store(path, stream, connection.recv)
    except (OSError, HandshakeError, Refused):
        return False
    return True


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise HandshakeError("the connection has ended")
        data += more
    return data


def _store(path: Path, stream: Mapping[str, Any], read: Callable[[int], bytes]) -> None:
    """Write what is read to a path, complete or not at all.

    Raises:
        Refused: it is not the job's code.
        OSError: it cannot be read or written.
    """
    hidden = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        with open(hidden, "wb") as file:
            digest = _copy(read, file, stream["bytes"])
        if digest != stream["sha256"]:
            raise Refused("the code arrived damaged, or not whole")
        hidden.replace(path)
    finally:
        hidden.unlink(missing_ok=True)


def _copy(read: Callable[[int], bytes], file: BinaryIO, left: int) -> str:
    """Copy so many bytes; returns their SHA-256."""
    digest = hashlib.sha256()
    while left and (data := read(min(_BLOCK, left))):
        digest.update(data)
        file.write(data)
        left -= len(data)
    return digest.hexdigest()
