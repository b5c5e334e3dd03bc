"""Connections of whoever does not know the key, and streams that were tampered with, for all that use the net."""

from __future__ import annotations

import contextlib
import resource
import secrets
import socket
import struct
import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import GENEROUS

from paceline.contract import links
from paceline.contract.handshake import Acceptance, HandshakeError, Initiation, OtherVersion, WrongKey, derive_key
from paceline.contract.links import Acceptor, Link, Messages, Stream, initiate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

KEY = derive_key(b"secret", "test")
NUMBER = 7  # of the only peer that may connect
FAMILIES = ["IPv4", "IPv6", "local"]
NO_SOCKET: Any = None


def listening(family: str) -> socket.socket:
    if family == "local":
        return links.listen_here(f"paceline-test-{secrets.token_hex(8)}")
    try:
        return links.listen(address="127.0.0.1" if family == "IPv4" else "::1")
    except OSError:
        pytest.skip(f"no {family} here")


def reach(server: socket.socket) -> socket.socket:
    sock = socket.socket(server.family)
    sock.settimeout(GENEROUS)
    sock.connect(server.getsockname())
    return sock


class Place:
    """A listening socket and what has connected to it, all in this thread."""

    def __init__(self, family: str, stack: contextlib.ExitStack) -> None:
        self.server = stack.enter_context(listening(family))
        self.links: dict[int, Link] = {}
        self.acceptor = stack.enter_context(
            contextlib.closing(
                Acceptor(self.server, KEY, lambda number: number == NUMBER and number not in self.links, 1)
            )
        )
        stack.callback(lambda: [link.socket.close() for link in self.links.values()])

    def turn(self) -> None:
        self.links.update(self.acceptor.accept(0.01))


def meet(here: Place, there: Place) -> None:
    """Let `there` connect to `here` with its number, and exchange messages."""
    there.acceptor.begin(reach(here.server), KEY, NUMBER, 0)
    until = time.monotonic() + GENEROUS
    while not (here.links and there.links):
        assert time.monotonic() < until
        here.turn()
        there.turn()
    assert here.links.keys() == {NUMBER}
    assert there.links.keys() == {0}
    accepted, begun = Messages(here.links[NUMBER], accepted=True), Messages(there.links[0], accepted=False)
    for one, other in ((accepted, begun), (begun, accepted)):
        one.send(b"hello")
        assert other.receive() == b"hello"


def recorded() -> tuple[bytes, bytes]:
    """What both sides of a handshake have sent: 76 and 96 bytes."""
    acceptance, initiation = Acceptance(KEY, lambda _: True), Initiation(KEY, NUMBER)
    answer = acceptance.receive(initiation.hello)
    proof = initiation.receive(answer)
    return initiation.hello + proof, answer + acceptance.receive(proof)


@st.composite
def strange(draw: st.DrawFn) -> bytes:
    """What somebody sends who does not know the key, but may have listened in."""
    up, down = recorded()
    other = Initiation(derive_key(b"guess"), NUMBER).hello
    kind = draw(
        st.sampled_from(["silent", "garbage", "http", "large", "replay", "cut", "flip", "other", "reflect", "guess"])
    )
    cut = draw(st.integers(0, len(up) - 1))
    return {
        "silent": b"",
        "garbage": draw(st.binary(max_size=200)),
        "http": b"GET / HTTP/1.1\r\nHost: here\r\nAccept: */*\r\n\r\n" + bytes(100),
        "large": up[:44] + bytes(1 << 16),
        "replay": up + b"and more",
        "cut": up[:cut],
        "flip": up[:cut] + bytes([up[cut] ^ 1]) + up[cut + 1 :],
        "other": up[:8] + struct.pack("!I", draw(st.integers(0, 9))) + up[12:],
        "reflect": down,
        "guess": other + secrets.token_bytes(32),
    }[kind]


