"""`paceline top`: what jobs and this machine use, once and live."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import socket
import subprocess
import termios
import time
from typing import TYPE_CHECKING, Any

import pytest
from tests import recorded
from tests.conftest import GENEROUS, eventually
from tests.typed import refusal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import Paceline

ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"
WAIT = """
    import os, time
    while not os.path.exists("go on"):
        time.sleep(0.01)
"""


def submit(paceline: Paceline, name: str, *flags: str) -> None:
    (paceline.folder / "paceline.toml").write_text("[local]\ndevices = 3\n")
    paceline.script(WAIT)
    paceline.succeeds("submit", "--name", name, *flags, "script.py")


def finish(paceline: Paceline, *names: str) -> None:
    (paceline.folder / "go on").touch()
    assert paceline("wait", *names).returncode == 0


def state(paceline: Paceline, name: str) -> str | None:
    """What the job's status file says, once it is there."""
    with contextlib.suppress(FileNotFoundError):
        found: str = json.loads((paceline.home / "jobs" / name / "status.json").read_text())["state"]
        return found
    return None


def look(paceline: Paceline, *args: str) -> list[dict[str, Any]]:
    return paceline.json("top", *args)


def test_jobs_and_the_machine(paceline: Paceline) -> None:
    submit(paceline, "busy", "-n", "2", "--devices", "0,2")
    eventually(lambda: state(paceline, "busy") == "RUNNING", "the ranks run")
    submit(paceline, "waits", "--devices", "2")
    # The first line of telemetry may be of a moment when not all ranks were there.
    eventually(lambda: (look(paceline, "job")[1]["processes"] or 0) >= 4, "agent, fork server and ranks are there")
    (waits, busy) = look(paceline, "job")
    assert (busy["name"], busy["state"]) == ("busy", "RUNNING")
    assert (busy["devices_asked"], busy["devices"]) == (["0", "2"], ["0", "2"])
    assert busy["memory"] > 10 << 20
    assert busy["cpu"] >= 0
    assert busy["gpus"] == [], "slot 0 is not GPU 0"
    assert (waits["state"], waits["devices"]) == ("PENDING", [])
    (node,) = look(paceline, "node")
    assert node["devices"] == ["0", "1", "2"]
    assert node["allocated"] == {"0": ["busy"], "2": ["busy"]}
    assert node["cores"] > 0
    assert 0 < node["memory_used"] < node["memory"]
    assert 0 < node["disk_used"] < node["disk"]
    table = paceline("top", "node").stdout.splitlines()
    shown = dict(zip(*(re.split(r"  +", line) for line in table[:2]), strict=True))
    assert (shown["DEVICES"], shown["ALLOCATED"], shown["JOBS"]) == ("3", "2", "busy (0,2)")
    assert table[2] == "slots allocated: 2/3 (67 %)"
    table = paceline("top", "job", "-o", "wide").stdout.splitlines()
    shown = dict(zip(*(re.split(r"  +", line) for line in (table[0], table[2])), strict=True))
    assert [shown[it] for it in ("JOB", "REQUESTED", "ALLOCATED", "DEVICES")] == ["busy", "2", "2", "0,2"]
    assert table[3] == "devices: 3 requested, 2 allocated"
    finish(paceline, "busy", "waits")
    assert look(paceline, "job") == []
    assert [row["name"] for row in look(paceline, "job", "-A")] == ["waits", "busy"]
    (over,) = look(paceline, "job", "busy")
    assert (over["state"], over["cpu"], over["memory"], over["gpus"]) == ("SUCCEEDED", None, None, None)


@pytest.mark.torch
def test_what_a_job_sends_in_each_step(paceline: Paceline) -> None:
    paceline.script("""
        import torch
        import paceline
        with paceline.init(log_every=2) as run:
            sync = paceline.AllReduce(wire="fp16", hierarchical=False)
            model = run.setup(torch.nn.Linear(100, 10), strategy=paceline.Strategy(sync=sync))
            for _ in run.steps(range(20)):
                run.backward(model(torch.ones(2, 100)).sum())
    """)
    assert paceline("submit", "--name", "sends", "-n", "2", "script.py").returncode == 0
    assert paceline("wait", "sends").returncode == 0
    (found,) = look(paceline, "job", "sends")
    sync = found["sync"]
    assert (sync["method"], sync["sent_bytes"]) == ("fp16", 1010 * 2)
    assert 0 < sync["sync_seconds"] < sync["step_seconds"]
    head, row = (re.split(r"  +", line) for line in paceline("top", "job", "sends").stdout.splitlines())
    assert head[-3:] == ["SYNC", "SENT/STEP", "NETWORK/STEP"]
    assert row[-3:-1] == ["fp16", "2.0 KiB"]
    assert re.fullmatch(r"[0-9.]+ ms \([0-9]+ %\)", row[-1])


def test_an_unknown_job(paceline: Paceline) -> None:
    recorded.ended(paceline, "resnet")
    for flags in ((), ("-w",)):
        assert refusal(paceline, "top", "job", "resnot", *flags) == "no job 'resnot'; did you mean resnet?"


