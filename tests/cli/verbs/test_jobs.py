"""Jobs: submit, look, follow, stop; and what is true of them when somebody was killed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests import recorded
from tests.cli.screens import cases
from tests.conftest import eventually
from tests.typed import refusal

from paceline.cli import main
from paceline.cli.flags import where

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.conftest import Paceline

FOREVER = """
    import os, threading
    print("here", os.environ["RANK"], flush=True)
    threading.Event().wait()
"""


def submit(paceline: Paceline, *args: str) -> str:
    done = paceline.succeeds("submit", *args)
    return done.stdout.strip()


def status(paceline: Paceline, name: str) -> dict[str, Any]:
    """The job's status file; empty before there is one."""
    with contextlib.suppress(FileNotFoundError):
        found: dict[str, Any] = json.loads((paceline.home / "jobs" / name / "status.json").read_text())
        return found
    return {}


def running(paceline: Paceline, name: str) -> None:
    """Wait until all ranks of a job run the user's code."""
    folder = paceline.home / "jobs" / name
    eventually(
        lambda: (logs := list(folder.glob("logs/*/*.log"))) and all(log.stat().st_size for log in logs), "ranks print"
    )
    eventually(lambda: status(paceline, name).get("state") == "RUNNING", "the job runs")


def one_line(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    for part in parts:
        assert part in done.stderr


def test_filters_of_list(paceline: Paceline) -> None:
    paceline.script("import sys; sys.exit(int(sys.argv[1]))")
    for name, code, label in (("good", "0", "x=1"), ("bad", "3", "x=2")):
        submit(paceline, "--name", name, "--label", label, "script.py", code)
    assert paceline("wait", "good", "bad").returncode == 3
    assert paceline("wait", "bad", "good").returncode == 3
    assert [job["name"] for job in paceline.json("list")] == ["bad", "good"], "the newest first"
    assert [job["name"] for job in paceline.json("list", "--state", "failed")] == ["bad"]
    assert [job["name"] for job in paceline.json("list", "--label", "x=1")] == ["good"]
    assert [job["name"] for job in paceline.json("list", "--since", "1h")] == ["bad", "good"]
    assert paceline.json("list", "--since", "0.001s") == []
    for args, said in (
        (("list", "--state", "runing"), "--state RUNING: no such state; did you mean RUNNING?"),
        (("list", "--since", "soon"), "--since 'soon' is not a duration"),
        (("list", "--since", "2"), "--since '2' has no unit; did you mean 2h?"),
        (("wait", "--timeout", "60", "good"), "--timeout '60' has no unit; did you mean 60s?"),
        (("prune", "-s", "1"), "--since '1' has no unit; did you mean 1d?"),
        (("prune", "-s", "0"), "--since '0' has no unit; did you mean 0s?"),
    ):
        assert said in refusal(paceline, *args)
    assert len(paceline.json("list")) == 2, "nothing was pruned"
    paceline.env["PACELINE_LOOK_TIMEOUT"] = "5"
    assert refusal(paceline, "list", "-H", "h1") == "PACELINE_LOOK_TIMEOUT: '5' has no unit; did you mean 5s?"


def test_old_jobs_are_left_out_unless_asked_for(paceline: Paceline) -> None:
    recorded.ended(paceline, "old", "new")
    known = status(paceline, "old")
    path = paceline.home / "jobs" / "old" / "status.json"
    path.write_text(json.dumps({**known, "finished": time.time() - 8 * 86400}))
    done = paceline("list")
    assert "old" not in done.stdout
    assert "1 that ended long ago are not shown" in done.stderr
    assert {job["name"] for job in paceline.json("list", "-A")} == {"old", "new"}
    done = paceline("prune", "--dry-run")
    assert ("old" in done.stdout, "new" in done.stdout) == (True, False)
    paceline("prune")
    assert {job["name"] for job in paceline.json("list", "-A")} == {"new"}


def test_a_folder_elsewhere_is_listed_and_deleted(paceline: Paceline) -> None:
    paceline.script("")
    submit(paceline, "--name", "far", "--log-dir", "else where", "script.py")
    paceline("wait", "far")
    assert paceline.json("get", "far")["folder"] == str(paceline.folder / "else where" / "far")
    one_line(paceline("submit", "--name", "far", "--log-dir", "third", "script.py"), "a job named far")
    assert not (paceline.folder / "third" / "far").exists()
    assert paceline("delete", "far").returncode == 0
    assert not list((paceline.folder / "else where").iterdir())
    assert paceline.json("list", "-A") == []


# -- names -------------------------------------------------------------------------------------------------------------


def test_what_is_no_name(paceline: Paceline) -> None:
    paceline.script("")
    for bad in ("a b", "-x", "../x", "x/y", "ü", "a" * 64, ".x"):
        assert "a job name has up to 63" in refusal(paceline, "submit", f"--name={bad}", "script.py")


def test_many_submits_of_one_name_at_the_same_instant(paceline: Paceline) -> None:
    paceline.script("print('x' * 100)")
    processes = [paceline.start("submit", "--name", "same", "script.py") for _ in range(8)]
    results = [(p.communicate()[1], p.returncode) for p in processes]
    assert [code for _, code in results].count(0) == 1
    for err, code in results:
        assert code == 0 or (code == 2 and "a job named same" in err and err.count("\n") == 1), err
    assert paceline("wait", "same").returncode == 0
    assert [path.name for path in (paceline.home / "jobs").iterdir()] == ["same"], "nothing half-made"


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.nightly)])
def test_submits_of_many_processes_at_once(paceline: Paceline, count: int) -> None:
    paceline.script("", "nothing.py")
    paceline.script(f"""
        import os
        from paceline import jobs

        read, write = os.pipe()
        children = []
        for number in range({count}):
            pid = os.fork()
            if not pid:
                os.close(write)
                os.read(read, 1)  # all begin when the last one is there
                code = 1
                try:
                    jobs.submit(jobs.JobSpec(script="nothing.py", name="many-"))
                    code = 0
                finally:
                    os._exit(code)
            children.append(pid)
        os.close(write)
        assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0] * {count}
    """)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=paceline.folder,
        env=paceline.env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    names = [f"many-{number}" for number in range(1, count + 1)]
    assert paceline("wait", *names).returncode == 0
    assert {job["name"]: job["state"] for job in paceline.json("list")} == dict.fromkeys(names, "SUCCEEDED")