@pytest.mark.parametrize("family", FAMILIES)
@settings(deadline=None, max_examples=25)
@given(streams=st.lists(strange(), max_size=6))
def test_whoever_does_not_know_the_key_gets_nothing_and_delays_nobody(family: str, streams: list[bytes]) -> None:
    with contextlib.ExitStack() as stack:
        here, there = Place(family, stack), Place(family, stack)
        strangers = [stack.enter_context(reach(here.server)) for _ in streams]
        for stranger, stream in zip(strangers, streams, strict=True):
            stranger.sendall(stream)
        meet(here, there)
        here.turn()
        here.acceptor.close()
        for stranger in strangers:
            received = b""
            with contextlib.suppress(ConnectionError):
                while data := stranger.recv(4096):
                    received += data
            assert len(received) in (0, 64)  # a nonce and a proof for that nonce, never the confirmation


@pytest.mark.parametrize("family", FAMILIES)
def test_a_thousand_silent_connections_keep_nobody_out(family: str) -> None:
    """They are more than are held, and their descriptors over 1,023, which `select` could not take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 4096), hard), hard))
    try:
        with contextlib.ExitStack() as stack:
            here, there = Place(family, stack), Place(family, stack)
            silent = []
            for number in range(1100):
                silent.append(stack.enter_context(reach(here.server)))
                if number % 50 == 0:  # the queue of a listener has an end
                    here.turn()
            meet(here, there)
            here.turn()
            silent[0].setblocking(False)
            assert silent[0].recv(1) == b""  # the oldest was dropped
            assert there.links[0].socket.fileno() > 1023
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_silent_connection_is_dropped_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "HANDSHAKE", 0.05)
    with contextlib.ExitStack() as stack:
        here = Place("IPv4", stack)
        silent = stack.enter_context(reach(here.server))
        silent.setblocking(False)
        until = time.monotonic() + GENEROUS
        while time.monotonic() < until:
            here.links.update(here.acceptor.accept())  # which waits no longer than that
            with contextlib.suppress(BlockingIOError):
                assert silent.recv(1) == b""
                break
        assert not here.links


def initiated(answer: Callable[[bytes], bytes], seconds: float = GENEROUS) -> Link:
    """Initiate a connection to somebody who answers a hello with this, and says nothing more."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        hello = Initiation(KEY, NUMBER).hello
        theirs.sendall(answer(hello))
        if seconds == GENEROUS:
            theirs.shutdown(socket.SHUT_WR)
        try:
            return initiate(ours, KEY, NUMBER, seconds)
        finally:
            theirs.settimeout(GENEROUS)
            assert len(theirs.recv(4096)) == len(hello)  # and no proof


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_who_connects_believes_no_garbage_and_proves_nothing_to_it(answer: bytes) -> None:
    with pytest.raises(ConnectionError):
        initiated(lambda _: answer)
    with pytest.raises(ConnectionError):
        initiated(lambda hello: hello + answer)
    with pytest.raises(WrongKey):
        initiated(lambda hello: Acceptance(b"other", lambda _: True).receive(hello) + answer)
    with pytest.raises(WrongKey):
        initiated(lambda _: recorded()[1] + answer)


def test_who_answers_nothing_is_not_waited_for() -> None:
    with pytest.raises(TimeoutError, match="no answer"):
        initiated(lambda _: b"paceln", 0.05)


def test_another_version_says_so_to_who_knows_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    initiation = Initiation(KEY, NUMBER)
    monkeypatch.setattr("paceline.contract.handshake._PROTOCOL", b"paceln99")
    acceptance = Acceptance(KEY, lambda _: True)
    newer = acceptance.receive(initiation.hello)
    monkeypatch.undo()
    with pytest.raises(OtherVersion):
        initiation.receive(newer)
    with pytest.raises(HandshakeError):
        acceptance.receive(bytes(32))
    stranger = Initiation(b"other", NUMBER)
    with pytest.raises(WrongKey):
        stranger.receive(newer)


# -- what is sent after that -------------------------------------------------------------------------------------------


