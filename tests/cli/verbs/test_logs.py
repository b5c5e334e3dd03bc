"""`paceline logs` of real jobs: running, ended, restarted, killed."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pytest
from tests import recorded
from tests.conftest import GENEROUS, eventually
from tests.typed import refusal

from paceline.job.quantities import show_time

if TYPE_CHECKING:
    from tests.conftest import Paceline

# Rank 0 says something, and goes on when the test makes the file `go`.
WAITS = """
    import os, sys, time
    rank = os.environ["RANK"]
    print("begin", rank, flush=True)
    while not os.path.exists("go"):
        time.sleep(0.01)
    print("end", rank, flush=True)
"""


def submit(paceline: Paceline, *args: str) -> None:
    assert paceline.run("--detach", "--name", "job", *args, "script.py").returncode == 0


def status(paceline: Paceline) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((paceline.job() / "status.json").read_text())
    except FileNotFoundError:
        return {"state": "PENDING"}
    return found


def ended(paceline: Paceline) -> None:
    eventually(lambda: status(paceline)["state"] in ("SUCCEEDED", "FAILED", "STOPPED"), "the job has ended")


def follow(paceline: Paceline, *args: str) -> subprocess.Popen[str]:
    return paceline.start("logs", "job", "-f", *args)


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, err = process.communicate(timeout=GENEROUS)
    return out, err


def test_logs_of_a_job_that_has_ended(paceline: Paceline) -> None:
    paceline.script("""
        import os, sys
        rank = int(os.environ["RANK"])
        for i in range(5):
            print(f"loss {i} of {rank}")
        sys.stdout.write("10%\\r100%\\n")
        print("no end", rank, end="")
    """)
    submit(paceline, "-n", "3")
    ended(paceline)
    whole = [f"loss {i} of 0" for i in range(5)] + ["10%\r100%", "no end 0"]
    done = subprocess.run(
        paceline.start("logs", "job").args, capture_output=True, cwd=paceline.folder, env=paceline.env, check=True
    )
    assert done.stdout == "\n".join(whole).encode()  # byte for byte
    assert paceline("logs", "job", "-t", "2", "--grep", "100").stdout.splitlines() == ["10%", "100%"]
    for name in ("2", "worker-1", "job-worker-1"):
        assert paceline("logs", "job", "-i", name, "-t", "1").stdout == "no end 2"
    assert paceline("logs", "job", "-i", "master-0", "--grep", "[13] of").stdout == "loss 1 of 0\nloss 3 of 0\n"
    merged = paceline("logs", "job", "--all").stdout.splitlines()
    for rank in range(3):
        mine = [line.removeprefix(f"[rank {rank}] ") for line in merged if line.startswith(f"[rank {rank}]")]
        assert mine == [f"loss {i} of {rank}" for i in range(5)] + ["100%", f"no end {rank}"]
    assert len(merged) == 21
    assert paceline("logs", "job", "--all", "-t", "4").stdout.splitlines() == merged[-4:]
    two = paceline("logs", "job", "-i", "1", "-i", "master-0").stdout
    assert set(re.findall(r"^\[rank (\d)\]", two, re.M)) == {"0", "1"}
    assert paceline("logs", "job", "--since", "1h").stdout == "\n".join(whole).replace("\r", "\n")
    assert paceline("logs", "job", "--since", "2199-01-01").stdout == ""
    times = [line.split(" ")[0] for line in paceline("logs", "job", "--timestamps").stdout.splitlines()]
    now = time.time()
    for text in times[:5]:
        assert now - GENEROUS * 2 < datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() <= now + 1


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("jop",), "no job 'jop'; did you mean job?"),
        (("job", "-i", "2"), "-i 2: job job has no such instance; it has ranks 0 … 1"),
        (("job", "-i", "worker-1"), "-i worker-1: job job has no such instance; it has ranks 0"),
        (("job", "-i", "other-master-0"), "-i other-master-0: job job has no such instance; it"),
        (("job", "-i", "master-1"), "-i master-1: job job has no such instance; it has"),
        (("job", "--all", "-i", "1"), "--all and -i contradict each other; give one of them"),
        (("job", "--attempt", "3"), "job job has no attempt 3; its only attempt is 0; correct --attempt"),
        (("job", "--grep", "("), "--grep '(' is not a regular expression: "),
        (("job", "--grep", "a{99999999999}"), "--grep 'a{99999999999}' is not a regular expression: "),
        (("job", "--since", "soon"), "--since 'soon' is not a time; write for example 10m, 2h or "),
        (("job", "--since", "10"), "--since '10' has no unit; did you mean 10m?"),
        (("job", "--tail", "-1"), "Invalid value for '-t' / '--tail': -1 is less than 0"),
    ],
)
def test_bad_input_is_one_line(paceline: Paceline, args: tuple[str, ...], said: str) -> None:
    recorded.ended(paceline, "job")
    assert refusal(paceline, "logs", *args).startswith(said)


def test_follow_ends_with_the_job_and_its_exit_code(paceline: Paceline) -> None:
    paceline.script(WAITS + "    sys.exit(3 if rank == '1' else 0)")
    submit(paceline, "-n", "2")
    process = follow(paceline, "--all")
    assert process.stdout is not None
    begun = sorted(process.stdout.readline() for _ in range(2))
    assert begun == ["[rank 0] begin 0\n", "[rank 1] begin 1\n"]
    (paceline.folder / "go").touch()
    out, _ = finish(process)
    assert "[rank 1] end 1\n" in out
    assert process.returncode == 3
    again = paceline("logs", "job", "-f", "-i", "1")  # a job that has ended
    assert (again.returncode, again.stdout) == (3, "begin 1\nend 1\n")
    assert paceline("logs", "job", "-i", "1").returncode == 0


def test_follow_goes_on_over_restarts_and_shows_tracebacks(paceline: Paceline) -> None:
    paceline.script(WAITS + "    assert os.environ['PACELINE_ATTEMPT'] != '0', 'first'")
    paceline.env["PYTHONUNBUFFERED"] = "1"
    submit(paceline, "--max-restarts", "1", "-n", "1")
    process = follow(paceline)
    assert process.stdout is not None
    assert process.stdout.readline() == "begin 0\n"
    (paceline.folder / "go").touch()
    out, err = finish(process)
    assert process.returncode == 0
    assert out.startswith("end 0\nTraceback") and out.endswith("AssertionError: first\nbegin 0\nend 0\n")
    assert err == "paceline: attempt 1 begins\n"
    assert paceline("logs", "job").stdout == "begin 0\nend 0\n"
    for args in ((), ("-f",)):
        first = paceline("logs", "job", "--attempt", "0", *args)
        assert first.stdout.endswith("AssertionError: first\n") and first.stdout.startswith("begin 0\n")


def test_follow_ends_when_the_agent_is_killed(paceline: Paceline) -> None:
    paceline.script(WAITS)
    submit(paceline)
    process = follow(paceline)
    assert process.stdout is not None
    assert process.stdout.readline() == "begin 0\n"
    before = time.time()
    os.kill(status(paceline)["agent"]["pid"], signal.SIGKILL)
    out, err = finish(process)
    assert (process.returncode, out) == (1, "")
    assert err.startswith("paceline: job job failed")
    assert "was killed" in err
    record = paceline.json("get", "job")
    assert record["finished"] >= (show_time(before - 0.1) or ""), (
        "nothing was written by then"
    )  # clocks of files are coarser
    assert paceline("logs", "job").stdout == "begin 0\n"


def test_ctrl_c_ends_the_follower_and_not_the_job(paceline: Paceline) -> None:
    paceline.script(WAITS)
    submit(paceline)
    process = follow(paceline)
    assert process.stdout is not None
    assert process.stdout.readline() == "begin 0\n"
    process.send_signal(signal.SIGINT)
    finish(process)
    assert process.returncode == 130
    eventually(lambda: status(paceline)["state"] == "RUNNING", "the job runs")
    (paceline.folder / "go").touch()
    ended(paceline)
    assert status(paceline)["state"] == "SUCCEEDED"


def test_a_reader_that_goes_away_is_no_error(paceline: Paceline) -> None:
    paceline.script("for i in range(200000): print('a line of the log', i)")
    submit(paceline)
    process = follow(paceline)
    assert process.stdout is not None
    assert process.stdout.readline() == "a line of the log 0\n"
    process.stdout.close()
    assert process.wait(GENEROUS) == 128 + signal.SIGPIPE
    assert process.stderr is not None and process.stderr.read() == ""
    process.stderr.close()
    ended(paceline)


def test_a_progress_bar_moves_on_a_terminal(paceline: Paceline) -> None:
    paceline.script(WAITS.replace('print("end", rank, flush=True)', "pass").replace('"begin", rank,', '"10%", end="",'))
    submit(paceline)
    ours, theirs = pty.openpty()
    process = follow_on(paceline, theirs)
    os.close(theirs)
    text = b""
    while b"10%" not in text:  # no line end has come
        text += os.read(ours, 100)
    (paceline.folder / "go").touch()
    assert process.wait(GENEROUS) == 0
    os.close(ours)


def follow_on(paceline: Paceline, terminal: int) -> subprocess.Popen[str]:
    return paceline.start("logs", "job", "-f", stdout=terminal, stderr=subprocess.DEVNULL)


@pytest.mark.parametrize("flags", [(), ("--raw",), ("-f",), ("--all", "-n2")])
def test_a_job_does_not_command_the_terminal(paceline: Paceline, flags: tuple[str, ...]) -> None:
    paceline.script(r"""
        import os
        os.write(1, b"\x1b[32mgreen\x1b[0m \x1b]52;c;cm0=\x07\n")
    """)
    submit(paceline, *(flag for flag in flags if flag == "-n2"))
    ended(paceline)
    flags = tuple(flag for flag in flags if flag != "-n2")
    code, text = paceline.on_terminal("logs", "job", *flags, stderr=subprocess.DEVNULL)
    assert code == 0
    assert b"\x1b[32mgreen\x1b[0m " in text
    assert (b"\x1b]52;c;cm0=\x07" in text) == ("--raw" in flags)
    assert (rb"\x1b]52;c;cm0=\x07" in text) == ("--raw" not in flags)


def test_bytes_that_are_no_text_pass_through(paceline: Paceline) -> None:
    paceline.script(r"""
        import os
        os.write(1, b"\xff\xfe\x00 one\r\n\x80two\n")
    """)
    submit(paceline)
    ended(paceline)
    args = paceline.start("logs", "job").args
    done = subprocess.run(args, capture_output=True, cwd=paceline.folder, env=paceline.env, check=True)
    assert done.stdout == b"\xff\xfe\x00 one\r\n\x80two\n"
    grep = subprocess.run(
        [*args, "--grep", "two"], capture_output=True, cwd=paceline.folder, env=paceline.env, check=True
    )
    assert grep.stdout == b"\x80two\n"


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]), int(sys.argv[1])))
sys.argv[1:4] = []
from paceline.cli.main import main
sys.exit(main())
"""


