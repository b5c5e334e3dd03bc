"""The server itself: who connects and says nothing, and what the command line refuses."""

from __future__ import annotations

import contextlib
import socket
import threading
import urllib.request
from typing import TYPE_CHECKING

import pytest
from tests.conftest import free_port
from tests.typed import refusal

from paceline.web import server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import Paceline


@pytest.fixture
def served(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[server.Page]:
    """A server that waits half a second for the head of a request."""
    monkeypatch.setattr(server, "_PATIENCE", 0.5)
    page = server.Page("127.0.0.1", 0, tls=None, read_only=False)
    thread = threading.Thread(target=page.serve)
    thread.start()
    yield page
    page.end()
    thread.join(60)
    assert not thread.is_alive()


def port_of(page: server.Page) -> int:
    return int(page.url.partition("/#")[0].rpartition(":")[2])


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow: ", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\nGET / HT"],
)
def test_a_client_that_does_not_finish_its_request_is_closed(served: server.Page, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port_of(served)), 60) as client:
        client.sendall(sent)
        while client.recv(65536):
            pass


@pytest.mark.parametrize("sent", [b"", b"POST /api/session HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{"])
def test_others_are_answered_meanwhile(served: server.Page, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    """More connections that wait than the server has."""
    monkeypatch.setattr(server, "_PATIENCE", 600.0)
    silent = [socket.create_connection(("127.0.0.1", port_of(served)), 60) for _ in range(300)]
    for client in silent:
        with contextlib.suppress(OSError):  # it was closed for a newer one
            client.sendall(sent)
    with urllib.request.urlopen(f"http://127.0.0.1:{port_of(served)}/", timeout=60) as answer:
        assert b"app.js" in answer.read()
    for client in silent:
        client.close()


def test_a_head_that_is_too_long_is_refused(served: server.Page) -> None:
    with socket.create_connection(("127.0.0.1", port_of(served)), 60) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * (1 << 17))
        assert b" 400 " in client.recv(65536)


def test_bad_input_is_one_line(paceline: Paceline) -> None:
    assert "--tls-cert and --tls-key belong together" in refusal(paceline, "web", "--tls-cert", "a.pem")
    assert "a.pem" in refusal(paceline, "web", "--tls-cert", "a.pem", "--tls-key", "b.pem")
    with socket.create_server(("127.0.0.1", port := free_port())):
        assert "choose another --port" in refusal(paceline, "web", "--port", str(port), "--no-browser")
    assert "nowhere.invalid" in refusal(paceline, "web", "--host", "nowhere.invalid")
