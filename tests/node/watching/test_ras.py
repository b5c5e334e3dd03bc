"""What NCCL's RAS service says of a hang, from an answer as its documentation shows it; no test has a GPU."""

from __future__ import annotations

import socket
import threading
from typing import Any

from tests.node.watching.test_hang import stand

from paceline.node.eventloop.loop import Loop
from paceline.node.watching.asking import ask_nccl
from paceline.node.watching.hang import find

STATUS = """OK
NCCL version 2.24.3 compiled with CUDA 12.6
CUDA runtime version 12060, driver version 12060

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      1          8            1          8        8

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         1         8         8         8   RUNNING  MISMATCH

Errors
======

Warnings
========

#0-0 (78db921d1c117b4a) MISMATCH
  Communicator ranks have different AllReduce operation counts
  7 ranks have launched up to operation 64
  Rank 7 has launched up to operation 60 -- GPU 3 managed by process 107 on node 10.0.0.1
"""
LINES = [line.strip() for line in STATUS.splitlines()[-4:]]


def asked(server: socket.socket, pids: set[int]) -> list[str]:
    loop, found = Loop(), list[Any]()
    ask_nccl(loop, pids, found.append, server.getsockname()[1])
    loop.run_until(lambda: bool(found), 60.0)
    (lines,) = found
    return list(lines)


def served(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection, connection.makefile("rb") as asked_for:
        assert [asked_for.readline() for _ in range(2)] == [b"TIMEOUT 2\n", b"STATUS\n"]
        connection.sendall(STATUS.encode())


def test_warnings_that_name_a_rank_here_are_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        for pids, expected in (({107, 108}, LINES), ({7}, [])):  # the second is of another job
            thread = threading.Thread(target=served, args=(server,))
            thread.start()
            assert asked(server, pids) == expected
            thread.join()


def test_where_nothing_listens_nothing_is_said() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        assert asked(server, {107}) == []


def test_a_hang_has_what_nccl_says_once() -> None:
    found = find([stand(0, {"0": 7}, machine={"nccl": LINES}), stand(1, {"0": 6}, machine={"nccl": LINES})], 60.0)
    assert found is not None
    assert found["line"].endswith(f"; NCCL: {', '.join(LINES)}")
    assert found["line"].count("MISMATCH") == 1