def test_in_a_pipe_blocks_come_until_the_job_has_ended(paceline: Paceline) -> None:
    submit(paceline, "a")
    process = paceline.start("top", "job", "a", "-w")
    assert process.stdout is not None
    blocks = [[process.stdout.readline() for _ in range(3)]]
    finish(paceline, "a")
    rest, err = process.communicate(timeout=GENEROUS)
    blocks += [block.splitlines() for block in rest.split("\n\n")]
    assert (process.returncode, err) == (0, "")
    assert blocks[0][0].startswith("JOB")
    assert blocks[0][2] == "\n"
    assert blocks[-1][1].split()[:2] == ["a", "SUCCEEDED"]


def test_it_ends_when_nobody_reads_any_more(paceline: Paceline) -> None:
    process = paceline.start("top", "node", "-w")
    assert process.stdout is not None
    assert process.stdout.readline().startswith("NODE")
    process.stdout.close()
    assert process.wait(GENEROUS) == 0
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()


class Terminal:
    """A terminal, and `paceline top` on it."""

    def __init__(self, paceline: Paceline, *args: str) -> None:
        self.master, self.slave = pty.openpty()
        termios.tcsetwinsize(self.slave, (24, 100)) if hasattr(termios, "tcsetwinsize") else None
        self.modes = termios.tcgetattr(self.slave)
        self.seen = b""

        def control() -> None:
            os.setsid()
            import fcntl

            fcntl.ioctl(self.slave, termios.TIOCSCTTY, 0)

        env = {**paceline.env, "TERM": "xterm"}
        streams = {"stdin": self.slave, "stdout": self.slave, "stderr": self.slave}
        self.process: subprocess.Popen[str] = paceline.start("top", *args, env=env, preexec_fn=control, **streams)

    def wait_for(self, text: bytes) -> None:
        deadline = time.monotonic() + GENEROUS
        while text not in self.seen:
            assert time.monotonic() < deadline, self.seen
            self.seen += os.read(self.master, 65536)

    def type(self, text: bytes) -> None:
        os.write(self.master, text)

    def end(self) -> int:
        """Wait for its end; the terminal must be as it was."""
        code = self.process.wait(GENEROUS)
        modes = termios.tcgetattr(self.slave)
        os.set_blocking(self.master, False)
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.master, 65536):
                self.seen += data
        assert modes == self.modes
        assert self.seen.count(ENTER) == self.seen.count(LEAVE) == 1
        assert b"Traceback" not in self.seen
        return code


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.master)
        os.close(terminal.slave)


@pytest.mark.parametrize(("how", "code"), [("q", 0), ("Ctrl-C", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_on_a_terminal_it_is_drawn_anew_until_one_has_enough(
    paceline: Paceline, terminals: list[Terminal], how: str, code: int
) -> None:
    terminal = Terminal(paceline, "node", "-w")
    terminals.append(terminal)
    terminal.wait_for(ENTER)
    terminal.wait_for(b"NODE")
    terminal.type(b"x")  # means nothing
    before = terminal.seen.count(b"NODE")
    terminal.process.send_signal(signal.SIGWINCH)  # as if it had another size now
    while terminal.seen.count(b"NODE") <= before:
        terminal.seen += os.read(terminal.master, 65536)
    if how.startswith("SIG"):
        terminal.process.send_signal(getattr(signal, how))
    else:
        terminal.type({"q": b"q", "Ctrl-C": b"\x03"}[how])
    assert terminal.end() == code


def test_on_a_terminal_the_last_picture_of_jobs_that_have_ended_stays(
    paceline: Paceline, terminals: list[Terminal]
) -> None:
    submit(paceline, "a")
    terminal = Terminal(paceline, "job", "a", "-w")
    terminals.append(terminal)
    terminal.wait_for(b"RUNNING")
    finish(paceline, "a")
    assert terminal.end() == 0
    assert b"SUCCEEDED" in terminal.seen.partition(LEAVE)[2]


def test_on_a_terminal_each_picture_names_the_target_that_does_not_answer(
    paceline: Paceline, terminals: list[Terminal]
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        options = f'hosts = ["127.0.0.1"]\nport = {unused.getsockname()[1]}\n'
        submit(paceline, "a")
        (paceline.folder / "paceline.toml").write_text(f'[targets.lab]\nbackend = "ssh"\n{options}')
        terminal = Terminal(paceline, "job", "-w")
        terminals.append(terminal)
        for _ in range(2):
            terminal.wait_for(b"its jobs are not shown")
            assert b"\x1b[H" in terminal.seen
            terminal.seen = terminal.seen.partition(ENTER)[1]
        terminal.type(b"q")
        assert terminal.end() == 0
        assert b"paceline: lab: cannot reach" in terminal.seen.partition(LEAVE)[2]
    finish(paceline, "a")


def test_a_terminal_that_cannot_be_drawn_on_gets_blocks(paceline: Paceline) -> None:
    ours, theirs = pty.openpty()
    process = paceline.start("top", "node", "-w", stdout=theirs, env={**paceline.env, "TERM": "dumb"})
    os.close(theirs)
    seen = b""
    while seen.count(b"NODE") < 2:
        seen += os.read(ours, 65536)
    process.kill()
    process.communicate()
    os.close(ours)
    assert ENTER not in seen
