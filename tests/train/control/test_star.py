"""Messages between rank 0 and the others: nobody waits to send, and what comes is what was sent."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
import time
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import GENEROUS

from paceline.contract.handshake import HandshakeError
from paceline.contract.links import Link
from paceline.train.control.star import WAKEUP, Star

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hypothesis.strategies import DataObject

    Heard = tuple[int, bytes | OSError]

LARGE = 4 << 20  # more than sockets take
RANKS = (1, 2)


@contextlib.contextmanager
def stars() -> Iterator[tuple[Star, dict[int, Star]]]:
    """That of rank 0, and those of the others."""
    pairs = {rank: socket.socketpair() for rank in RANKS}
    keys = {rank: bytes([rank]) * 32 for rank in RANKS}
    first = Star({rank: Link(ours, keys[rank]) for rank, (ours, _) in pairs.items()}, accepted=True)
    others = {rank: Star({0: Link(theirs, keys[rank])}, accepted=False) for rank, (_, theirs) in pairs.items()}
    try:
        yield first, others
    finally:
        for star in (first, *others.values()):
            star.close()


def read(star: Star, count: int) -> list[Heard]:
    """So many messages, errors and signals at least."""
    found: list[Heard] = []
    until = time.monotonic() + GENEROUS
    while len(found) < count:
        assert time.monotonic() < until
        found += star.take(star.select(0.05))
    return found


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_all_messages_arrive_in_their_order_whatever_their_size(data: DataObject) -> None:
    sizes = st.lists(st.sampled_from([0, 1, 100, 70_000, LARGE]), max_size=6)
    up = {rank: [bytes([rank, number % 256]) * size for number, size in enumerate(data.draw(sizes))] for rank in RANKS}
    down = [bytes([number]) * size for number, size in enumerate(data.draw(sizes))]
    with stars() as (first, others):
        for message in down:
            first.send_to_all(message)
        for rank, messages in up.items():
            for message in messages:
                others[rank].send(0, message)
        received: dict[int, list[Heard]] = {rank: [] for rank in (0, *RANKS)}
        until = time.monotonic() + GENEROUS
        while [len(it) for it in received.values()] != [sum(map(len, up.values())), len(down), len(down)]:
            assert time.monotonic() < until
            for rank, star in {0: first, **others}.items():
                received[rank] += star.take(star.select(0))
        assert first.has_sent_all
        for rank in RANKS:
            assert received[rank] == [(0, message) for message in down]
            assert [it for it in received[0] if it[0] == rank] == [(rank, message) for message in up[rank]]


def test_a_rank_that_does_not_read_keeps_nobody_waiting() -> None:
    with stars() as (first, others):
        for _ in range(5):
            first.send_to_all(bytes(LARGE))
        assert not first.has_sent_all
        others[2].send(0, b"here")
        assert read(first, 1) == [(2, b"here")]
        first.close(0.01)  # which does not wait for it either


def test_the_last_message_of_a_rank_comes_before_its_end() -> None:
    with stars() as (first, others):
        others[1].send(0, b"last")
        others[1].close(GENEROUS)
        (_, message), (rank, error) = read(first, 2)
        assert (message, rank) == (b"last", 1)
        assert isinstance(error, ConnectionResetError)
        first.send_to_all(b"on")
        assert read(others[2], 1) == [(0, b"on")]


def test_what_was_changed_on_the_way_is_the_last_that_is_heard_of_a_rank() -> None:
    with stars() as (first, others):
        others[1]._streams[0].socket.sendall(bytes(100))
        ((rank, error),) = read(first, 1)
        assert rank == 1
        assert isinstance(error, HandshakeError)
        others[1].send(0, b"more")
        others[2].send(0, b"true")
        assert read(first, 1) == [(2, b"true")]


def test_a_child_that_closes_its_copies_leaves_the_rank_its_own() -> None:
    with stars() as (first, others):
        first.send_to_all(bytes(LARGE))
        child = os.fork()
        if not child:
            first.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        others[1].send(0, b"here")
        assert read(first, 1) == [(1, b"here")]
        while not first.has_sent_all:
            for star in (first, *others.values()):
                list(star.take(star.select(0)))


def test_who_waits_is_woken_with_what_was_written() -> None:
    with stars() as (first, _):
        first.wakeup.send(b"\x0f")
        assert read(first, 1) == [(WAKEUP, b"\x0f")]
        threading.Timer(0.05, first.wake).start()
        assert list(first.take(first.select(GENEROUS))) == [(WAKEUP, b"\0")]


def test_descriptors_may_be_over_1023() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 4096), hard), hard))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while (copy := os.dup(1)) < 1024:
            stack.callback(os.close, copy)
        stack.callback(os.close, copy)
        first, others = stack.enter_context(stars())
        assert first.wakeup.fileno() > 1023
        others[1].send(0, b"here")
        assert read(first, 1) == [(1, b"here")]
