"""Processes of a job that somebody has stopped (SIGSTOP) or killed together: the job ends, and nothing is left."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import eventually

if TYPE_CHECKING:
    from tests.conftest import Paceline

FOREVER = """
    import os, threading
    print("here", os.environ["RANK"], flush=True)
    threading.Event().wait()
"""
# A grandchild in a session of its own, with nothing in its environment, that hears of no end.
FAMILY = """
    import os, subprocess, sys, threading
    child = subprocess.Popen(
        [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)", "grandchild"],
        env={}, start_new_session=True, stdin=-3, stdout=-3, stderr=-3,
    )
    with open(f"grandchild-{os.environ['RANK']}.new", "w") as file:
        file.write(str(child.pid))
    os.rename(file.name, file.name[:-4])
    print("here", flush=True)
    threading.Event().wait()
"""


def status(paceline: Paceline) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((paceline.home / "jobs" / "it" / "status.json").read_text())
    return found


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


def lives(pid: int) -> bool:
    try:
        return state_of(pid) != "Z"
    except OSError:
        return False


def submitted(paceline: Paceline, script: str) -> dict[str, int]:
    """The processes of a job of two ranks that runs."""
    paceline.script(script)
    assert paceline("submit", "-n", "2", "--name", "it", "--grace", "2s", "script.py").returncode == 0
    folder = paceline.home / "jobs" / "it"
    eventually(lambda: len([log for log in folder.glob("logs/0/*.log") if log.stat().st_size]) == 2, "the ranks print")
    eventually(lambda: status(paceline)["state"] == "RUNNING", "the job runs")
    agent = status(paceline)["agent"]["pid"]
    rank = status(paceline)["ranks"][0]["pid"]
    return {"agent": agent, "agent's guard": parent_of(agent), "fork server": parent_of(rank), "rank": rank}


def suspend(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: state_of(pid) == "T", "it is suspended")


@pytest.mark.parametrize(
    ("whom", "now"),
    [
        (("agent",), False),
        (("fork server",), False),
        (("agent", "fork server"), False),
        (("agent", "fork server"), True),
        (("agent's guard",), False),
        (("rank",), True),
        *(pytest.param((one,), True, marks=pytest.mark.nightly) for one in ("agent", "fork server", "agent's guard")),
        pytest.param(("rank",), False, marks=pytest.mark.nightly),
    ],
)
def test_stop_ends_a_job_whose_processes_are_suspended(paceline: Paceline, whom: tuple[str, ...], now: bool) -> None:
    pids = submitted(paceline, FOREVER)
    for one in whom:
        suspend(pids[one])
    done = paceline.succeeds("stop", *(["--now"] if now else []), "it")
    assert "job it stopped" in done.stderr or "job it failed" in done.stderr
    for one in whom:
        if one != "rank" and not (now and one == "fork server"):
            assert f"job it: its {one} (pid {pids[one]}) was suspended; continued to end it" in done.stderr
    guard = pids.pop("agent's guard")
    assert not any(map(lives, pids.values()))
    eventually(lambda: not lives(guard), "it has ended, too: it gives the job's lock back as it ends")


def test_agent_and_fork_server_killed_together_leave_nothing(paceline: Paceline) -> None:
    pids = submitted(paceline, FAMILY)
    guard = pids.pop("agent's guard")
    grandchildren = [int((paceline.folder / f"grandchild-{rank}").read_text()) for rank in (0, 1)]
    assert all(map(lives, grandchildren))
    for one in ("agent", "fork server"):
        suspend(pids[one])  # so that neither acts on the other's end
    for one in ("fork server", "agent"):
        os.kill(pids[one], signal.SIGKILL)
    assert paceline("wait", "it").returncode == 1
    left = [pid for pid in (*pids.values(), *grandchildren) if lives(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == [], "the job is over when nothing of it is left"
    eventually(lambda: not lives(guard), "the guard has ended, too")


def test_a_guard_killed_alone_leaves_nothing(paceline: Paceline) -> None:
    pids = submitted(paceline, FAMILY)
    grandchildren = [int((paceline.folder / f"grandchild-{rank}").read_text()) for rank in (0, 1)]
    os.kill(pids["agent's guard"], signal.SIGKILL)
    eventually(lambda: not any(map(lives, (*pids.values(), *grandchildren))), "all have ended")
    assert paceline("wait", "it").returncode == 1
