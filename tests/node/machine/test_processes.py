"""Processes and what they have used: real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tests.conftest import eventually

from paceline.node.machine import processes
from paceline.node.signals import HANDLED

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "a (x) b) R 1"
PARENT = f"""
import os, subprocess, sys, time
open("/proc/self/comm", "w").write({NAME!r})
waits = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]
child = subprocess.Popen(waits, stdin=subprocess.PIPE, start_new_session=True)
ended = os.fork() or os._exit(0)
os.waitid(os.P_PID, ended, os.WEXITED | os.WNOWAIT)
print(child.pid, ended, flush=True)
for line in sys.stdin:  # nobody lives long enough to be seen
    subprocess.run([sys.executable, "-S", "-c", "import time\\nwhile time.process_time() < 0.1: pass"])
    print(flush=True)
"""


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def test_a_tree_is_a_process_and_all_that_descend_from_it(parent: subprocess.Popen[str]) -> None:
    assert parent.stdout is not None
    assert parent.stdin is not None
    child, ended = map(int, parent.stdout.readline().split())
    tree = processes.Snapshot().tree(parent.pid)
    assert {pid: it.state == "Z" for pid, it in tree.items()} == {parent.pid: False, child: False, ended: True}
    assert processes.descendants(parent.pid) == [child]
    first = tree[parent.pid]
    assert (first.command, first.parent, tree[child].parent) == (NAME, os.getpid(), parent.pid)
    assert first.start_time == processes.start_time(parent.pid) <= tree[child].start_time
    assert processes.parents(child) == {parent.pid: first.start_time, **processes.parents(parent.pid)}
    assert processes.start_time(ended) is None, "a zombie has ended"
    assert first.resident > 1 << 20
    parent.stdin.write("\n")
    parent.stdin.flush()
    parent.stdout.readline()
    now = processes.look(parent.pid)
    assert now is not None
    assert now.reaped - first.reaped == pytest.approx(0.1, abs=0.08), "of a child that came and went"
    assert 0 < now.cpu < 60


def test_a_process_that_is_gone(parent: subprocess.Popen[str]) -> None:
    parent.kill()
    eventually(lambda: (it := processes.look(parent.pid)) is not None and it.state == "Z", "it has ended")
    parent.wait()
    assert processes.look(parent.pid) is None
    assert processes.Snapshot().tree(parent.pid) == {}
    assert processes.descendants(parent.pid) == []


def test_a_process_that_this_user_may_not_signal(
    parent: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root's, which `sudo` starts: it is no error, and is not counted."""

    def refuse(*_: int) -> None:
        raise PermissionError

    assert parent.stdout is not None
    child, _ = map(int, parent.stdout.readline().split())
    with monkeypatch.context() as patched:
        for name in ("kill", "killpg"):
            patched.setattr(processes.os, name, refuse)
        assert not processes.signal_process(child, signal.SIGTERM)
        assert not processes.signal_process(child, signal.SIGTERM, group=True)
        assert processes.kill_descendants(parent.pid) == 0
    assert processes.kill_descendants(parent.pid) == 1


def test_a_process_that_is_being_reaped_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file is there still, and cannot be opened."""

    def gone(path: str, _: int) -> int:
        raise ProcessLookupError(path)

    with monkeypatch.context() as patched:
        patched.setattr(processes.os, "open", gone)
        assert processes.look(os.getpid()) is None


def test_a_process_that_has_just_been_forked_is_sent_no_signal_yet() -> None:
    """It blocks what its agent handles until it has defaults for these, and one would end it then."""
    for blocked, is_sent in (set(HANDLED), False), ({signal.SIGUSR1}, True), (signal.valid_signals(), True):
        before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        try:
            process = subprocess.Popen(["sleep", "1000"])
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        try:
            assert processes.pass_on(process.pid, signal.SIGUSR1) is is_sent
        finally:
            process.kill()
            process.wait()
