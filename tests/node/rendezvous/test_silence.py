"""What tells an agent that is starved from a machine that is lost."""

from __future__ import annotations

import socket

import pytest
from tests.conftest import eventually

from paceline.node.rendezvous.silence import exceeded, since_packet


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
    one, two = socket.socketpair()
    with one, two:
        assert since_packet(one) is None
