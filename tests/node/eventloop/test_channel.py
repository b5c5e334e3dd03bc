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
        *(b"GET / HTTP/1.1\r\n\r\n", b"[1, 2]\n", b"\xff\xfe\n", b"17\n", b"x" * 5000, b"[" * 4000 + b"\n"),
        *(b"z\n", b"zz\n", b"zMTc=\n", encode({"text": "x" * 10_000})[:60] + b"\n"),
    ],
)
def test_nonsense_closes(nonsense: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        reader = Channel(theirs, is_strange=True)
        ours.send(nonsense)
        with pytest.raises(ChannelClosed):
            reader.receive()
        reader.close()


def test_long_messages_are_compressed_and_short_ones_are_not() -> None:
    nodes = {"nodes": [{"id": f"h{number}.{number:08x}", "host": f"h{number}"} for number in range(1000)]}
    assert len(encode(nodes)) < len(json.dumps(nodes)) / 3
    assert decode(encode(nodes)) == nodes
    assert encode({"do": "go"}) == b'{"do": "go"}'


def test_a_message_that_is_too_long_once_decompressed_closes() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        reader = Channel(theirs)
        reader.limit = 4096
        ours.send(encode({"text": "x" * 1_000_000}) + b"\n")
        with pytest.raises(ChannelClosed, match="of more than 4096 bytes"):
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


KEY = b"k" * 32


def authentic(sock: socket.socket, *, accepted: bool, key: bytes = KEY) -> Channel:
    channel = Channel(sock)
    channel.authenticate(key, accepted=accepted)
    return channel


def lines_of(sent: list[dict[str, object]], *, accepted: bool = False, key: bytes = KEY) -> list[bytes]:
    """What goes over the network for these messages, line by line."""
    recorder, tap = socket.socketpair()
    writer = authentic(tap, accepted=accepted, key=key)
    for message in sent:
        writer.send(message)
    writer.close()
    with recorder:
        return [*recorder.makefile("rb")]


def received(*lines: bytes, key: bytes = KEY) -> list[dict[str, object]]:
    """What the acceptor makes of these lines."""
    ours, theirs = socket.socketpair()
    reader = authentic(theirs, accepted=True, key=key)
    with ours:
        ours.sendall(b"".join(lines))
        try:
            return reader.receive()
        finally:
            reader.close()


some = st.lists(st.dictionaries(st.text(max_size=5), st.integers(), max_size=3), min_size=1, max_size=5)


@given(some)
def test_messages_with_checksums_arrive_as_they_were_sent(sent: list[dict[str, object]]) -> None:
    assert received(*lines_of(sent)) == sent


@given(some, st.data())
def test_any_alteration_is_noticed(sent: list[dict[str, object]], data: st.DataObject) -> None:
    stream = bytearray(b"".join(lines_of(sent)))
    where = data.draw(st.integers(0, len(stream) - 1))
    stream[where] ^= data.draw(st.integers(1, 255))
    with pytest.raises(MessageAltered):
        received(bytes(stream), b"\n")


@given(some, st.data())
def test_a_message_that_is_cut_is_noticed(sent: list[dict[str, object]], data: st.DataObject) -> None:
    lines = lines_of(sent)
    which = data.draw(st.integers(0, len(lines) - 1))
    keep = data.draw(st.integers(0, len(lines[which]) - 2))
    with pytest.raises(MessageAltered):
        received(*lines[:which], lines[which][:keep] + b"\n")


@given(some, st.data())
def test_a_dropped_repeated_or_moved_message_is_noticed(sent: list[dict[str, object]], data: st.DataObject) -> None:
    lines = lines_of(sent)
    order = data.draw(st.lists(st.integers(0, len(lines) - 1), min_size=1, max_size=8))
    if order == list(range(len(order))):
        assert received(*(lines[number] for number in order)) == sent[: len(order)]
    else:
        with pytest.raises(MessageAltered):
            received(*(lines[number] for number in order))


@given(some)
def test_a_message_of_the_other_direction_or_another_connection_is_noticed(sent: list[dict[str, object]]) -> None:
    for lines in (lines_of(sent, accepted=True), lines_of(sent, key=b"x" * 32)):
        with pytest.raises(MessageAltered):
            received(*lines)


@pytest.mark.parametrize(
    "nonsense", [b'{"do": "stop"}\n', b"\n", b"x" * 32 + b"{}\n", b"\xff" * 40 + b"\n", b"x" * 5000]
)
def test_what_has_no_checksum_is_noticed(nonsense: bytes) -> None:
    ours, theirs = socket.socketpair()
    reader = authentic(theirs, accepted=True)
    reader.limit = 4096
    with ours, pytest.raises(MessageAltered):
        ours.send(nonsense)
        reader.receive()
    reader.close()
