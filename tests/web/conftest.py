"""The page's server, asked without a network."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
from anyio.from_thread import start_blocking_portal
from starlette.testclient import TestClient

from paceline.backends import everywhere
from paceline.backends.watch import Watch
from paceline.web import safety
from paceline.web.server import application

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

HOST = "http://127.0.0.1:7345"


class Page(TestClient):
    """A browser; `token` is that of its server."""

    token: str

    def sign_in(self) -> Page:
        """Exchange the token."""
        self.headers[safety.KEY_HEADER] = self.post("/api/session", json={"token": self.token}).json()["key"]
        return self


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of jobs; there are none."""
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    everywhere._loaded.cache_clear()
    return tmp_path / "home"


@pytest.fixture
def new_page(home: Path) -> Iterator[Callable[..., Page]]:
    """Makes browsers without a session, each with a server of its own."""
    with contextlib.ExitStack() as stack:

        def make(*, read_only: bool = False) -> Page:
            sessions, watch = safety.Sessions(b"s" * 32), Watch()
            stack.callback(watch.close)
            app = application(watch, sessions, {"localhost", "lab"}, read_only=read_only)
            page = Page(app, base_url=HOST)
            page.portal = stack.enter_context(start_blocking_portal())  # one loop for all requests, as servers have
            page.token = sessions.token
            return page

        yield make


@pytest.fixture
def page(new_page: Callable[..., Page]) -> Page:
    """A browser that is signed in."""
    return new_page().sign_in()
