"""The fork server ends all that the ranks and their launchers have left, and says so."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

THREADS = """
import pathlib, signal, sys, threading, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for _ in range(300):
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
pathlib.Path(sys.argv[1]).touch()
time.sleep(1000)
"""
SERVER = """
import select, socket, sys, threading, time, types
from pathlib import Path
from paceline.node.eventloop.channel import Channel
from paceline.node.ranks.forkserver import ForkServer

ours, theirs = (Channel(each) for each in socket.socketpair())

def agent():
    try:
        for number in range(5):
            ready = Path(f"ready-{number}")
            for name, command in ("short", ["sleep", "1000"]), ("it", [sys.executable, "-c", sys.argv[1], str(ready)]):
                ours.send({"do": "spawn", "name": name, "command": command, "env": {}})
            while not ready.exists():
                time.sleep(0.01)
            ours.send({"do": "sweep", "grace": 0.0})
            events = []
            while "swept" not in events:
                select.select([ours], [], [])
                events += [message["event"] for message in ours.receive()]
            print(*events, flush=True)
    finally:
        ours.close()

server = ForkServer(types.SimpleNamespace(start_method="exec"), theirs)
threading.Thread(target=agent, daemon=True).start()
assert server.serve() is None
"""
REFUSED = """
import os, select, socket, threading, types
from paceline.node.agent import guard
from paceline.node.eventloop.channel import Channel
from paceline.node.machine import processes
from paceline.node.ranks.forkserver import ForkServer

kill = os.kill
def refuse(*_):
    raise PermissionError
os.kill = refuse
processes.adopt_orphans()
ours, theirs = (Channel(each) for each in socket.socketpair())

def agent():
    try:
        events = []
        ours.send({"do": "spawn", "name": "it", "command": ["sh", "-c", "sleep 1000 &"], "env": {}})
        for last in "ended", "swept":
            while last not in events:
                select.select([ours], [], [])
                events += [message["event"] for message in ours.receive()]
            ours.send({"do": "sweep", "grace": 0.0})
        print(*events, flush=True)
    finally:
        ours.close()

server = ForkServer(types.SimpleNamespace(start_method="exec"), theirs)
threading.Thread(target=agent, daemon=True).start()
try:
    assert server.serve() is None
    guard._end_others()
finally:
    left = processes.descendants(os.getpid())
    for pid in left:
        kill(pid, 9)
assert len(left) == 1
"""
BUSY = """
import select, socket, threading, types
from paceline.node.eventloop.channel import Channel
from paceline.node.ranks.forkserver import ForkServer

ours, theirs = (Channel(each) for each in socket.socketpair())
server = ForkServer(types.SimpleNamespace(start_method="exec"), theirs)
sent = 0
while not theirs.wants_write:
    server._send({"event": "ended", "name": str(sent), "status": 0})
    sent += 1

def agent():
    try:
        names = []
        while len(names) < sent and select.select([ours], [], [], 20)[0]:
            names += [message["name"] for message in ours.receive()]
        print(names == [str(number) for number in range(sent)], flush=True)
    finally:
        ours.close()

threading.Thread(target=agent, daemon=True).start()
assert server.serve() is None
"""


def test_what_is_swept_has_been_reaped_before(tmp_path: Path) -> None:
    """A process with many threads is a zombie for a while before it can be reaped; another one ends meanwhile."""
    done = subprocess.run(
        [sys.executable, "-c", SERVER, THREADS], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["spawned spawned ended ended swept"] * 5


def test_what_may_not_be_signalled_is_left() -> None:
    """As `sudo …` in the background: neither the fork server nor the guard waits for it, or fails."""
    done = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "spawned ended swept\n"


def test_an_agent_that_is_busy_has_all_messages_later() -> None:
    """The fork server sends what its socket did not take at first, also if nothing more happens."""
    done = subprocess.run([sys.executable, "-c", BUSY], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