# -- stop, wait, delete ------------------------------------------------------------------------------------------------


def test_a_job_that_has_ended_is_not_waited_for_in_vain(paceline: Paceline) -> None:
    paceline.script("pass")
    assert paceline.run("--name", "it", "script.py").returncode == 0
    done = paceline("wait", "--timeout", "0s", "it")
    assert (done.returncode, done.stdout) == (0, "") and "job it succeeded" in done.stderr


def test_wait_gives_up(paceline: Paceline) -> None:
    paceline.script(FOREVER)
    submit(paceline, "--name", "it", "script.py")
    done = paceline("wait", "--timeout", "0.2s", "it")
    assert done.returncode == 124
    assert "it did not end within 0.2s" in done.stderr
    waiting = paceline.start("wait", "it")
    assert waiting.stderr is not None
    assert waiting.stderr.readline().startswith("paceline: waiting for it")
    running(paceline, "it")
    waiting.send_signal(signal.SIGINT)
    waiting.communicate()
    assert waiting.returncode == 130
    assert paceline.json("get", "it")["state"] == "RUNNING", "who waits can leave"
    paceline("stop", "it")


def test_delete_leaves_running_jobs_alone_unless_forced(paceline: Paceline) -> None:
    paceline.script(FOREVER)
    submit(paceline, "--name", "it", "script.py")
    running(paceline, "it")
    one_line(paceline("delete", "it"), "job it has not ended", "paceline stop it")
    assert paceline.json("get", "it")["state"] == "RUNNING"
    assert paceline("delete", "--force", "it").returncode == 0
    assert paceline.json("list", "-A") == []
    assert not list((paceline.home / "jobs").iterdir())


def test_time_limit(paceline: Paceline) -> None:
    paceline.script(FOREVER)
    submit(paceline, "--name", "it", "--time-limit", "0.5s", "script.py")
    done = paceline("wait", "it")
    assert done.returncode == 124
    assert "stopped at its time limit of 0.5 s" in done.stderr
    assert paceline.json("get", "it")["state"] == "FAILED"


# -- what is true after a fault ----------------------------------------------------------------------------------------


def test_a_killed_agent_leaves_no_running_job(paceline: Paceline) -> None:
    paceline.script(FOREVER)
    submit(paceline, "-n", "2", "--name", "it", "script.py")
    running(paceline, "it")
    job = paceline.json("get", "it")
    known = status(paceline, "it")["agent"]
    agent, guard = known["pid"], known["guard"]["pid"]
    os.kill(guard, signal.SIGKILL)  # the agent ends with it, and whoever looks cannot tell which one was killed
    assert paceline("wait", "it").returncode == 1
    after = paceline.json("get", "it")
    assert after["state"] == "FAILED"
    assert (
        f"its agent (pid {agent} on {socket.gethostname()}) was killed, or the guard above it (pid {guard}), and"
        in after["error"]
    )
    assert "paceline resubmit it" in after["error"]
    assert after["finished"] >= job["started"]
    assert [i["state"] for i in after["instances"]] == ["FAILED", "FAILED"]
    eventually(lambda: not paceline.processes(), "the ranks went with it")
    known = status(paceline, "it")
    known["agent"].update(boot="another", pid=os.getpid())  # the number belongs to another process by now
    (paceline.home / "jobs" / "it" / "status.json").write_text(json.dumps(known))
    assert "the machine was restarted" in paceline.json("get", "it")["error"]


def test_a_journal_that_cannot_be_opened(paceline: Paceline) -> None:
    paceline.script(FOREVER)
    submit(paceline, "--name", "it", "script.py")
    running(paceline, "it")
    journal = paceline.home / "jobs" / "it" / "journal.jsonl"
    journal.rename(journal.with_name("before"))
    journal.mkdir()
    shown = paceline.json("get", "it")
    assert shown["state"] == "RUNNING" and "it is no regular file" in shown["error"]
    assert refusal(paceline, "events", "it") == f"cannot read {journal}: it is no regular file"
    os.kill(status(paceline, "it")["agent"]["pid"], signal.SIGTERM)  # it is to record that
    assert paceline("wait", "it").returncode == 1
    error = f"the job's agent has failed: Is a directory: {journal}; see {journal.with_name('agent.log')}"
    shown = paceline.json("get", "it")
    assert (shown["state"], shown["error"], shown["cause"]) == ("FAILED", error, "agent")
    journal.rmdir()


@pytest.mark.parametrize("clients", [4, pytest.param(60, marks=pytest.mark.nightly)])
def test_clients_killed_while_they_submit(paceline: Paceline, clients: int) -> None:
    """Whenever it happens: there is no such job, or a whole one that ends; and its name can be used afterwards."""
    paceline.script("")
    began = time.monotonic()
    submit(paceline, "--name", "whole", "script.py")
    takes = time.monotonic() - began
    for number in range(clients):
        name = f"it-{number}"
        process = paceline.start("submit", "--name", name, "script.py")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(takes * (number + 1) / clients)
        process.kill()
        process.communicate()
        found = paceline("wait", name)
        assert found.returncode in (0, 1, 2), found.stderr
        if found.returncode == 2:
            assert submit(paceline, "--name", name, "script.py") == name
        else:
            assert paceline.json("get", name)["state"] in ("SUCCEEDED", "FAILED")
    for job in paceline.json("list", "-A"):
        assert paceline("wait", job["name"]).returncode in (0, 1)


