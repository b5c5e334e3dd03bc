"""The ranks of one machine find each other, whatever other users of the machine connect to."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.conftest import GENEROUS

from paceline.contract import links as net
from paceline.train.group import local_links
from paceline.train.group.local_links import LocalListener
from paceline.train.group.neighbours import Neighbours, NeighboursError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

NOBODY = 65534
RANKS = 5

STRANGER = """
import contextlib, os, resource, socket, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 30000), hard))
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
how, *names = sys.argv[1:]
held = []
def connect(name):
    one = socket.socket(socket.AF_UNIX)
    one.setblocking(False)
    one.connect("\\0" + name)
    held.append(one)
    if how == "talks":
        one.send(b"\\0" * 200)
for name in names:
    with contextlib.suppress(OSError):  # its queue is full, or there are too many files
        for _ in range(5000 if how == "floods" else 20):
            connect(name)
print("connected", flush=True)
while how == "floods":
    for name in names:
        try:
            connect(name)
        except BlockingIOError:
            pass
        except OSError:  # too many files, or it is gone
            held.clear()
sys.stdin.read()
"""


@contextlib.contextmanager
def stranger(how: str, names: Sequence[str]) -> Iterator[None]:
    """A process of another user that has connected to these sockets."""
    command = [sys.executable, "-S", "-c", STRANGER, how, *names]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"connected\n"
            yield
        finally:
            process.kill()


def names_here() -> list[str]:
    """The abstract sockets at which this process listens."""
    own = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            own |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(f"/proc/self/fd/{descriptor}")))
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return [row[7][1:] for row in rows if len(row) == 8 and row[6] in own and row[7].startswith("@paceline-")]


class Telling:
    """Gathers texts from threads, as ranks do; `between` runs while all wait for the first ones."""

    def __init__(self, between: Callable[[], None] = lambda: None) -> None:
        self._barrier = threading.Barrier(RANKS, timeout=GENEROUS)
        self._said = [""] * RANKS
        self._between: Callable[[], None] | None = between

    def by(self, position: int) -> Callable[[str], list[str]]:
        def tell(text: str) -> list[str]:
            self._said[position] = text
            self._barrier.wait()
            said = list(self._said)
            if position == 0 and self._between is not None:
                self._between()
                self._between = None
            self._barrier.wait()
            return said

        return tell


def neighbours(telling: Telling) -> list[str]:
    """What each rank reads from the file that they share, or why there is none."""

    def join(position: int) -> str:
        files: list[int] = []

        def use(file: int) -> None:
            files.append(os.dup(file))

        try:
            links = Neighbours(position, RANKS, 4096, telling.by(position), use, timeout=GENEROUS)
        except NeighboursError as error:
            return str(error)
        try:
            if position == 0:
                os.pwrite(files[0], b"shared", 0)
            links.meet(1)
            return os.pread(files[0], 6, 0).decode()
        finally:
            links.close()
            os.close(files[0])

    with ThreadPoolExecutor(RANKS) as threads:
        return list(threads.map(join, range(RANKS)))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
@pytest.mark.parametrize("how", ["is silent", "talks", "floods"])
def test_processes_of_other_users_hold_up_no_rank(how: str) -> None:
    with contextlib.ExitStack() as strangers:
        telling = Telling(lambda: strangers.enter_context(stranger(how, names_here())))
        assert neighbours(telling) == ["shared"] * RANKS


def test_ranks_whose_users_have_other_numbers_here_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(net, "peer_of", lambda _: (os.getpid(), NOBODY))  # as in another user namespace
    assert neighbours(Telling()) == ["shared"] * RANKS


def test_a_rank_without_the_key_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_links, "SECONDS", 2.0)
    one, other, impostor = LocalListener(), LocalListener(), LocalListener()
    address = one.address.partition(",")[0] + "," + impostor.address.partition(",")[2]  # the name, and another key

    def fails(connect: Callable[[], object]) -> str:
        with pytest.raises(OSError, match="another") as error:
            connect()
        return type(error.value).__name__

    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(fails, lambda: one.connect(0, {}, [1]))
        cheating = threads.submit(fails, lambda: other.connect(1, {0: address}, []))
        assert (waiting.result(), cheating.result()) == ("TimeoutError", "PermissionError")
    for each in (one, other, impostor):
        each.close()


def test_a_rank_that_is_gone_is_not_waited_for() -> None:
    one, other = LocalListener(), LocalListener()
    one.close()
    with pytest.raises(ConnectionRefusedError):
        other.connect(1, {0: one.address}, [])
    other.close()
