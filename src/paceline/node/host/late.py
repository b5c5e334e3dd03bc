"""Nodes that come when their job has succeeded without them, and have to know that there is nothing to do.

A Job of MIN:MAX pods ends when MAX pods have succeeded. Those that did not fit into the cluster begin when the others
have ended. So the pod that coordinated the job stays until it has answered all of them.

With a successPolicy a Job ends when pod 0 has succeeded: its controller makes no more pods, and deletes those that have
not ended, with their logs. So pod 0 ends last, and nobody has to be answered unless the job has ended without pod 0.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import TYPE_CHECKING

from paceline.contract import TOKEN
from paceline.node.eventloop.loop import Loop
from paceline.node.rendezvous.handshake import Listener
from paceline.node.rendezvous.quorum import rank_in
from paceline.node.signals import HANDLED
from paceline.node.spec import NodeSpec

if TYPE_CHECKING:
    import threading

    from paceline.node.eventloop.channel import Channel
    from paceline.node.journal.status import Status
    from paceline.node.rendezvous.messages import AgentStatus
    from paceline.node.rundir.directory import RunDirectory

_LAST_SECONDS = 1.0  # for the last answer to arrive
_NOTICED = 5.0  # seconds until the cluster knows that a pod has ended


def stay(run: RunDirectory, is_told: threading.Event, *, ends_with_first: bool) -> None:
    """Stay in a job that has succeeded for as long as other nodes need this one, until a signal comes."""
    spec, status = NodeSpec.load(run.spec), run.read_status() or {}
    start = status.get("start")
    there = set() if start is None else {rank_in(node.get("id", "")) for node in start["nodes"]}
    if ends_with_first and spec.node_rank == 0:
        is_told.wait(0.0 if there == {0} else _NOTICED)
    elif not (ends_with_first and 0 in there):
        _answer(spec, status)


def _answer(spec: NodeSpec, status: Status) -> None:
    """If the coordinator was here, answer the nodes that come late."""
    missing = spec.nodes - int(status.get("nodes") or spec.nodes)
    if not missing or status.get("coordinator") != status.get("address"):
        return
    loop, answered, is_over = Loop(), 0, False

    def answer() -> AgentStatus:
        nonlocal answered
        answered += 1
        return {
            "id": "", "leads": False, "has_started": False, "has_begun": True, "has_ended": True, "leader": None,
        }  # fmt: skip

    def end(_: int) -> None:
        nonlocal is_over
        is_over = True

    loop.catch(HANDLED, end)
    listener = Listener(loop, os.environ.get(TOKEN, "").encode(), answer, _refuse)
    with contextlib.suppress(OSError):
        listener.open(spec.main_port or 0)
        until = time.monotonic() + spec.join_timeout
        loop.run_until(lambda: is_over or answered >= missing, max(0.0, until - time.monotonic()))
        loop.run_until(lambda: is_over, _LAST_SECONDS)
    listener.close()


def _refuse(channel: Channel) -> None:
    channel.socket.shutdown(socket.SHUT_RDWR)
