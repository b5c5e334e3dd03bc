"""A receiver of webhooks: an HTTP server that answers as it is told, and keeps what it was sent."""

from __future__ import annotations

import http.server
import json
import queue
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from tests.conftest import GENEROUS

if TYPE_CHECKING:
    from collections.abc import Iterator


class Request(NamedTuple):
    """What was posted."""

    path: str
    body: dict[str, Any]


class Hook:
    """The server.

    Attributes:
        answers: of the next requests: a status, one with headers and a body, or what happens instead: "close", "never".
    """

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.requests: queue.Queue[Request] = queue.Queue()
        self.is_over = threading.Event()
        hook = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = hook.answers.pop(0) if hook.answers else 200
                hook.requests.put(Request(self.path, sent))
                if answer == "never":
                    hook.is_over.wait(GENEROUS)
                if answer in ("close", "never"):
                    self.close_connection = True
                    return
                status, headers, body = answer if isinstance(answer, tuple) else (answer, {}, b"ok")
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook/a-secret-token?key=another-secret"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def next(self) -> Request:
        """The next request."""
        return self.requests.get(timeout=GENEROUS)

    def close(self) -> None:
        """Listen no more."""
        self.is_over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hook]:
    """A receiver on this machine; no proxy is between."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    found = Hook()
    yield found
    found.close()
