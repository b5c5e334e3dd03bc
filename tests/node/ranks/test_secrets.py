"""What the job's token and the ranks' key protect, and that they are written nowhere."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import GENEROUS

from paceline.contract.handshake import Initiation, derive_key, prove
from paceline.node.eventloop.channel import Channel, ChannelClosed, MessageAltered
from paceline.node.eventloop.loop import Loop
from paceline.node.host.routes import Peer, RouteListener, reach
from paceline.node.rendezvous.handshake import Listener, connect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.conftest import Paceline

KEYS = """
    import os, pathlib, sys, time
    attempt, rank = os.environ["PACELINE_ATTEMPT"], os.environ["RANK"]
    key = os.environ["PACELINE_RANK_KEY"]
    new = pathlib.Path(f"new-{attempt}-{rank}")
    new.write_text(key)
    new.rename(f"key-{attempt}-{rank}")
    while len(list(pathlib.Path().glob(f"key-{attempt}-*"))) < 2:  # a rank that fails stops the other
        time.sleep(0.01)
    assert "PACELINE_TOKEN" not in os.environ
    sys.exit(attempt == "0")
"""


@pytest.mark.parametrize("token", [None, "sesame-open-4711"])
def test_ranks_have_a_key_for_each_attempt_that_is_written_nowhere(paceline: Paceline, token: str | None) -> None:
    script = paceline.script(KEYS)
    env = paceline.env if token is None else {**paceline.env, "PACELINE_TOKEN": token}
    dry = paceline("run", "--dry-run", "-n", "2", script, env=env)
    done = paceline.succeeds("run", "-n", "2", "--max-restarts", "1", "--framework", "torch", script, env=env)
    keys = {path.name: path.read_text() for path in paceline.folder.glob("key-*")}
    assert keys.keys() == {"key-0-0", "key-0-1", "key-1-0", "key-1-1"}
    assert keys["key-0-0"] == keys["key-0-1"] != keys["key-1-0"] == keys["key-1-1"]
    assert all(len(key) == 64 for key in keys.values())
    shown = paceline("get", paceline.job().name, "-o", "json")
    told = [dry.stdout, dry.stderr, done.stdout, done.stderr, shown.stdout]
    told += [path.read_text(errors="replace") for path in paceline.home.rglob("*") if path.is_file()]
    for secret in {*keys.values(), *([] if token is None else [token])}:
        assert not any(secret in text for text in told)


class Meeting:
    """An agent's listener, and the connections that it admits."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.admitted: list[Channel] = []
        status = {"id": "a", "leads": True, "has_started": False, "leader": None}
        self.listener = Listener(self.loop, b"token", lambda: status, self.admitted.append)
        self.listener.open(0, "127.0.0.1")

    def while_open(self, work: Callable[[], Any]) -> Any:
        """Accept connections while a thread does this; returns what it returns."""
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(work()))
        thread.start()
        while not self.loop.run_until(lambda: not thread.is_alive(), 0.01):
            pass
        for channel in self.admitted:
            channel.close()
        return results[0]

    def close(self) -> None:
        self.listener.close()


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    with contextlib.closing(Meeting()) as it:
        yield it


def talk(port: int, *messages: bytes) -> list[bytes]:
    """Send one message after the other, each after an answer; returns the answers."""
    answers = []
    with socket.create_connection(("127.0.0.1", port), GENEROUS) as sock, contextlib.suppress(OSError):
        for message in messages:
            sock.sendall(message)
            answers.append(sock.recv(65536))
    return answers


def test_a_node_sends_nothing_secret_before_the_other_side_has_proved_itself() -> None:
    received: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def pose() -> None:
            for _ in range(2):
                with impostor.accept()[0] as sock:
                    received.append(sock.recv(4096))
                    sock.sendall(b"paceln04" + bytes(24 + 32))
                    received.append(sock.recv(4096))

        thread = threading.Thread(target=pose)
        thread.start()
        port = impostor.getsockname()[1]
        with pytest.raises(PermissionError, match="does not know this job's token"):
            connect("127.0.0.1", port, b"token", GENEROUS, joins=True)
        assert reach([Peer("h", "127.0.0.1", port)], b"token") == {"h": "another machine answers there"}
        thread.join(GENEROUS)
    assert [(len(said), said[:8]) for said in received] == [(44, b"paceln04"), (0, b"")] * 2
    assert b"token" not in b"".join(received)


