"""Messages arrive whole and in order, however the stream is cut; nonsense closes it."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.node.eventloop.channel import Channel, ChannelClosed

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
messages = st.lists(st.dictionaries(st.text(), values, max_size=3), max_size=5)


@given(messages, st.integers(1, 50))
def test_messages_survive_any_cut(sent: list[dict[str, object]], piece: int) -> None:
    ours, theirs = socket.socketpair()
    recorder, tap = socket.socketpair()
    with ours, recorder:
        writer = Channel(tap)
        for message in sent:
            writer.send(message)
        writer.close()
        stream = b""
        while data := recorder.recv(65536):
            stream += data
        reader, received = Channel(theirs), []
        for start in range(0, len(stream), piece):
            ours.send(stream[start : start + piece])
            received += reader.receive()
        assert received == sent
        reader.close()


def test_large_messages_wait_for_a_slow_reader() -> None:
    ours, theirs = socket.socketpair()
    writer, reader = Channel(ours), Channel(theirs)
    sent = [{"n": n, "text": "x" * 100_000} for n in range(50)]
    for message in sent:
        writer.send(message)
    assert writer.wants_write
    received: list[object] = []
    while len(received) < len(sent):
        received += reader.receive()
        writer.flush()
    assert received == sent
    writer.close()
    reader.close()


@pytest.mark.parametrize(
    "nonsense", [b"GET / HTTP/1.1\r\n\r\n", b"[1, 2]\n", b"\xff\xfe\n", b"17\n", b"x" * 5000, b"[" * 4000 + b"\n"]
)
def test_nonsense_closes(nonsense: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        reader = Channel(theirs, limit=4096)
        ours.send(nonsense)
        with pytest.raises(ChannelClosed):
            reader.receive()
        reader.close()


def test_what_was_sent_before_the_end_is_received() -> None:
    ours, theirs = socket.socketpair()
    ours.send(b'{"last": 1}\n')
    ours.close()
    reader = Channel(theirs)
    assert reader.receive() == [{"last": 1}]
    with pytest.raises(ChannelClosed):
        reader.receive()
    reader.close()