def test_a_damaged_index_is_made_anew(paceline: Paceline) -> None:
    recorded.ended(paceline, "it")
    before = paceline.json("list")
    index = paceline.home / "jobs.db"
    whole = index.read_bytes()
    for damage in (b"", whole[:100] + b"no database at all" * 1000, whole[:5000]):
        for path in paceline.home.glob("jobs.db*"):
            path.unlink()
        index.write_bytes(damage)
        done = paceline("list", "-o", "json")
        assert json.loads(done.stdout) == before
        assert ("it is rebuilt from the jobs' folders" in done.stderr) == bool(damage), done.stderr
        done = paceline("list", "-o", "json")
        assert (json.loads(done.stdout), done.stderr) == (before, "")
    index.unlink()
    assert paceline.json("list") == before


def test_a_job_is_not_taken_for_an_earlier_one_of_its_name(paceline: Paceline) -> None:
    recorded.ended(paceline, "it")
    (before,) = paceline.json("list")
    for path in (paceline.home / "jobs" / "it").iterdir():  # a new folder often has the inode of one that was removed
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    paceline.folder /= "other"
    paceline.folder.mkdir()
    recorded.ended(paceline, "it")
    (after,) = paceline.json("list")
    assert before["working_dir"] != after["working_dir"] == str(paceline.folder)


def test_an_index_of_another_version_is_made_anew_without_a_word(paceline: Paceline) -> None:
    import sqlite3

    recorded.ended(paceline, "it")
    before = paceline.json("list")
    with contextlib.closing(sqlite3.connect(paceline.home / "jobs.db", isolation_level=None)) as other:
        other.execute("UPDATE jobs SET record = json_remove(record, '$.cause')")
        other.execute("PRAGMA user_version=2")
    done = paceline("list", "-o", "json")
    assert (json.loads(done.stdout), done.stderr) == (before, "")


def test_a_locked_index_is_done_without(paceline: Paceline) -> None:
    import sqlite3

    recorded.ended(paceline, "it")
    before = paceline.json("list")
    other = sqlite3.connect(paceline.home / "jobs.db", isolation_level=None)
    other.execute("PRAGMA locking_mode=EXCLUSIVE")
    other.execute("BEGIN EXCLUSIVE")
    done = paceline("list", "-o", "json")
    other.close()
    assert json.loads(done.stdout) == before
    assert "reading the jobs' folders instead" in done.stderr


@pytest.mark.parametrize("wrong", [{"slow": 5}, {"nodes": "two"}])
def test_a_value_of_another_type_hides_no_other_job(paceline: Paceline, wrong: dict[str, Any]) -> None:
    recorded.ended(paceline, "good", "bad")
    path = paceline.home / "jobs/bad/status.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **wrong}))
    states = {job["name"]: job for job in paceline.json("list", "-A")}
    assert (states["good"]["state"], states["bad"]["error"][:21]) == ("SUCCEEDED", "its folder is damaged")
    paceline.succeeds("delete", "bad")


def test_folders_that_are_no_jobs_are_no_jobs(paceline: Paceline) -> None:
    recorded.ended(paceline, "it")
    jobs = paceline.home / "jobs"
    (jobs / "empty").mkdir()
    (jobs / "file").touch()
    (jobs / "dangling").symlink_to("nowhere")
    done = paceline("list")
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["NAME", "it"]
    assert done.stderr == "", "they are not counted either"


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("spec.json", None), ("job.json", None), ("spec.json", ""), ("job.json", "{}"), ("job.json", '{"spec": 1}'),
        ("status.json", '{"state": "SUCCEEDED", "ranks": [{}]}'), ("status.json", '{"agent": 5}'),
        ("status.json", '{"state": "FAILED", "failure": "boom"}'), ("journal.jsonl", None), ("lock", None),
    ],
)  # fmt: skip
def test_damaged_folders(paceline: Paceline, file: str, content: str | None) -> None:
    """Whatever is missing or makes no sense: every verb goes on, and the job can be deleted."""
    paceline.script("")
    recorded.ended(paceline, "good", "bad")
    path = paceline.home / "jobs" / "bad" / file
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    states = {job["name"]: job["state"] for job in paceline.json("list", "-A")}
    assert (states["good"], states.keys()) == ("SUCCEEDED", {"good", "bad"})
    for verb in ("get", "events", "stop", "logs", "attach", "resubmit", "tensorboard"):
        done = paceline(verb, "bad", *(["--", "true"] if verb == "attach" else ["--stop"] * (verb == "tensorboard")))
        assert "Traceback" not in done.stderr, done.stderr
        if verb == "resubmit" and done.returncode == 0:
            paceline("wait", done.stdout.strip())
    paceline.succeeds("delete", "bad")
    assert not (paceline.home / "jobs" / "bad").exists()
    assert paceline("submit", "--dry-run", "--name", "bad", "script.py").returncode == 0, "its name is free"


def test_folders_that_vanish_hold_nothing_up(paceline: Paceline) -> None:
    paceline.script("")
    for name in ("a", "b", "c"):
        submit(paceline, "--name", name, "--log-dir", "logs", "script.py")
    paceline("wait", "a", "b", "c")
    assert len(paceline.json("list", "-A")) == 3
    subprocess.run(["rm", "-r", paceline.folder / "logs" / "b"], check=True)
    assert {job["name"] for job in paceline.json("list", "-A")} == {"a", "c"}
    assert paceline("prune", "-s", "0s").returncode == 0
    assert paceline.json("list", "-A") == []


def test_many_delete_the_same_jobs(paceline: Paceline) -> None:
    paceline.script("")
    names = [submit(paceline, "--name", "it-", "--ttl", "0.01s", "script.py") for _ in range(6)]
    keep = submit(paceline, "--name", "keep", "script.py")
    paceline("wait", *names, keep)
    processes = [paceline.start(*verb) for verb in (["list"], ["prune"], ["list"], ["prune", "--state", "SUCCEEDED"])]
    for process in processes:
        _, err = process.communicate()
        assert process.returncode == 0, err
    eventually(lambda: [job["name"] for job in paceline.json("list", "-A")] == [keep], "only one is left")
    assert [path.name for path in (paceline.home / "jobs").iterdir()] == [keep]