@contextlib.contextmanager
def relayed(meeting: Meeting, alter: Callable[[bytes], bytes]) -> Iterator[int]:
    """A port that leads to the meeting, through a relay that may alter each of the six messages of a meeting."""
    with socket.create_server(("127.0.0.1", 0)) as relay:

        def pass_on() -> None:
            with relay.accept()[0] as guest, socket.create_connection(("127.0.0.1", meeting.listener.port)) as host:
                for _ in range(3):
                    for one, other in ((guest, host), (host, guest)):
                        data = one.recv(4096)
                        if not data:
                            return
                        other.sendall(alter(data))

        thread = threading.Thread(target=pass_on)
        thread.start()
        yield relay.getsockname()[1]
        thread.join(GENEROUS)


def test_recorded_messages_do_not_authenticate(meeting: Meeting) -> None:
    recorded: list[bytes] = []

    def listen_in(data: bytes) -> bytes:
        recorded.append(data)
        return data

    def join() -> bool:
        with relayed(meeting, listen_in) as port:
            channel, status = connect("127.0.0.1", port, b"token", GENEROUS, joins=True)
            channel.close()
            return bool(status["leads"])

    assert meeting.while_open(join)
    count = len(meeting.admitted)
    assert count == 1
    assert b"token" not in b"".join(recorded)
    for second in (recorded[2], recorded[1][32:]):  # its own proof, or that of the other side
        answers = meeting.while_open(
            lambda second=second: talk(meeting.listener.port, recorded[0], second, recorded[4])
        )
        assert len(answers[0]) == 64
        assert not any(answers[1:])
    assert len(meeting.admitted) == count


@pytest.mark.parametrize(
    ("before", "after", "error"),
    [
        (b"paceln04", b"paceln03", PermissionError),
        (b'"joins": false', b'"joins": true ', ChannelClosed),
        (b'"leads": true', b'"leads": false', MessageAltered),
        (b'"leader": null', b'"leader": ["192.0.2.9", 1]', MessageAltered),
    ],
)
def test_a_handshake_that_is_changed_on_the_way_fails(
    meeting: Meeting, before: bytes, after: bytes, error: type[Exception]
) -> None:
    count = len(meeting.admitted)

    def fails() -> bool:
        with relayed(meeting, lambda data: data.replace(before, after)) as port, pytest.raises(error):
            connect("127.0.0.1", port, b"token", GENEROUS, joins=False)
        return True

    assert meeting.while_open(fails)
    assert len(meeting.admitted) == count


def test_another_version_is_told_so(meeting: Meeting) -> None:
    with socket.create_server(("127.0.0.1", 0)) as older:

        def answer() -> None:
            with older.accept()[0] as sock:
                theirs, ours = sock.recv(4096), b"paceln03" + bytes(24)
                sock.sendall(ours + prove(derive_key(b"token", "agents"), "acceptor", theirs, ours))
                sock.recv(4096)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(PermissionError, match="runs another version of paceline; start all nodes with the same"):
            connect("127.0.0.1", older.getsockname()[1], b"token", GENEROUS, joins=True)
        thread.join(GENEROUS)
    answers = meeting.while_open(lambda: talk(meeting.listener.port, b"paceln03" + bytes(36), bytes(32)))
    assert answers[0].startswith(b"paceln04")
    assert not any(answers[1:])


def test_hosts_that_are_tried_prove_themselves_first() -> None:
    with contextlib.closing(RouteListener(b"token", "h1")) as post:
        answers = talk(post.port, Initiation(b"guess", 0).hello, bytes(32))
        assert len(answers[0]) == 64
        assert not any(answers[1:])
        assert reach([Peer("h1", "127.0.0.1", post.port)], b"token") == {"h1": None}
