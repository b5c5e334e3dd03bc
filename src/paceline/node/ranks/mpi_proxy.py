"""What mpirun and its daemons start in place of what they mean to: small programs that tell the agent of this machine.

ssh to a machine   →  agent   {"do": "daemon", "host", "command"}     start mpirun's daemon there
a rank             →  agent   {"do": "rank", "rank", "env"}           start it, with these variables
agent              →  rank    {"do": "end"}                           it has ended, and well
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from typing import TYPE_CHECKING

from paceline.node.machine import processes

if TYPE_CHECKING:
    from collections.abc import Iterator

# Of what mpirun gives its processes, what MPI_Init reads.
_PREFIXES = ("OMPI_", "OPAL_", "ORTE_", "PMIX_")
_OF_THE_STAND_IN = ("OMPI_COMMAND", "OMPI_ARGV", "OMPI_MCA_plm_rsh_agent", "OMPI_MCA_oob_tcp_if_include")


@contextlib.contextmanager
def short(path: str) -> Iterator[str]:
    """A name of at most 107 bytes, which is all that the address of a socket can hold, for a file in a folder."""
    folder, name = os.path.split(path)
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


def _tell(path: str, message: dict[str, object]) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    with short(path) as address:
        sock.connect(address)
    sock.sendall(json.dumps(message).encode() + b"\n")
    return sock


def start_daemon(path: str, host: str, command: list[str]) -> None:
    """Be mpirun's ssh: have the agents start its daemon on a host. As soon as they know, this ends."""
    _tell(path, {"do": "daemon", "host": host, "command": " ".join(command)}).close()


def stand_in(path: str) -> int:
    """Be a rank for mpirun's daemon, which is this process's parent; returns the exit code."""
    processes.die_with(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    env = {k: v for k, v in os.environ.items() if k.startswith(_PREFIXES) and k not in _OF_THE_STAND_IN}
    with _tell(path, {"do": "rank", "rank": int(env["OMPI_COMM_WORLD_RANK"]), "env": env}) as sock:
        return 0 if sock.recv(4096) else 1