def test_stopping_twice_is_as_clean_as_once(paceline: Paceline) -> None:
    paceline.script("""
        import os, signal, sys, threading, time
        def stop(*_):
            print("told", flush=True)
            while not os.path.exists("go"):
                time.sleep(0.01)
            open("saved", "w").close()
            sys.exit(0)
        signal.signal(signal.SIGTERM, stop)
        print("here", flush=True)
        threading.Event().wait()
    """)
    submit(paceline, "--name", "it", "script.py")
    running(paceline, "it")
    log = paceline.home / "jobs" / "it" / "logs" / "0" / "rank-0.log"
    assert "is being stopped" in paceline("stop", "--no-wait", "it").stderr
    eventually(lambda: "told" in log.read_text(), "the rank knows")
    again = [paceline.start("stop", "it", "it"), paceline.start("stop", "it")]
    paceline("stop", "--no-wait", "it")
    (paceline.folder / "go").touch()
    for process in again:
        assert "paceline: job it stopped after" in process.communicate()[1]
    assert paceline.json("get", "it")["state"] == "STOPPED"
    assert (paceline.folder / "saved").exists()
    assert "had ended already" in paceline("stop", "it").stderr


def test_stop_now_ends_ranks_that_ignore_sigterm_though_the_agent_hangs(paceline: Paceline) -> None:
    paceline.script("""
        import signal, threading
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("here", flush=True)
        threading.Event().wait()
    """)
    submit(paceline, "--name", "it", "--grace", "10000s", "script.py")
    running(paceline, "it")
    agent = status(paceline, "it")["agent"]["pid"]
    os.kill(agent, signal.SIGSTOP)
    assert paceline("stop", "--now", "it").returncode == 0
    assert paceline.json("get", "it")["state"] == "STOPPED"  # it was continued, and could say so
    eventually(lambda: not paceline.processes(), "the ranks went with it")


def test_a_lock_that_was_removed_makes_no_living_job_dead(paceline: Paceline) -> None:
    paceline.script(FOREVER)
    submit(paceline, "--name", "it", "script.py")
    running(paceline, "it")
    (paceline.home / "jobs" / "it" / "lock").unlink()
    assert paceline.json("get", "it")["state"] == "RUNNING"
    assert paceline("delete", "it").returncode == 2
    paceline("stop", "it")
    eventually(lambda: status(paceline, "it")["state"] == "STOPPED", "it has stopped")
    assert paceline.json("get", "it")["state"] == "STOPPED"


def test_a_disk_that_is_full_changes_no_verdict(paceline: Paceline) -> None:
    paceline.script("""
        import os, sys, time
        print("here", flush=True)
        while not os.path.exists("go"):
            time.sleep(0.01)
        sys.exit(int(sys.argv[1]))
    """)
    paceline.home.mkdir()

    def fill() -> None:
        with open(paceline.home / "fill", "ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))

    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(paceline.home)], check=False)
    if mounted.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        for code in ("0", "3"):
            submit(paceline, "--name", f"it-{code}", "script.py", code)
        running(paceline, "it-0")
        running(paceline, "it-3")
        fill()
        (paceline.folder / "go").touch()
        assert [paceline("wait", f"it-{code}").returncode for code in (0, 3)] == [0, 3]
        assert [paceline.json("get", f"it-{code}")["state"] for code in (0, 3)] == ["SUCCEEDED", "FAILED"]
        fill()
        one_line(paceline("submit", "script.py", "0"), "cannot write to", "No space left on device")
    finally:
        subprocess.run(["umount", "-l", str(paceline.home)], check=True)


def test_a_folder_that_is_gone_when_the_job_starts(paceline: Paceline) -> None:
    (paceline.folder / "paceline.toml").write_text("[local]\ndevices = 1\n")
    paceline.script(FOREVER)
    holder = submit(paceline, "--name", "holder", "--gpus", "1", "script.py")
    running(paceline, holder)
    paceline.script("", "below/script.py")
    submit(paceline, "--name", "it", "--gpus", "1", "--working-dir", "below", "script.py")
    subprocess.run(["rm", "-r", paceline.folder / "below"], check=True)
    paceline("stop", holder)
    done = paceline("wait", "it")
    assert done.returncode == 1
    assert "No such file or directory" in done.stderr
    assert paceline.json("get", "it")["state"] == "FAILED"