@pytest.mark.parametrize("flags", [[], ["--all", "--timestamps"], ["--grep", "the end"], ["-f"], ["-t", "1"]])
def test_a_very_long_line_takes_little_memory(paceline: Paceline, flags: list[str]) -> None:
    """It is shown in pieces: whole where one rank is shown as it is, else each as a line of its own."""
    length = 120 << 20
    recorded.ended(paceline, "job")
    with open(paceline.job() / "logs" / "0" / "rank-0.log", "wb") as file:
        file.seek(length)  # as many zero bytes, which need no disk
        file.write(b" the end\nanother line\n")
    limit = 200 << 20  # bytes of addresses, of which Python has a good part before it reads anything
    with open(paceline.folder / "out", "w+b") as out:
        done = paceline("logs", "job", *flags, python=(sys.executable, "-c", LIMITED, str(limit)), stdout=out)
        assert (done.returncode, done.stderr) == (0, "")
        size = out.seek(0, os.SEEK_END)
        out.seek(max(0, size - 100))
        end = out.read()
        if flags in ([], ["-f"]):
            assert size == length + len(b" the end\nanother line\n")
            out.seek(0)
            assert sum(block.count(b"\n") for block in iter(lambda: out.read(2**20), b"")) == 2
        elif flags[0] == "--grep":
            assert size <= 2 * 2**20
            assert end.endswith(b" the end\n")
        elif flags == ["-t", "1"]:
            assert end == b"another line\n"
        else:
            out.seek(0)
            assert max(map(len, out)) < 2**21
            assert b"the end" in end


def test_follow_says_what_a_job_waits_for(paceline: Paceline) -> None:
    (paceline.folder / "paceline.toml").write_text("[local]\ndevices = 1\n")
    paceline.script("import os, time\nwhile not os.path.exists('go'): time.sleep(0.05)")
    assert paceline("submit", "--gpus", "1", "--name", "first", "script.py").returncode == 0
    eventually(lambda: status(paceline)["state"] == "RUNNING", "it has the device")
    assert paceline("submit", "--gpus", "1", "--name", "second", "script.py").returncode == 0
    second = paceline.home / "jobs" / "second" / "status.json"
    eventually(lambda: second.exists() and json.loads(second.read_text())["waiting"], "it waits")
    follower = paceline.start("logs", "-f", "second", stderr=subprocess.PIPE)
    assert follower.stderr is not None
    assert follower.stderr.readline() == "paceline: job second: waits for 1 device; held by: first\n"
    (paceline.folder / "go").touch()
    assert follower.wait(GENEROUS) == 0
    follower.communicate()
