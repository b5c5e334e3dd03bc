"""The server itself: who connects and says nothing, and what the command line refuses."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import urllib.request
from typing import TYPE_CHECKING

import pytest
from tests.conftest import eventually, free_port
from tests.typed import refusal

from paceline.web import safety, server

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
    """More connections wait than may: the oldest are closed."""
    monkeypatch.setattr(server, "_PATIENCE", 600.0)
    silent = [socket.create_connection(("127.0.0.1", port_of(served)), 60) for _ in range(300)]
    for client in silent:
        with contextlib.suppress(OSError):  # it was closed for a newer one
            client.sendall(sent)
    with urllib.request.urlopen(f"http://127.0.0.1:{port_of(served)}/", timeout=60) as answer:
        assert b"app.js" in answer.read()
    with contextlib.suppress(ConnectionResetError):
        assert not silent[0].recv(1)
    for client in silent:
        client.close()


def test_others_are_answered_if_all_come_at_once(served: server.Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that are closed for newer ones do not count, though what was begun for them has not ended yet."""
    monkeypatch.setattr(server, "_PATIENCE", 600.0)
    begun = b"POST /api/session HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{"
    received, holds, may_go_on = threading.Semaphore(0), threading.Event(), threading.Event()
    receive = server._Impatient.data_received

    def data_received(self: server._Impatient, data: bytes) -> None:
        if data == b"hold":
            holds.set()
            assert may_go_on.wait(60)
        receive(self, data)
        received.release()

    monkeypatch.setattr(server._Impatient, "data_received", data_received)

    def connections(number: int, sent: bytes) -> list[socket.socket]:
        found = [socket.create_connection(("127.0.0.1", port_of(served)), 60) for _ in range(number)]
        for client in found:
            client.sendall(sent)
        return found

    session = http.client.HTTPConnection("127.0.0.1", port_of(served), timeout=60)
    session.request("POST", "/api/session", json.dumps({"token": served.url.partition("#token=")[2]}))
    answer = session.getresponse()
    headers = {"Cookie": answer.headers["Set-Cookie"].partition(";")[0], safety.KEY_HEADER: json.load(answer)["key"]}
    pages = [http.client.HTTPConnection("127.0.0.1", port_of(served), timeout=60) for _ in range(3)]
    for page in pages:
        page.request("GET", "/api/changes", headers=headers)
        assert page.getresponse().status == 200  # it is open, and stays so
    while received.acquire(blocking=False):
        pass
    silent = connections(server._MOST_WAITING, begun)
    assert all(received.acquire(timeout=60) for _ in silent)
    silent += connections(1, b"hold")
    assert holds.wait(60)
    silent += connections(2 * server._MOST_WAITING, begun)
    (asks,) = connections(1, b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    may_go_on.set()
    assert b" 200 " in asks.recv(65536)
    for client in [*silent, asks, session, *pages]:
        client.close()


ASK = b"GET /vendor/uplot.js HTTP/1.1\r\nHost: localhost\r\n\r\n"


def not_reading(page: server.Page, number: int, sent: bytes) -> list[socket.socket]:
    """Connections with requests of which nobody reads the answers."""
    page._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # of the connections, too
    found = []
    for _ in range(number):
        found.append(client := socket.socket())
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", port_of(page)))
        client.sendall(sent)
    return found


def test_an_answer_that_nobody_takes_ends_the_connection(served: server.Page) -> None:
    (client,) = not_reading(served, 1, ASK)
    assert client.recv(1)
    eventually(lambda: not served._server.server_state.connections, "it is closed")
    with contextlib.closing(client), contextlib.suppress(ConnectionResetError):
        while client.recv(65536):
            pass


def test_requests_that_wait_for_no_answer_end_the_connection(
    served: server.Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_PATIENCE", 600.0)
    (client,) = not_reading(served, 1, 2 * ASK)
    with client, contextlib.suppress(ConnectionResetError):
        while client.recv(65536):
            pass


def test_answers_that_nobody_takes_leave_room_for_others(served: server.Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_PATIENCE", 600.0)
    clients = not_reading(served, 300, ASK)
    with urllib.request.urlopen(f"http://127.0.0.1:{port_of(served)}/", timeout=60) as answer:
        assert b"app.js" in answer.read()
    eventually(lambda: len(served._server.server_state.connections) <= server._MOST_OPEN, "the oldest are closed")
    for client in clients:
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