@pytest.mark.parametrize(
    "verb",
    [
        "list",
        "submit --name it-{} script.py",
        *(pytest.param(verb, marks=pytest.mark.nightly) for verb in ("get recorded", "wait recorded")),
    ],
)
def test_closed_streams(paceline: Paceline, verb: str) -> None:
    paceline.script("")
    recorded.ended(paceline, "recorded")
    line = f"exec {sys.executable} -m paceline"
    for number, closed in enumerate((">&-", "2>&-", "<&-", "<&- >&- 2>&-", "> /dev/full", "2> /dev/full")):
        done = subprocess.run(
            ["sh", "-c", f"{line} {verb.format(number)} {closed}"], env=paceline.env,
            cwd=paceline.folder, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert "Traceback" not in done.stderr, (closed, done.stderr)
        assert done.returncode == 0 or "/dev/full" in closed, (closed, done.stderr)
    paceline("wait", *(job["name"] for job in paceline.json("list")))


def test_a_home_that_is_none(paceline: Paceline) -> None:
    paceline.script("")
    paceline.env["PACELINE_HOME"] = "relative"
    submit(paceline, "--name", "it", "script.py")
    assert paceline("wait", "it").returncode == 0
    paceline.env["PACELINE_HOME"] = "/dev/null"
    one_line(paceline("list"), "cannot read /dev/null/jobs: Not a directory")
    paceline.env["PACELINE_HOME"] = str(paceline.home)


# -- secrets, attach, resubmit -----------------------------------------------------------------------------------------


def test_attach_runs_a_command_beside_a_rank(paceline: Paceline) -> None:
    (paceline.folder / "below").mkdir()
    paceline.script(FOREVER, "below/script.py")
    submit(paceline, "-n", "2", "--name", "it", "--env", "LR=0.1 $x", "--working-dir", "below", "script.py")
    running(paceline, "it")
    show = "import os; print(os.getcwd(), os.environ['RANK'], os.environ['LR'])"
    for instance, rank in ((), "0"), (("-i", "1"), "1"), (("-i", "worker-0"), "1"), (("-i", "it-master-0"), "0"):
        done = paceline("attach", "it", *instance, "--", sys.executable, "-c", show)
        assert done.stdout == f"{paceline.folder / 'below'} {rank} 0.1 $x\n", done.stderr
    assert paceline("attach", "it", "--", "sh", "-c", "exit 7").returncode == 7
    one_line(paceline("attach", "it", "-i", "2"), "job it has no such instance; it has ranks 0 … 1")
    one_line(paceline("attach", "it", "--", "no-such-program"), "cannot run no-such-program")
    paceline("stop", "it")


def test_what_was_found_out_is_not_what_was_asked_for(paceline: Paceline) -> None:
    paceline.script("import os; print(os.environ['WORLD_SIZE'])")
    name = submit(paceline, "-n", "cpu", "--name", "it", "script.py")
    paceline("wait", name)
    stored = json.loads((paceline.home / "jobs" / "it" / "job.json").read_text())["spec"]
    assert (stored["framework"], stored["ranks"], stored["preload"]) == (None, "cpu", [])
    assert stored["working_dir"] == str(paceline.folder)
    again = paceline("resubmit", "it").stdout.strip()
    assert paceline("wait", again).returncode == 0
    assert paceline("logs", again).stdout == paceline("logs", "it").stdout


def test_from_python(paceline: Paceline) -> None:
    """The example of docs/python.md, and what else `paceline.jobs` has."""
    page = (Path(__file__).parents[3] / "docs" / "python.md").read_text()
    _, example, _, expected, *_ = page.split("```")
    expected = expected.removeprefix("text\n")
    paceline.script("import sys; print(*sys.argv[1:])", "train.py")
    more = """

        import threading

        assert jobs.get(job.name).framework is None, "the script imports none"
        again = jobs.resubmit(job, nproc=1, env={"LR": "1"})
        assert (again.name, jobs.wait(again, "10m").ranks) == ("digits-1-2", 1)
        assert [event["event"] for event in jobs.events(again)][-1] == "finished"
        assert jobs.top(again) == {} and jobs.nodes()[0].cores
        recent = jobs.LogQuery(ranks=0, since="10m")
        assert [it.text for it in jobs.logs(again, recent)] == [it.text for it in jobs.logs(again.name)] != []
        found = jobs.list_jobs()
        assert [it.name for it in found[:2]] == ["digits-1-2", "digits-1"] and found[2].name.startswith("train-")
        assert repr(found[1]).startswith("<Job digits-1 SUCCEEDED target=local ranks=2 age="), found
        assert "<td>digits-1</td><td>SUCCEEDED</td>" in found._repr_html_()
        lock = threading.Lock()
        for wrong in (
            lambda: jobs.get("nosuch"),
            lambda: jobs.submit("train.py", nprocs=2),
            lambda: jobs.submit(lambda: lock),
            lambda: jobs.submit(print, code={"mode": "snapshot"}),
            lambda: jobs.submit(train, 0.1),
            lambda: jobs.submit(train, on="here", hosts="there"),
            lambda: jobs.get("digits-1").result(),
            lambda: jobs.submit(threading.Lock, name="lock").result(),
            lambda: jobs.resubmit("lock", args=[1]),
            lambda: jobs.scaleout("digits-1"),
            lambda: jobs.submit(None),
            lambda: jobs.submit("train.py", grace=5),
            lambda: jobs.submit(train, kwargs=[1]),
            lambda: jobs.get(1),
            lambda: jobs.get("lock", on=1),
            lambda: jobs.wait("lock", "10"),
            lambda: jobs.logs("lock", "10m"),
            lambda: jobs.logs("lock", jobs.LogQuery(since="1")),
            lambda: jobs.logs("lock", jobs.LogQuery(ranks="0")),
            lambda: jobs.submit(train, hosts=1),
            lambda: jobs.submit(train, (1, 2, 3)),
            lambda: jobs.JobSpec("train.py"),
            lambda: jobs.prepare("train.py"),
            lambda: jobs.resubmit("digits-1", env="LR=1"),
            lambda: jobs.delete("nosuch"),
        ):
            try:
                wrong()
            except jobs.UserError as error:
                print(error)
        assert jobs.get("lock").framework is None, "the function imports none"
    """
    (paceline.folder / "client.py").write_text(example.removeprefix("python\n") + textwrap.dedent(more))
    out, err = paceline.start(python=(sys.executable, "client.py")).communicate()
    assert out.startswith(expected), err
    assert out.removeprefix(expected).splitlines() == [
        "no job 'nosuch'",
        "nprocs: unknown argument; did you mean nproc?",
        "<lambda>: the function or its arguments cannot be pickled: cannot pickle '_thread.lock' object; "
        "make what cannot be pickled inside of it",
        "code: a function is all that such a job runs; leave it out",
        "args: write the arguments as a list, such as submit(train, [0.1])",
        "on and hosts both say where; give one",
        "job digits-1 is no function, so it has no result; see paceline logs digits-1",
        "rank 0 of job lock: its result cannot be pickled: TypeError: cannot pickle '_thread.lock' object",
        "the arguments of a function are kept with it; submit it again with others: jobs.submit",
        "local: its jobs keep the machines that they started on",
        "None is no JobSpec, script or function; give one of them",
        "grace: 5 has no unit; did you mean 5s?",
        "kwargs: write the arguments with their names, such as submit(train, kwargs={'lr': 0.1})",
        "1 is no job; give its name, or what `submit` or `get` returned",
        "on: 1 is no target; give its name",
        "seconds: '10' has no unit; did you mean 10s?",
        "'10m' is no LogQuery; write for example LogQuery(ranks=(0, 1), tail=10)",
        "since: '1' has no unit; did you mean 1m?",
        "ranks: '0' are no numbers of ranks; write for example (0, 1), or None for all",
        "hosts: 1 are no names of hosts; write for example ['node1', 'node2']",
        "train: too many positional arguments; correct args and kwargs",
        "JobSpec takes its fields by name, such as name=…",
        "'train.py' is no JobSpec; write for example JobSpec(script='train.py')",
        "env 'LR=1': should be a mapping of names to values",
        "no job 'nosuch'",
    ], err


def test_no_way_around_the_rules_for_names(paceline: Paceline) -> None:
    paceline.script("")
    recorded.ended(paceline, "it")
    for bad in ("../evil", "a b", ".hid"):
        said = f"--name {bad!r}: a job name has up to 63"
        assert refusal(paceline, "resubmit", "it", "--name", bad).startswith(said)
    for verb in ("get", "wait", "stop", "delete", "events", "attach", "resubmit", "logs"):
        assert "no job" in refusal(paceline, verb, "../jobs/it")
    for line, said in (
        ("resume_from: nosuch", "no job 'nosuch' to resume from"),
        ("resume_from: ../..", "a job name has up to 63"),
        ('args: ["a\\0b"]', "zero byte"),
    ):
        (paceline.folder / "job.yaml").write_text(f"script: script.py\n{line}\n")
        assert said in refusal(paceline, "submit", "job.yaml")
    assert [job["name"] for job in paceline.json("list", "-A")] == ["it"]


def test_a_time_limit_of_weeks(paceline: Paceline) -> None:
    paceline.script("")
    submit(paceline, "--name", "it", "--time-limit", "30d", "--grace", "9999999s", "script.py")
    assert paceline("wait", "it").returncode == 0


def test_flags_before_and_behind_a_job_file(paceline: Paceline) -> None:
    paceline.script("import os, sys; print(os.environ['LR'], os.environ['WORLD_SIZE'], *sys.argv[1:])", "sub/train.py")
    (paceline.folder / "sub" / "job.yaml").write_text(
        "script: train.py\nargs: [--epochs, 30]\nenv: {LR: 1e-3}\nranks: 3\n"
    )
    one_line(paceline("submit", "sub/job.yaml"), "no script train.py here, but beside sub/job.yaml", "--working-dir")
    done = paceline.run("--working-dir", "sub", "sub/job.yaml", "-n", "2", "--env", "LR=2")
    assert (done.returncode, done.stdout) == (0, "2 2 --epochs 30\n"), done.stderr
    done = paceline.run("--working-dir", "sub", "sub/job.yaml")
    assert (done.returncode, done.stdout) == (0, "1e-3 3 --epochs 30\n"), done.stderr
    one_line(paceline("submit", "sub/job.yaml", "more"), "only flags may follow it")


def test_a_snapshot_has_the_script_that_was_named_by_its_whole_path(paceline: Paceline) -> None:
    (paceline.folder / "paceline.toml").write_text("[local]\ndevices = 1\n")
    paceline.script(FOREVER, "forever.py")
    holder = submit(paceline, "--name", "holder", "--gpus", "1", "forever.py")
    running(paceline, holder)
    paceline.script("print('old')", "code/s.py")
    here = str(paceline.folder / "code" / "s.py")
    source = ("--sync-mode", "snapshot", "--sync-source", "code")
    submit(paceline, "--name", "it", "--gpus", "1", *source, here)
    paceline.script("print('new')", "code/s.py")
    one_line(paceline("submit", *source, str(paceline.folder / "forever.py")), "is not in code, which is copied")
    done = paceline("submit", *source, "nosuch.py")
    one_line(done, f"no script nosuch.py in {paceline.folder / 'code'}; check the name and the folder")
    paceline("stop", holder)
    assert paceline("wait", "it").returncode == 0
    assert paceline("logs", "it").stdout == "old\n"


def test_a_folder_on_a_disk_that_is_not_mounted(paceline: Paceline) -> None:
    paceline.script("")
    submit(paceline, "--name", "it", "--log-dir", "disk", "script.py")
    paceline("wait", "it")
    link = paceline.home / "jobs" / "it"
    (paceline.folder / "disk").rename(paceline.folder / "away")
    os.utime(link, (0, 0), follow_symlinks=False)  # it was not made just now
    (job,) = paceline.json("list", "-A")
    assert "is gone; is a disk not mounted?" in job["error"]
    assert paceline.json("get", "it")["error"] == job["error"]
    (paceline.folder / "away").rename(paceline.folder / "disk")
    assert [job["state"] for job in paceline.json("list", "-A")] == ["SUCCEEDED"]
    (paceline.folder / "disk").rename(paceline.folder / "away")
    assert paceline("delete", "it").returncode == 0
    assert not link.is_symlink()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_client_that_is_told_to_end_while_it_copies(paceline: Paceline, number: int) -> None:
    source = paceline.folder / "source"
    source.mkdir()
    for index in range(3000):
        (source / f"file-{index}").write_bytes(bytes(2000))
    paceline.script("", "source/script.py")
    process = paceline.start(
        "submit", "--name", "it", "--sync-mode", "snapshot", "--sync-source", "source", "script.py"
    )
    jobs = paceline.home / "jobs"

    def copies() -> bool:
        with contextlib.suppress(FileNotFoundError):  # a folder gets its name just now
            return bool(list(jobs.glob(".it.*/code/.it.paceline.*/code/file-*")))
        return False

    eventually(lambda: copies() or process.poll() is not None, "it copies")
    process.send_signal(number)
    process.communicate()
    if process.returncode:  # else it was quicker
        assert process.returncode in (128 + number, -number)
        assert list(jobs.iterdir()) == []
    else:
        paceline("wait", "it")


# -- what others may put in the way ------------------------------------------------------------------------------------


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_index_is_the_users_alone(paceline: Paceline) -> None:
    """It contains command lines and labels, so only its owner may read it; one that others may read is fixed."""
    recorded.ended(paceline, "it")
    before = os.umask(0o022)
    try:
        paceline.json("list")
        assert (mode(paceline.home), mode(paceline.home / "jobs.db")) == (0o700, 0o600)
        paceline.home.chmod(0o755)
        (paceline.home / "jobs.db").chmod(0o644)
        paceline.json("list")
        assert (mode(paceline.home), mode(paceline.home / "jobs.db")) == (0o700, 0o600)
        (paceline.home / "notes").touch()  # the folder is for other things too
        paceline.home.chmod(0o755)
        paceline.json("list")
        assert mode(paceline.home) == 0o755
    finally:
        os.umask(before)


FILES = ("status.json", "job.json", "spec.json", "journal.jsonl", "progress.json", "tensorboard.json", "lock")
DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000
NESTED = '{"time": 1.0, "event": "x", "data": ' + "[" * 900 + "]" * 900 + "}"  # can be read, but not shown


@pytest.mark.parametrize("what", ["fifo", "deep", "nested", "huge", "folder", "device"])
def test_one_strange_file_holds_up_no_other_job(paceline: Paceline, what: str) -> None:
    names = {file: f"bad-{file.partition('.')[0]}" for file in FILES}
    recorded.ended(paceline, "good", *names.values())
    for file, name in names.items():
        path = paceline.home / "jobs" / name / file
        path.unlink(missing_ok=True)
        if what == "fifo":
            os.mkfifo(path)
        elif what == "folder":
            path.mkdir()
        elif what == "device":
            path.symlink_to("/dev/zero")
        elif what == "huge":
            with open(path, "wb") as sparse:
                sparse.truncate(1 << 40)
        else:
            path.write_text(DEEP if what == "deep" else NESTED)
    for output in ("table", "json", "yaml"):
        done = paceline.succeeds("list", "-A", "-o", output)
        assert "Traceback" not in done.stderr, done.stderr
    found = {job["name"]: job for job in paceline.json("list", "-A")}
    assert (found["good"]["state"], found["good"]["error"]) == ("SUCCEEDED", None)
    for file in ("job.json", "spec.json"):
        assert found[names[file]]["state"] == "FAILED"
        assert "its folder is damaged" in found[names[file]]["error"]
    assert found[names["status.json"]]["state"] == ("FAILED" if what == "folder" else "SUCCEEDED"), "it is a cache"
    for verb in ("get", "events", "stop", "logs"):
        for name in names.values():
            assert "Traceback" not in paceline(verb, name).stderr
    assert (what == "huge") or paceline("logs", "-f", "bad-journal").stdout == "hello from 0\n"
    assert paceline("delete", *names.values()).returncode == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"started": "soon"}, {"finished": 1e300}, {"finished": "x"}, {"state": ["FAILED"]}, {"devices": [1, None]},
        {"started": -1e12}, {"waiting": "x", "state": "PENDING"},
    ],
)  # fmt: skip
def test_values_that_make_no_sense_hold_up_no_other_job(paceline: Paceline, changes: dict[str, Any]) -> None:
    recorded.ended(paceline, "good", "bad")
    path = paceline.home / "jobs" / "bad" / "status.json"
    path.write_text(json.dumps({**status(paceline, "bad"), "agent": None, **changes}))
    for output in ("wide", "json"):
        done = paceline.succeeds("list", "-A", "-o", output)
        assert "good" in done.stdout
        assert "bad" in done.stdout