def by_receive(stream: bytes, cuts: Sequence[int]) -> Iterator[bytes]:
    """A reader that waits."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(stream)
        ours.shutdown(socket.SHUT_WR)
        reader = Messages(Link(theirs, KEY), accepted=False)
        while theirs.recv(1, socket.MSG_PEEK):
            yield reader.receive()


def by_feed(stream: bytes, cuts: Sequence[int]) -> Iterator[bytes]:
    """A reader that does not wait, whatever pieces the stream comes in."""
    reader = Messages(Link(NO_SOCKET, KEY), accepted=False)
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        yield from reader.feed(stream[start:end])


def by_take(stream: bytes, cuts: Sequence[int]) -> Iterator[bytes]:
    """The same, which reads from its socket itself."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reader = Stream(Link(theirs, KEY), accepted=False)
        for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            ours.sendall(stream[start:end])
            yield from reader.take()


READERS = [by_receive, by_feed, by_take]


def packed(messages: Sequence[bytes], key: bytes | None = KEY, *, accepted: bool = True) -> list[bytes]:
    writer = Messages(Link(NO_SOCKET, key), accepted=accepted)
    return [writer.pack(message) for message in messages]


@pytest.mark.parametrize("read", READERS)
@settings(deadline=None)
@given(sent=st.lists(st.binary(max_size=50), min_size=1, max_size=4), data=st.data())
def test_messages_arrive_as_they_were_sent_or_not_at_all(
    read: Callable[[bytes, Sequence[int]], Iterator[bytes]], sent: list[bytes], data: st.DataObject
) -> None:
    frames = packed(sent)
    how = data.draw(
        st.sampled_from(["none", "flip", "repeat", "omit", "move", "reflect", "elsewhere", "add", "cut", "claim"])
    )
    which = data.draw(st.integers(0, len(frames) - 1))
    frame = frames[which]
    place = data.draw(st.integers(0, len(frame) - 1))
    if how == "flip":
        frames[which] = frame[:place] + bytes([frame[place] ^ data.draw(st.integers(1, 255))]) + frame[place + 1 :]
    elif how == "repeat":
        frames.insert(which, frame)
    elif how == "omit":
        del frames[which]
    elif how == "move":
        frames.append(frames.pop(which))
    elif how == "reflect":
        frames[which] = packed(sent, accepted=False)[which]
    elif how == "elsewhere":
        frames[which] = packed(sent, derive_key(KEY, "another connection"))[which]
    elif how == "add":
        frames.insert(which, data.draw(st.binary(min_size=24, max_size=60)))
    elif how == "cut":
        frames[which:] = [frame[:place]]
    elif how == "claim":  # that a message of an exabyte comes
        frames[which] = struct.pack("!Q", 1 << 60) + frame[8:]
    stream = b"".join(frames)
    cuts = sorted(data.draw(st.lists(st.integers(1, len(stream) - 1), max_size=4, unique=True))) if stream[1:] else []
    received: list[bytes] = []
    error: OSError | None = None
    try:
        for message in read(stream, cuts):
            received.append(message)
    except OSError as caught:
        error = caught
    assert received == sent[: len(received)]
    intact = stream == b"".join(packed(sent)[: len(received)])
    assert not intact or error is None
    if how == "none":
        assert intact and received == sent
    if how in ("flip", "repeat", "reflect", "elsewhere", "add", "claim"):
        assert isinstance(error, HandshakeError)


@given(st.lists(st.binary(max_size=50), max_size=4), st.integers(1, 30))
def test_between_processes_of_one_family_messages_have_no_checksums(sent: list[bytes], piece: int) -> None:
    stream = b"".join(packed(sent, None))
    assert len(stream) == sum(map(len, sent)) + 8 * len(sent)
    reader = Messages(Link(NO_SOCKET, None), accepted=False)
    assert [it for at in range(0, len(stream), piece) for it in reader.feed(stream[at : at + piece])] == sent
