"""The programs that mpirun and its daemons start in place of ssh and of the ranks; they send requests to the agent.

in place of ssh       →  agent   {"do": "daemon", "host", "command", "folders"}   start mpirun's daemon on that machine
in place of a rank    →  agent   {"do": "rank", "rank", "env"}                    start the rank, with these variables
agent  →  in place of a rank     {"do": "end"}                                    the rank has succeeded
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

from paceline.contract.links import Link, Messages
from paceline.contract.local_sockets import reachable
from paceline.node.machine import processes

from .mpi_daemon import parse

if TYPE_CHECKING:
    from .messages import FromMpirun

# Prefixes of the variables that mpirun sets and MPI_Init reads.
_PREFIXES = ("OMPI_", "OPAL_", "ORTE_", "PMIX_")
_OF_THE_PROXY = ("OMPI_COMMAND", "OMPI_ARGV", "OMPI_MCA_plm_rsh_agent", "OMPI_MCA_oob_tcp_if_include")


def _send(path: str, message: FromMpirun) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    with reachable(path) as address:
        sock.connect(address)
    Messages(Link(sock, None), accepted=False).send(json.dumps(message).encode())
    return sock


def start_daemon(path: str, host: str, command: list[str]) -> None:
    """Run in place of ssh: have mpirun's daemon started on a host. Returns when the agent has the request."""
    try:
        words, folders = parse(" ".join(command))
    except ValueError as error:
        sys.exit(f"paceline: cannot start mpirun's daemon on {host}: {error}")
    _send(path, {"do": "daemon", "host": host, "command": words, "folders": folders}).close()


def represent_rank(path: str) -> int:
    """Run in place of a rank, as a child of mpirun or its daemon, until the rank ends; returns the exit code."""
    processes.die_with(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    env = {k: v for k, v in os.environ.items() if k.startswith(_PREFIXES) and k not in _OF_THE_PROXY}
    with _send(path, {"do": "rank", "rank": int(env["OMPI_COMM_WORLD_RANK"]), "env": env}) as sock:
        return 0 if sock.recv(4096) else 1