PROGRESSES: Any = (
    {"epoch": 1}, {"epoch": "x", "step": 1}, {"samples_per_second": {}}, {"seconds_left": [1]}, {"time": "soon"},
    {"sync": {"method": "m"}}, {"sync": 3}, {"replicas": []}, {"metrics": {"loss": "x"}}, {"metrics": [1]},
    {"samples_per_second": float("nan")},
)  # fmt: skip


def test_progress_that_makes_no_sense_holds_up_no_other_job(paceline: Paceline) -> None:
    names = [f"bad-{number}" for number in range(len(PROGRESSES))]
    recorded.ended(paceline, "good", *names)
    whole = {"epoch": 1, "epochs": 2, "step": 3, "steps": 4, "metrics": {"loss": 0.5}}
    for name, changes in zip(["good", *names], [{}, *PROGRESSES], strict=True):
        found = changes if "epoch" in changes else {**whole, **changes}
        (paceline.home / "jobs" / name / "progress.json").write_text(json.dumps(found))
    shown = {job["name"]: job["progress"] for job in paceline.json("list", "-A")}
    assert shown == {"good": whole, **dict.fromkeys(names)}
    for verb in (("list", "-A"), ("top", "job")):
        assert "Traceback" not in paceline.succeeds(*verb).stderr


