"""Messages arrive whole and in order, however the stream is cut; nonsense closes it, and so does what was altered."""

from __future__ import annotations

import json
import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.node.eventloop.channel import Channel, ChannelClosed, MessageAltered, decode, encode

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
messages = st.lists(st.dictionaries(st.text(), values, max_size=3), max_size=3)


def framed(data: bytes) -> bytes:
    """What is sent between processes that inherit a socket."""
    return len(data).to_bytes(8, "big") + data


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
    sent = [{"n": n, "text": os.urandom(50_000).hex()} for n in range(50)]
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
    "nonsense",
    [
        b"[1, 2]",
        b"\xff\xfe",
        b"17",
        b"",
        b"x" * 5000,
        b"[" * 4000,
        b"z",
        b"zz",
        b"zMTc=",
        encode({"x": "x" * 9999})[:30],
    ],
)
def test_nonsense_closes(nonsense: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        reader = Channel(theirs)
        ours.send(framed(nonsense))
        with pytest.raises(ChannelClosed):
            reader.receive()
        reader.close()


def test_long_messages_are_compressed_and_short_ones_are_not() -> None:
    nodes = {"nodes": [{"id": f"h{number}.{number:08x}", "host": f"h{number}"} for number in range(1000)]}
    assert len(encode(nodes)) < len(json.dumps(nodes)) / 3
    assert decode(encode(nodes)) == nodes
    assert encode({"do": "go"}) == b'{"do": "go"}'


def test_a_message_that_is_too_long_once_decompressed_closes() -> None:
    with pytest.raises(ChannelClosed, match="of more than 4096 bytes"):
        decode(encode({"text": "x" * 1_000_000}), 4096)


def test_what_was_sent_before_the_end_is_received() -> None:
    ours, theirs = socket.socketpair()
    ours.send(framed(b'{"last": 1}'))
    ours.close()
    reader = Channel(theirs)
    assert reader.receive() == [{"last": 1}]
    with pytest.raises(ChannelClosed) as error:
        reader.receive()
    assert error.value.is_dead
    reader.close()


@pytest.mark.parametrize(
    "nonsense",
    [
        framed(b'{"do": "stop", "signal": 15}'),
        framed(encode({"text": "x" * 1_000_000})),
        bytes(24),
        b"\xff" * 40,
        b"x" * 5000,
    ],
    ids=["short", "compressed", "zeros", "ones", "text"],
)
def test_what_has_no_checksum_is_noticed(nonsense: bytes) -> None:
    ours, theirs = socket.socketpair()
    reader = Channel(theirs, b"k" * 32, accepted=True)
    with ours, pytest.raises(MessageAltered):  # before anything is decompressed
        ours.send(nonsense)
        reader.receive()
    reader.close()
