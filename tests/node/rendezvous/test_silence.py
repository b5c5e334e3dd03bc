"""What tells an agent that is starved from a machine that is lost."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

import pytest
from tests.conftest import eventually

from paceline.node.eventloop.channel import Channel
from paceline.node.rendezvous.links import BEAT_SECONDS, Link
from paceline.node.rendezvous.silence import exceeded, since_packet

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize(
    ("since_message", "since_packet", "limit"),
    [
        (10, None, None),
        (10.1, None, 10),  # nothing is known of its kernel
        (10.1, 10.1, 10),
        (10, 11, None),
        (59, 1, None),
        (60, 10, None),
        (60.1, 0, 60),
        (60.1, 11, 10),
    ],
)
def test_the_limit_depends_on_the_kernel(since_message: float, since_packet: float | None, limit: float | None) -> None:
    assert exceeded(since_message, since_packet, 10) == limit


def test_a_kernel_answers_for_a_process_that_does_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        other, _ = server.accept()
        with other:  # reads nothing

            def answers() -> bool:
                before = since_packet(ours)
                ours.send(b"beat")
                after = since_packet(ours)
                return before is not None and after is not None and after < before

            eventually(answers, "what is sent is acknowledged")
            begin = time.monotonic()
            ours.send(b"beat")
            eventually(lambda: since_packet(ours), "time has passed")
            assert (since_packet(ours) or 0.0) < time.monotonic() - begin + 0.5  # the kernel counts in ticks
    one, two = socket.socketpair()
    with one, two:
        assert since_packet(one) is None


class Clock:
    """A loop whose time the test sets."""

    time = 0.0

    def now(self) -> float:
        return self.time

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        self.due = do

    def watch(self, channel: Channel, do: Callable[[], None]) -> None: ...

    def forget(self, channel: Channel) -> None: ...


def test_a_process_that_was_suspended_first_reads_what_came_meanwhile() -> None:
    ours, theirs = socket.socketpair()
    loop, lost = Clock(), list[str]()
    with theirs:
        Link(loop, Channel(ours), 10.0, received=lambda _: None, lost=lambda dead, why: lost.append(why))  # type: ignore[arg-type]
        loop.time = 100.0
        loop.due()
        assert not lost
        loop.time += BEAT_SECONDS
        loop.due()
        assert lost == ["it did not answer for 10 s"]
    ours.close()
