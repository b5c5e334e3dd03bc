"""Two machines by hand, and between them somebody who can change what they say to each other."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import GENEROUS, Paceline, all_end, eventually, free_port

from paceline.contract import links
from paceline.contract.handshake import CHECKSUM_SIZE, NONCE_SIZE, PROOF_SIZE
from paceline.node.eventloop.channel import decode, encode

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator
    from pathlib import Path

_SIZE = struct.Struct("!Q")  # of a message
# Bytes with which both sides prove themselves: of the leader's answers, and of what the other one begins with.
_PROOFS = {False: NONCE_SIZE + 2 * PROOF_SIZE, True: 12 + NONCE_SIZE + PROOF_SIZE}
ALTERED = "a message from it was altered on the way"


class Relay:
    """Passes on what two agents say, message by message; `replace` gets each and may return another one."""

    def __init__(self, target: int) -> None:
        self.replace: Callable[[bool, dict[str, Any]], dict[str, Any] | None] = lambda to_leader, message: None
        self.replaced = 0
        self._target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._sockets: list[socket.socket] = []
        self._threads[0].start()

    def close(self) -> None:
        for sock in [self._server, *self._sockets]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(GENEROUS)
        for sock in [self._server, *self._sockets]:
            sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                follower, _ = self._server.accept()
                try:
                    leader = socket.create_connection(("127.0.0.1", self._target))
                except OSError:  # it does not listen yet
                    follower.close()
                    continue
                self._sockets += [follower, leader]
                for one, other, to_leader in ((follower, leader, True), (leader, follower, False)):
                    thread = threading.Thread(target=self._pump, args=(one, other, to_leader))
                    self._threads.append(thread)
                    thread.start()

    def _pump(self, one: socket.socket, other: socket.socket, to_leader: bool) -> None:
        with contextlib.suppress(OSError):
            left = _PROOFS[to_leader]
            while left and (proof := one.recv(left)):
                other.sendall(proof)
                left -= len(proof)
            while True:
                head = links.read(one, _SIZE.size + CHECKSUM_SIZE)
                data = links.read(one, *_SIZE.unpack(head[: _SIZE.size]))
                checksum = links.read(one, CHECKSUM_SIZE)
                new = self.replace(to_leader, decode(data))
                if new is not None:
                    self.replaced += 1
                    data = encode(new)
                    head = _SIZE.pack(len(data)) + head[_SIZE.size :]
                other.sendall(head + data + checksum)
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_WR)


class Pair:
    """Node 0, and node 1, which reaches it through a relay."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        port = free_port()
        self.relay = Relay(port)
        self.ports = (port, self.relay.port)
        self.nodes = [Paceline(folder / f"node-{rank}") for rank in range(2)]

    def start(self, *args: str, **env: str) -> list[subprocess.Popen[str]]:
        started = []
        for rank, node in enumerate(self.nodes):
            node.folder.mkdir()
            node.env.update(env, PACELINE_TOKEN="sesame-open-4711")
            flags = ("--node-rank", str(rank), "--master-addr", "127.0.0.1", "--master-port", str(self.ports[rank]))
            flags += ("--local-addr", f"127.0.0.{rank + 1}")
            started.append(node.start("run", *flags, "--rdzv-id", "job", *args, "script.py", cwd=self.folder))
        return started

    def log(self, rank: int) -> str:
        return (self.nodes[rank].job() / "agent.log").read_text()


@pytest.fixture
def pair(paceline: Paceline) -> Iterator[Pair]:
    it = Pair(paceline.folder)
    try:
        yield it
    finally:
        it.relay.close()
        for node in it.nodes:
            all_end(node.processes, "a node", node.home / "jobs")


FOREVER = """
    import os, signal
    open("ready-" + os.environ["RANK"], "w").close()
    while True:
        signal.pause()
"""


def test_who_changes_a_message_runs_no_command(pair: Pair, paceline: Paceline) -> None:
    paceline.script("")
    mpirun = pair.folder / "bin" / "mpirun"
    mpirun.parent.mkdir()
    mpirun.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "mpirun (Open MPI) 4.1.4" || exec sleep 1000\n')
    mpirun.chmod(0o755)
    stolen = pair.folder / "stolen"
    begun = threading.Event()

    def replace(to_leader: bool, message: dict[str, Any]) -> dict[str, Any] | None:
        if message.get("do") == "go":
            begun.set()
        if to_leader or message.get("do") != "beat" or not begun.is_set():
            return None
        return {"do": "daemon", "node_rank": 1, "attempt": 0, "command": f"touch {stolen}", "folders": {}}

    pair.relay.replace = replace
    path = f"{mpirun.parent}{os.pathsep}{os.environ['PATH']}"
    first, second = pair.start("--framework", "mpi", "--nnodes", "2", PATH=path)
    ends = [process.communicate(timeout=GENEROUS) for process in (first, second)]
    assert pair.relay.replaced
    assert not stolen.exists()
    assert (first.returncode, second.returncode) == (1, 1), ends
    assert f"which coordinates the job, is gone: {ALTERED}" in ends[1][1]
    assert f"paceline: connection to the agent at 127.0.0.1:{pair.relay.port}: {ALTERED}\n" in pair.log(1)
    assert "node 1" in ends[0][1].splitlines()[-1]


@pytest.mark.parametrize(
    "forged",
    [
        {"do": "done"},
        *(pytest.param(it, marks=pytest.mark.nightly) for it in ({"do": "stop", "signal": 9}, {"do": "failed"})),
    ],
)
def test_a_changed_report_is_a_lost_node(pair: Pair, paceline: Paceline, forged: dict[str, Any]) -> None:
    paceline.script(FOREVER)
    first, second = pair.start("--nnodes", "2", "--framework", "torch")
    eventually(lambda: all((pair.folder / f"ready-{rank}").exists() for rank in range(2)), "ranks run")
    pair.relay.replace = lambda to_leader, _: forged if to_leader else None
    ends = [process.communicate(timeout=GENEROUS) for process in (first, second)]
    assert (first.returncode, second.returncode) == (1, 1), ends
    assert f"is gone: {ALTERED}" in ends[0][1].splitlines()[-1]
    assert f": {ALTERED}\n" in pair.log(0)
