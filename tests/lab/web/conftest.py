"""A server of the page as a user starts it, and a browser."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from fake_kubernetes.fixtures import cluster, make_cluster, new_cluster, possible  # noqa: F401
from tests.lab.web.browser import Browser, browser

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import Paceline


class Server:
    """`paceline web`.

    Attributes:
        url: that it has printed, with the token.
        pid: of its process.
    """

    def __init__(self, paceline: Paceline, *flags: str) -> None:
        self._paceline, self._flags = paceline, flags
        self.start()

    def start(self, port: int = 0) -> None:
        """Start it, at this port or at a free one."""
        command = [sys.executable, "-m", "paceline", "web", "--no-browser", "--port", str(port), *self._flags]
        options = {"env": self._paceline.env, "cwd": self._paceline.folder, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL, **options)  # type: ignore[call-overload]
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        self.pid = self._process.pid

    @property
    def base(self) -> str:
        """The address without the token."""
        return self.url.partition("#")[0]

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.base.rstrip("/").rpartition(":")[2])

    def end(self) -> None:
        """Ctrl-C."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait(60)


@pytest.fixture
def server(paceline: Paceline) -> Iterator[Server]:
    """The server of this test's home."""
    found = Server(paceline)
    yield found
    found.end()


@pytest.fixture(scope="session")
def _one_browser() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.fixture
def chromium(_one_browser: Browser) -> Iterator[Browser]:
    """A browser that has seen no page of this test, and whose pages report no errors."""
    _one_browser.reset()
    yield _one_browser
    assert not _one_browser.console, _one_browser.console


def many_jobs(paceline: Paceline, count: int) -> None:
    """So many jobs that have ended: one that has run, and others that only the index of jobs has."""
    assert not paceline("run", "-n", "1", "--name", "seed", "--no-python", "true").returncode
    paceline.succeeds("list")
    index = sqlite3.connect(paceline.home / "jobs.db")
    ((finished, text),) = index.execute("SELECT finished, record FROM jobs")
    seed, rows = json.loads(text), []
    for number in range(count - 1):
        folder = paceline.home / "jobs" / f"job-{number:05}"
        folder.mkdir()
        age = 60 * (number + 1)
        times = {key: seed[key] - age for key in ("created", "started", "finished")}
        record = json.dumps({**seed, "name": folder.name, **times})
        rows.append((folder.name, folder.stat().st_ino, finished - age, record))
    with index:
        index.executemany("INSERT INTO jobs (name, identity, finished, record) VALUES (?, ?, ?, ?)", rows)
    index.close()
