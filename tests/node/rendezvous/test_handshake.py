"""Whoever listens where an agent should: it is not believed, and can neither hold an agent up nor fill its memory."""

from __future__ import annotations

import os
import resource
import socket
import threading
from contextlib import ExitStack, closing, suppress
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import GENEROUS

from paceline.contract.handshake import HandshakeError
from paceline.node.eventloop.loop import Loop
from paceline.node.rendezvous.handshake import Listener, Network, Survey, connect

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKEN = b"token"
STATUS: Any = {"id": "it", "leads": True, "has_started": True, "has_begun": True, "has_ended": False, "leader": None}


class Stranger:
    """Sends the same to all who connect."""

    def __init__(self, text: bytes) -> None:
        self._text = text
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):  # it is closed
            while True:
                sock, _ = self._listener.accept()
                sock.sendall(self._text)
                threading.Thread(target=sock.recv, args=(1 << 20,), daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


SENT = {
    "HTTP": b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n400 Bad Request",
    "long": b"a" * 5000,
    "a line": b'{"challenge": "3:"}\n' + b" " * 64,
}


@pytest.mark.parametrize("case", SENT)
def test_what_another_program_sends_is_not_taken_for_a_wrong_token(case: str) -> None:
    with closing(Stranger(SENT[case])) as it, pytest.raises(HandshakeError, match="another program answers there"):
        connect("127.0.0.1", it.port, TOKEN, GENEROUS, joins=False)


def test_what_makes_no_sense_is_no_answer() -> None:
    strangers = [Stranger(text) for text in SENT.values()]
    where = [*(("127.0.0.1", it.port) for it in strangers), ("a" * 64 + ".org", 1)]  # no address can be so long
    agents: Any = [{"id": str(number), "address": at, "listen": port} for number, (at, port) in enumerate(where)]
    loop = Loop()
    survey = Survey(loop, agents, TOKEN, GENEROUS)
    assert loop.run_until(lambda: survey.is_over, GENEROUS)
    assert survey.answers == dict.fromkeys("0123")
    for it in strangers:
        it.close()


def test_a_name_that_is_looked_up_for_long_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: is_over.wait() and [])
    loop = Loop()
    survey = Survey(loop, [{"id": "it", "address": "h", "listen": 1}], TOKEN, 0.0)  # type: ignore[typeddict-item]
    assert loop.run_until(lambda: survey.is_over, GENEROUS)
    assert not survey.answers
    is_over.set()


@pytest.fixture
def _many_descriptors() -> Iterator[None]:
    """The next descriptor is above 1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 2048), hard), hard))
    with ExitStack() as stack:
        while (fd := os.dup(0)) <= 1023:
            stack.callback(os.close, fd)
        os.close(fd)
        yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("_many_descriptors")
def test_a_process_with_many_files_is_answered() -> None:
    loop = Loop()
    listener = Listener(loop, TOKEN, lambda: STATUS, lambda channel: channel.close())
    listener.open(0, "127.0.0.1")
    agents: Any = [{"id": "it", "address": "127.0.0.1", "listen": listener.port}]
    survey = Network(loop, TOKEN).survey(agents, GENEROUS)
    assert loop.run_until(lambda: survey.is_over, GENEROUS)
    listener.close()
    assert survey.answers == {"it": STATUS}
