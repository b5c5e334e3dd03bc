"""Starts a part of a job on this machine for a client elsewhere, and sends the client its events."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.contract.nodejob import Order
from paceline.node.files import is_disk_full
from paceline.node.lifeline import ALL_STARTED, DOUBT_SECONDS, IN_DOUBT, KEPT
from paceline.node.logs.following import Event, answer_of, shown_by, updates
from paceline.node.machine import volumes
from paceline.node.store import make, records
from paceline.node.store.code_folder import unpack
from paceline.node.store.plan import Taken, make_plan, this_machine

from .held import HeldClient
from .protocol import Bytes, next_order

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.contract.messages import JobAnswer, Start
    from paceline.contract.nodejob import RankStreams
    from paceline.node.rundir.directory import RunDirectory
    from paceline.node.store.home import Home
    from paceline.node.store.lifecycle import AgentProcess

_MORE_SECONDS = 15.0  # for the agent to end itself, after the time that it has if the client is gone


def start(home: Home, request: Start) -> Iterator[JobAnswer]:
    """Make a job, and start its agent; then do as stdin says.

    An archive (tar) of the job's code, of `order.bytes` bytes, follows on stdin, unless it is another job's code; then
    one of the checkpoint that the job is to resume from, of `order.brought.bytes` bytes. Then words follow, one per
    line.
    "keep": the job continues without this connection if "done" follows, which says that all nodes have this order, or
    if its ranks start soon. "hold": the job ends with the client, to which this connection, or a later one in its place
    (`held.py`), carries its output and events; "signal N" forwards a signal. "drop", or the end of stdin before "keep":
    remove the job.
    """
    order, (lifeline, theirs) = order_of(home, Order.from_json(request["order"])), socket.socketpair()
    try:
        with theirs:
            made = _make(home, order, theirs)
    except Taken as taken:
        yield {"taken": str(taken.path)}
        yield {"end": True}
        return
    run, node, agent, begin, first, *_ = made
    is_decided = is_kept = False
    try:
        if node.request is not None:  # its devices count as taken, or waited for, before another job looks for a host
            _await(run, lifeline, begin, ("queued", "granted"))
        yield {"started": node.job, "ranks": node.nproc, "host": socket.gethostname(), "report": first}
        word = next_order()
        if word == "keep":
            is_kept = True
            _notify(lifeline, IN_DOUBT)
            yield {"kept": records.look(run.path, records.queue_of(home.root)) or first}  # it may be gone
            word = next_order()
            is_kept = word != "drop"
            if word == "done":
                is_decided = True
                _notify(lifeline, KEPT)
        elif word == "hold" and order.rank_streams is not None:
            is_decided = True
            _notify(lifeline, ALL_STARTED)
            HeldClient(run, agent, lifeline, order.reconnect).serve(
                _updates(run, agent, lifeline, order.rank_streams, begin)
            )
    finally:  # also if the client is gone and an answer cannot be sent
        if is_kept and not is_decided:
            is_decided = _has_begun(run, lifeline, begin)
        if not is_decided:
            make.drop(home, made)
    yield {"end": True}


def order_of(home: Home, order: Order) -> Order:
    """What a client asks this machine to make, with where its volumes are here."""
    work = os.path.expanduser(order.job.working_dir)
    return replace(order, data=tuple(volumes.find(it, str(home.root), work) for it in order.data))


def _notify(lifeline: socket.socket, word: bytes) -> None:
    with contextlib.suppress(OSError):  # the agent has ended already
        lifeline.send(word)


def _make(home: Home, order: Order, lifeline: socket.socket) -> make.Made:
    archive, size = Bytes(order.bytes), order.brought.bytes if order.brought is not None else 0
    if make.is_back(home, order):
        archive.skip()
        return make.restart_part(home, order, lifeline)
    with make.making(make_plan(home, this_machine(home, order.slots), order)) as new:
        if new.code is not None:
            unpack(archive, new.code)
        return new.start(order.code, lifeline, Bytes(size, "the checkpoint") if size else None)


def _has_begun(run: RunDirectory, lifeline: socket.socket, begin: int) -> bool:
    """Wait for the ranks of a job whose client is gone, or for its agent to end; returns whether the ranks start."""
    with contextlib.suppress(OSError):  # the agent has ended
        lifeline.shutdown(socket.SHUT_WR)
    patience = threading.Timer(DOUBT_SECONDS + _MORE_SECONDS, lifeline.shutdown, (socket.SHUT_RDWR,))
    patience.daemon = True
    patience.start()
    try:
        return _await(run, lifeline, begin, ("started",))
    finally:
        patience.cancel()


def _await(run: RunDirectory, lifeline: socket.socket, begin: int, events: tuple[str, ...]) -> bool:
    """Wait until the agent has recorded one of these events, or has ended; returns whether it has."""
    news = updates(run, lifeline.fileno(), lambda _: False, begin)
    return any(isinstance(it, Event) and it.name in events for it in news)


def _updates(
    run: RunDirectory, agent: AgentProcess, lifeline: socket.socket, rank_streams: RankStreams, begin: int
) -> Iterator[JobAnswer]:
    """The output of a job that the client shows, and its events, until its agent is gone."""
    for update in updates(run, lifeline.fileno(), shown_by(rank_streams), begin):
        yield answer_of(update)
    yield {
        "gone": agent.wait(),
        "pid": records.agent_pid(run, agent.pid),
        "log": None if is_disk_full(run.path) else str(run.agent_log),
    }