@pytest.mark.parametrize("what", ["fifo", "folder", "device", "huge"])
def test_what_is_no_log_is_not_read_for_ever(paceline: Paceline, what: str) -> None:
    recorded.ended(paceline, "it")
    for name in ("logs/0/rank-1.log", "logs/0/times", "telemetry.jsonl", "metrics.jsonl"):
        path = paceline.home / "jobs" / "it" / name
        path.unlink(missing_ok=True)
        if what == "fifo":
            os.mkfifo(path)
        elif what == "folder":
            path.mkdir()
        elif what == "device":
            path.symlink_to("/dev/zero")
        else:
            with open(path, "wb") as sparse:
                sparse.truncate(1 << 40)
    done = paceline.succeeds("logs", "--all", "--tail", "1", "it")
    assert ("hello from 0" in done.stdout) == (what != "huge")
    paceline.succeeds("report", "it", "-o", "it.html")
    assert (paceline.folder / "it.html").stat().st_size < 2e6, "of a line without an end, its end is shown"


@pytest.mark.parametrize("what", ["fifo", "deep", "{}", '{"type": 1, "message": [], "traceback": null, "time": 0}'])
def test_a_strange_error_record_ends_no_agent(paceline: Paceline, what: str) -> None:
    """A rank can write what it likes where its exception is recorded; its exit code counts."""
    paceline.script(f"""
        import os, sys
        path = os.environ["PACELINE_ERROR_FILE"]
        if {what!r} == "fifo":
            os.mkfifo(path)
        else:
            open(path, "w").write({(DEEP if what == "deep" else what)!r})
        print("wrote", flush=True)
        os._exit(5)
    """)
    done = paceline.run("--name", "it", "script.py")
    assert done.returncode == 5, done.stderr
    assert "agent has failed" not in done.stderr
    assert "wrote" in done.stdout
    assert paceline.json("get", "it")["exit_code"] == 5


