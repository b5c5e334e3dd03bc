"""The client of a held job loses its connection, and comes back on another one or not at all."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import GENEROUS, eventually

from paceline.node.machine import processes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# What sshd does: it starts a program, whose stdin and stdout it carries, until either side is gone.
SSHD = """
    import os, subprocess, sys, threading
    program = subprocess.Popen([sys.executable, *sys.argv[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    def say():
        while data := os.read(0, 65536):
            os.write(program.stdin.fileno(), data)
        program.stdin.close()
    threading.Thread(target=say, daemon=True).start()
    while data := os.read(program.stdout.fileno(), 65536):
        os.write(1, data)
    program.wait()
    threading.Event().wait()  # as with a connection that is kept for the next command
"""
FIRST = """
    import sys
    from pathlib import Path
    from paceline.node.host.held import HeldClient
    from paceline.node.rundir.directory import RunDirectory

    folder = Path(sys.argv[1])
    class Noted:
        def send_signal(self, number):
            self.note(number)
        def send(self, word):
            self.note(word.decode())
        def note(self, what):
            with open(folder / "noted", "a") as file:
                print(what, file=file)

    answers = [{"number": number, "data": b"x" * 200_000} for number in range(1, 6)]
    HeldClient(RunDirectory(folder), Noted(), Noted(), float(sys.argv[2])).serve(answers)
"""
SECOND = """
    import sys
    from paceline.node.host.serve import main
    main(sys.argv[1], sys.stdin.buffer.readline())
"""


class Session:
    """A connection to a program."""

    def __init__(self, folder: Path, program: str, *args: str) -> None:
        path, sshd = folder / f"{program}.py", folder / "sshd.py"
        path.write_text(textwrap.dedent({"first": FIRST, "second": SECOND}[program]))
        sshd.write_text(textwrap.dedent(SSHD))
        command = [sys.executable, str(sshd), str(path), *args]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout

    def say(self, *words: str) -> None:
        self.stdin.write("".join(f"{word}\n" for word in words).encode())
        self.stdin.flush()

    def answer(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.stdout.readline())
        assert len(self.stdout.read(size := answer.get("bytes", 0))) == size
        return answer

    def breaks(self) -> None:
        """The connection breaks: sshd is gone, and what was on its way is lost."""
        self.process.kill()
        self.process.wait()

    def children(self) -> list[int]:
        """The programs that run in it."""
        with open(f"/proc/{self.process.pid}/task/{self.process.pid}/children") as file:
            found = [int(pid) for pid in file.read().split()]
        return [pid for pid in found if processes.start_time(pid) is not None]


class Job:
    def __init__(self, folder: Path) -> None:
        self.root = folder
        self.folder = folder / "hosts" / socket.gethostname() / "jobs" / "it"
        self.folder.mkdir(parents=True)
        (self.folder / "spec.json").write_text(json.dumps({"job_id": "one"}))
        self.sessions: list[Session] = []

    def start(self, seconds: float = GENEROUS) -> Session:
        return self._session("first", str(self.folder), str(seconds))

    def rejoin(self, seen: int, job_id: str = "one") -> Session:
        session = self._session("second", str(self.root))
        session.say(json.dumps({"do": "rejoin", "name": "it", "job_id": job_id, "seen": seen}))
        return session

    def _session(self, program: str, *args: str) -> Session:
        self.sessions.append(Session(self.root, program, *args))
        return self.sessions[-1]

    def noted(self) -> list[str]:
        """The signals that the agent got, and what was said to it at last."""
        path = self.folder / "noted"
        return path.read_text().split() if path.exists() else []

    def close(self) -> None:
        for session in self.sessions:
            for pid in session.children() if session.process.poll() is None else ():
                os.kill(pid, signal.SIGKILL)
            session.breaks()
            session.stdin.close()
            session.stdout.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    it = Job(tmp_path)
    yield it
    it.close()


def test_a_client_gets_each_answer_once_over_several_connections(job: Job) -> None:
    session = job.start()
    assert [session.answer()["number"] for _ in range(3)] == [1, 2, 3]
    session.say("signal 10", "seen 1")
    eventually(lambda: job.noted() == ["10"], "the agent has the signal")
    session.breaks()
    session = job.rejoin(2)  # it has the third one, but did not get it
    assert session.answer() == {"rejoined": 1}
    assert session.answer()["number"] == 3
    session.breaks()
    session = job.rejoin(3)
    assert session.answer() == {"rejoined": 1}
    assert [session.answer()["number"] for _ in range(2)] == [4, 5]
    assert session.answer() == {"end": True}
    session.breaks()
    session = job.rejoin(5)  # it has sent all, and waits until the client has it
    assert [session.answer() for _ in range(2)] == [{"rejoined": 1}, {"end": True}]
    session.say("seen 6")
    eventually(lambda: not session.children(), "both processes end")
    assert not (job.folder / "client.sock").exists()
    assert job.noted() == ["10"]


def test_a_client_comes_back_before_the_end_of_its_connection_is_noticed(job: Job) -> None:
    first = job.start()
    assert first.answer()["number"] == 1
    second = job.rejoin(1)
    assert second.answer() == {"rejoined": 0}
    assert second.answer()["number"] == 2
    third = job.rejoin(2)
    assert third.answer() == {"rejoined": 0}
    eventually(lambda: not second.children(), "the process of the connection before has ended")
    first.breaks()
    third.say("signal 12")
    eventually(lambda: job.noted() == ["12"], "it is the connection that counts")
    assert [third.answer()["number"] for _ in range(3)] == [3, 4, 5]
    assert third.answer() == {"end": True}
    third.say("seen 6")
    eventually(lambda: not third.children(), "the job has ended")


def test_a_client_that_ends_ends_the_job_at_once(job: Job) -> None:
    session = job.start()
    session.answer()
    session.stdin.close()
    eventually(lambda: not session.children(), "the process that started the job ends")
    assert job.noted() == []
    assert not (job.folder / "client.sock").exists()


def test_a_client_that_does_not_come_back_is_lost(job: Job) -> None:
    session = job.start(0.1)
    session.answer()
    session.breaks()
    eventually(lambda: job.noted() == ["l"], "the agent is told")
    eventually(lambda: not (job.folder / "client.sock").exists(), "nobody waits for the client any more")
    assert job.rejoin(1).answer() == {"error": "job it does not wait for this command any more"}


def test_another_job_of_the_same_name_is_not_taken_over(job: Job) -> None:
    session = job.start()
    session.answer()
    assert job.rejoin(1, "another").answer() == {"error": "job it does not wait for this command any more"}
    assert session.answer()["number"] == 2