def test_events_have_each_checkpoint_and_an_end_that_no_agent_recorded(paceline: Paceline) -> None:
    paceline.script("""
        import json, os, signal, time
        from pathlib import Path
        from paceline.train.checkpoint.history import note
        for step in (400, 500):
            note(step, Path("checkpoints"))
        status = json.loads(Path(os.environ["PACELINE_RUN_DIR"], "status.json").read_text())
        os.kill(status["agent"]["pid"], signal.SIGKILL)
        time.sleep(60)
    """)
    submit(paceline, "--name", "it", "script.py")
    assert paceline("wait", "it").returncode == 1
    events = paceline.json("events", "it")
    assert [(event["event"], event.get("step")) for event in events if event["event"] != "warm"] == [
        ("submitted", None), ("started", None), ("checkpoint", 400), ("checkpoint", 500), ("finished", None)
    ]  # fmt: skip
    assert events[-1]["state"] == "FAILED"
    assert "agent" in events[-1]["why"]


def test_each_screen_has_the_same_start_and_duration(paceline: Paceline) -> None:
    """What its ranks import counts."""
    paceline.script("print('here')")
    slow = paceline.folder / "slow.py"
    slow.write_text("import time; time.sleep(1)")
    done = paceline.succeeds("run", "--name", "it", "--preload", "slow", "script.py")
    job = paceline.json("get", "it")
    (begun,) = [event["time"] for event in paceline.json("events", "it") if event["event"] == "started"]
    assert job["started"] == begun
    (imported,) = [event for event in paceline.json("events", "it") if event["event"] == "imported"]
    assert imported["seconds"] >= 1.0
    (line,) = [line for line in paceline("get", "it").stdout.splitlines() if line.startswith("duration")]
    took = line.removeprefix("duration").strip()
    assert float(took.removesuffix(" s")) >= 1.0
    assert f"after {took}\n" in paceline("why", "it").stdout
    assert f"job it succeeded after {took}\n" in done.stderr
    assert f"job it succeeded after {took}\n" in paceline("wait", "it").stderr
    assert paceline("list").stdout.endswith(f"  {took}\n")


def test_events_and_get_say_which_rank_failed(paceline: Paceline) -> None:
    paceline.script("""
        import os
        if os.environ["PACELINE_ATTEMPT"] == "0" and os.environ["RANK"] == "1":
            raise ValueError("a bad value")
    """)
    assert paceline("submit", "-n", "2", "--max-restarts", "1", "--name", "it", "script.py").returncode == 0
    assert paceline("wait", "it").returncode == 0
    host = socket.gethostname()
    (line,) = [line for line in paceline("events", "it").stdout.splitlines() if "restarting" in line]
    assert line.split("restarting")[1].strip() == (
        f"failure: rank 1 on {host}: ValueError: a bad value; attempt=1 restarts=1 nodes=1"
    )
    (line,) = [line for line in paceline("get", "it").stdout.splitlines() if line.startswith("last restart")]
    assert line.endswith(f"Z: rank 1 on {host}: ValueError: a bad value")


@pytest.mark.parametrize("method", ["fork", "exec"])
def test_processes_are_called_what_they_are(paceline: Paceline, method: str) -> None:
    paceline.script(FOREVER, "a script.py")
    submit(paceline, "-n", "2", "--start-method", method, "--name", "it", "a script.py")
    running(paceline, "it")
    ranks = {f"a script.py (rank {rank} of 2, job it)" for rank in range(2)}
    agents = {f"paceline: {what} of job it" for what in ("guard", "agent", "fork server")}

    def titles() -> set[str]:
        found = set()
        for pid in paceline.processes():
            with contextlib.suppress(OSError):  # it has just ended
                found.add(Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode())
        return found

    eventually(lambda: titles() >= ranks | agents, "all have their titles")
    paceline("stop", "--now", "it")


class Removing(cases.Recorded):
    """A backend that removes a job while another one is waited for."""

    def wait(self, names: Sequence[str], timeout: float | None, tick: Any) -> bool:
        self._jobs = [cases.job("b", "SUCCEEDED")]
        return True

    def suspend(self, names: Sequence[str]) -> dict[str, str]:
        self._jobs = [cases.job("b", "SUSPENDED")]
        return {}

    resume = suspend


@pytest.mark.parametrize(("state", "says", "code"), [("FAILED", "job a failed", 1), ("RUNNING", "has been removed", 1)])
def test_a_job_that_is_removed_while_others_are_waited_for_hides_no_outcome(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], state: str, says: str, code: int
) -> None:
    there = Removing("local", [cases.job("a", state), cases.job("b")])
    monkeypatch.setattr(where, "_backend_of", lambda names, given: there)
    monkeypatch.setattr(there, "ask_on", lambda say: None)
    monkeypatch.setattr(sys, "argv", ["paceline", "wait", "a", "b"])
    assert main.run() == code
    err = capsys.readouterr().err
    assert says in err and "job b succeeded" in err


@pytest.mark.parametrize("flags", [(), ("--no-wait",)])
def test_a_job_that_is_removed_while_it_is_suspended_hides_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    there = Removing("local", [cases.job("a"), cases.job("b")])
    monkeypatch.setattr(where, "_backend_of", lambda names, given: there)
    monkeypatch.setattr(sys, "argv", ["paceline", "suspend", *flags, "a", "b"])
    assert main.run() == 1
    said = capsys.readouterr().err
    assert "job a has been removed meanwhile" in said and "job b is suspended" in said
