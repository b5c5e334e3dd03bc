"""Jobs: submit, look, follow, stop; and what is true of them when somebody was killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
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
STABLE = {
    "name", "state", "backend", "framework", "nodes", "ranks", "attempt", "exit_code", "created", "started", "finished",
    "instances", "error",
}  # fmt: skip


def get(paceline: Paceline, name: str) -> dict[str, Any]:
    done = paceline("get", name, "-o", "json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def listed(paceline: Paceline, *args: str) -> list[dict[str, Any]]:
    done = paceline("list", "-o", "json", *args)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def submit(paceline: Paceline, *args: str) -> str:
    done = paceline("submit", *args)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def running(paceline: Paceline, name: str) -> dict[str, Any]:
    """A job once all its ranks run the user's code."""
    folder = paceline.home / "jobs" / name
    eventually(
        lambda: (logs := list(folder.glob("logs/*/*.log"))) and all(log.stat().st_size for log in logs), "ranks print"
    )
    eventually(lambda: get(paceline, name)["state"] == "RUNNING", "the job runs")
    return get(paceline, name)


def one_line(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    for part in parts:
        assert part in done.stderr


def test_a_job_from_beginning_to_end(paceline: Paceline) -> None:
    paceline.script("""
        import os
        print("hello from", os.environ["RANK"])
    """)
    done = paceline("submit", "-n", "2", "--name", "mine", "--label", "team=a b;$(c)'\"", "script.py")
    assert (done.returncode, done.stdout) == (0, "mine\n"), done.stderr
    assert "paceline logs -f mine" in done.stderr
    assert paceline("wait", "mine").returncode == 0

    job = get(paceline, "mine")
    assert job.keys() >= STABLE
    assert (job["state"], job["exit_code"], job["ranks"], job["backend"]) == ("SUCCEEDED", 0, 2, "local")
    assert job["labels"] == {"team": "a b;$(c)'\""}
    assert [(i["name"], i["rank"], i["state"], i["exit_code"]) for i in job["instances"]] == [
        ("mine-master-0", 0, "SUCCEEDED", 0), ("mine-worker-0", 1, "SUCCEEDED", 0),
    ]  # fmt: skip
    assert job["created"] <= job["started"] <= job["finished"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", job["created"])
    assert [job["name"] for job in listed(paceline)] == ["mine"]
    table = paceline("list").stdout.splitlines()
    assert table[0].split()[:2] == ["NAME", "STATE"]
    assert table[1].split()[:2] == ["mine", "SUCCEEDED"]
    shown = paceline("get", "mine").stdout
    for text in ("SUCCEEDED (exit code 0)", "mine-worker-0", "script.py"):
        assert text in shown
    assert [e["event"] for e in json.loads(paceline("events", "mine", "-o", "json").stdout)] == ["started", "finished"]
    assert "finished" in paceline("events", "mine").stdout


def test_filters_of_list(paceline: Paceline) -> None:
    paceline.script("import sys; sys.exit(int(sys.argv[1]))")
    for name, code, label in (("good", "0", "x=1"), ("bad", "3", "x=2")):
        submit(paceline, "--name", name, "--label", label, "script.py", code)
    assert paceline("wait", "good", "bad").returncode == 3
    assert [job["name"] for job in listed(paceline)] == ["bad", "good"], "the newest first"
    assert [job["name"] for job in listed(paceline, "--state", "failed")] == ["bad"]
    assert [job["name"] for job in listed(paceline, "--label", "x=1")] == ["good"]
    assert [job["name"] for job in listed(paceline, "--since", "1h")] == ["bad", "good"]
    assert listed(paceline, "--since", "0.001s") == []
    one_line(paceline("list", "--state", "runing"), "did you mean RUNNING")
    one_line(paceline("list", "--since", "soon"), "--since 'soon' is no time")


def test_old_jobs_are_left_out_unless_asked_for(paceline: Paceline) -> None:
    paceline.script("")
    for name in ("old", "new"):
        submit(paceline, "--name", name, "script.py")
    paceline("wait", "old", "new")
    status = paceline.home / "jobs" / "old" / "status.json"
    known = json.loads(status.read_text())
    status.write_text(json.dumps({**known, "finished": time.time() - 8 * 86400}))
    done = paceline("list")
    assert "old" not in done.stdout
    assert "1 that ended long ago are not shown" in done.stderr
    assert {job["name"] for job in listed(paceline, "-A")} == {"old", "new"}
    done = paceline("prune", "--dry-run")
    assert ("old" in done.stdout, "new" in done.stdout) == (True, False)
    paceline("prune")
    assert {job["name"] for job in listed(paceline, "-A")} == {"new"}


def test_foreground_jobs_are_known_too(paceline: Paceline) -> None:
    paceline.script("raise SystemExit(4)")
    assert paceline.run("--name", "here", "script.py").returncode == 4
    assert (get(paceline, "here")["state"], get(paceline, "here")["exit_code"]) == ("FAILED", 4)


def test_a_folder_elsewhere_is_listed_and_deleted(paceline: Paceline) -> None:
    paceline.script("")
    submit(paceline, "--name", "far", "--log-dir", "else where", "script.py")
    paceline("wait", "far")
    assert get(paceline, "far")["folder"] == str(paceline.folder / "else where" / "far")
    one_line(paceline("submit", "--name", "far", "--log-dir", "third", "script.py"), "a job named far")
    assert not (paceline.folder / "third" / "far").exists()
    assert paceline("delete", "far").returncode == 0
    assert not list((paceline.folder / "else where").iterdir())
    assert listed(paceline, "-A") == []


# -- names -------------------------------------------------------------------------------------------------------------


def test_names_are_unique_or_numbered(paceline: Paceline) -> None:
    paceline.script("")
    assert submit(paceline, "--name", "a", "script.py") == "a"
    one_line(paceline("submit", "--name", "a", "script.py"), "a job named a", "--name")
    assert [submit(paceline, "--name", "a-", "script.py") for _ in range(2)] == ["a-1", "a-2"]
    assert submit(paceline, "script.py").startswith("script-")
    for bad in ("a b", "-x", "../x", "x/y", "ü", "a" * 64, ".x"):
        one_line(paceline("submit", f"--name={bad}", "script.py"), "a job name has up to 63")


def test_unknown_jobs(paceline: Paceline) -> None:
    one_line(paceline("get", "digits"), "no job 'digits'; there is none yet")
    paceline.script("")
    submit(paceline, "--name", "digits", "script.py")
    for verb in ("get", "wait", "stop", "delete", "events", "attach", "resubmit", "logs"):
        one_line(paceline(verb, "digist"), "no job 'digist'", "did you mean digits?")
        one_line(paceline(verb, "../jobs/digits"), "no job")


@pytest.mark.parametrize("name", ["same", "same-"])
def test_many_submits_at_the_same_instant(paceline: Paceline, name: str) -> None:
    paceline.script("print('x' * 100)")
    processes = [paceline.start("submit", "--name", name, "script.py") for _ in range(8)]
    results = [(p.communicate(), p.returncode) for p in processes]
    names = sorted(out.strip() for (out, _), code in results if code == 0)
    assert names == (["same"] if name == "same" else [f"same-{i}" for i in range(1, 9)])
    for (_, err), code in results:
        assert code == 0 or (code == 2 and "a job named same" in err and err.count("\n") == 1), err
    assert paceline("wait", *names).returncode == 0
    assert sorted(job["name"] for job in listed(paceline)) == names
    assert sorted(path.name for path in (paceline.home / "jobs").iterdir()) == names, "nothing half-made"


def test_two_hundred_submits_at_once(paceline: Paceline) -> None:
    paceline.script("", "nothing.py")
    paceline.script("""
        import os
        from paceline import jobs

        read, write = os.pipe()
        children = []
        for number in range(200):
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
        assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0] * 200
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
    names = [f"many-{number}" for number in range(1, 201)]
    assert paceline("wait", *names).returncode == 0
    assert {job["name"]: job["state"] for job in listed(paceline)} == dict.fromkeys(names, "SUCCEEDED")


# -- stop, wait, delete ------------------------------------------------------------------------------------------------


def test_stop_is_clean(paceline: Paceline) -> None:
    paceline.script("""
        import signal, sys, threading
        signal.signal(signal.SIGTERM, lambda *_: (open("told", "w").close(), sys.exit(0)))
        print("here", flush=True)
        threading.Event().wait()
    """)
    submit(paceline, "--name", "it", "script.py")
    assert running(paceline, "it")["exit_code"] is None
    done = paceline("stop", "it")
    assert done.returncode == 0
    assert "paceline: job it stopped after" in done.stderr
    assert (paceline.folder / "told").exists()
    assert get(paceline, "it")["state"] == "STOPPED"
    assert "had ended already" in paceline("stop", "it").stderr


def test_stop_now(paceline: Paceline) -> None:
    paceline.script("""
        import signal, threading
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("here", flush=True)
        threading.Event().wait()
    """)
    submit(paceline, "--name", "it", "--grace", "10000", "script.py")
    running(paceline, "it")
    assert paceline("stop", "--now", "it").returncode == 0
    assert get(paceline, "it")["state"] == "STOPPED"


def test_stop_right_after_submit(paceline: Paceline) -> None:
    paceline.script(FOREVER)
    for number in range(5):
        name = submit(paceline, "--name", f"it-{number}", "script.py")
        assert paceline("stop", name).returncode == 0
        assert get(paceline, name)["state"] == "STOPPED"


def test_wait_gives_up(paceline: Paceline) -> None:
    paceline.script(FOREVER)
    submit(paceline, "--name", "it", "script.py")
    done = paceline("wait", "--timeout", "0.2s", "it")
    assert done.returncode == 124
    assert "it did not end within 0.2s" in done.stderr
    waiting = paceline.start("wait", "it")
    running(paceline, "it")
    waiting.send_signal(signal.SIGINT)
    waiting.communicate()
    assert waiting.returncode == 130
    assert get(paceline, "it")["state"] == "RUNNING", "who waits can leave"
    paceline("stop", "it")


def test_delete_leaves_running_jobs_alone_unless_forced(paceline: Paceline) -> None:
    paceline.script(FOREVER)
    submit(paceline, "--name", "it", "script.py")
    running(paceline, "it")
    one_line(paceline("delete", "it"), "job it has not ended", "paceline stop it")
    assert get(paceline, "it")["state"] == "RUNNING"
    assert paceline("delete", "--force", "it").returncode == 0
    assert listed(paceline, "-A") == []
    assert not list((paceline.home / "jobs").iterdir())


def test_time_to_live(paceline: Paceline) -> None:
    paceline.script("")
    submit(paceline, "--name", "short", "--ttl", "0.001s", "script.py")
    submit(paceline, "--name", "long", "--ttl", "7d", "script.py")
    paceline.home.joinpath("jobs", "short").resolve()
    eventually(lambda: [job["name"] for job in listed(paceline, "-A")] == ["long"], "its time is over")
    assert not (paceline.home / "jobs" / "short").exists()
    paceline("wait", "long")


def test_time_limit(paceline: Paceline) -> None:
    paceline.script(FOREVER)
    submit(paceline, "--name", "it", "--time-limit", "0.5s", "script.py")
    done = paceline("wait", "it")
    assert done.returncode == 124
    assert "stopped at its time limit of 0.5 s" in done.stderr
    assert get(paceline, "it")["state"] == "FAILED"


# -- what is true after a fault ----------------------------------------------------------------------------------------


def test_a_killed_agent_leaves_no_running_job(paceline: Paceline) -> None:
    paceline.script(FOREVER)
    submit(paceline, "-n", "2", "--name", "it", "script.py")
    job = running(paceline, "it")
    agent = json.loads((paceline.home / "jobs" / "it" / "status.json").read_text())["agent"]["pid"]
    os.kill(agent, signal.SIGKILL)
    assert paceline("wait", "it").returncode == 1
    after = get(paceline, "it")
    assert after["state"] == "FAILED"
    assert f"its agent (pid {agent}) was killed" in after["error"]
    assert "paceline resubmit it" in after["error"]
    assert after["finished"] >= job["started"]
    assert [i["state"] for i in after["instances"]] == ["FAILED", "FAILED"]
    eventually(lambda: not paceline.processes(), "the ranks went with it")


def test_after_a_restart_of_the_machine_nothing_runs(paceline: Paceline) -> None:
    paceline.script(FOREVER)
    submit(paceline, "--name", "it", "script.py")
    running(paceline, "it")
    path = paceline.home / "jobs" / "it" / "status.json"
    status = json.loads(path.read_text())
    os.kill(status["agent"]["pid"], signal.SIGKILL)
    paceline("wait", "it")
    status["agent"]["boot"] = "another"
    status["agent"]["pid"] = os.getpid()  # the number belongs to another process by now
    path.write_text(json.dumps(status))
    job = get(paceline, "it")
    assert job["state"] == "FAILED"
    assert "the machine was restarted" in job["error"]


def test_clients_killed_while_they_submit(paceline: Paceline) -> None:
    """Whenever it happens: there is no such job, or a whole one that ends; and its name can be used afterwards."""
    paceline.script("")
    for number in range(12):
        name = f"it-{number}"
        process = paceline.start("submit", "--name", name, "script.py")
        began = time.monotonic()
        while time.monotonic() - began < 0.02 * number and process.poll() is None:
            pass
        process.kill()
        process.communicate()
        found = paceline("wait", name)
        assert found.returncode in (0, 1, 2), found.stderr
        if found.returncode == 2:
            assert submit(paceline, "--name", name, "script.py") == name
        else:
            assert get(paceline, name)["state"] in ("SUCCEEDED", "FAILED")
    for job in listed(paceline, "-A"):
        assert paceline("wait", job["name"]).returncode in (0, 1)


def test_a_damaged_index_is_made_anew(paceline: Paceline) -> None:
    paceline.script("")
    submit(paceline, "--name", "it", "script.py")
    paceline("wait", "it")
    before = listed(paceline)
    index = paceline.home / "jobs.db"
    for damage in (b"", b"no database at all" * 1000, index.read_bytes()[:5000]):
        for path in paceline.home.glob("jobs.db*"):
            path.unlink()
        index.write_bytes(damage)
        done = paceline("list", "-o", "json")
        assert json.loads(done.stdout) == before
        assert ("it is made anew from the jobs' folders" in done.stderr) == bool(damage), done.stderr
        done = paceline("list", "-o", "json")
        assert (json.loads(done.stdout), done.stderr) == (before, "")
    index.unlink()
    assert listed(paceline) == before


def test_a_locked_index_is_done_without(paceline: Paceline) -> None:
    import sqlite3

    paceline.script("")
    submit(paceline, "--name", "it", "script.py")
    paceline("wait", "it")
    before = listed(paceline)
    other = sqlite3.connect(paceline.home / "jobs.db", isolation_level=None)
    other.execute("PRAGMA locking_mode=EXCLUSIVE")
    other.execute("BEGIN EXCLUSIVE")
    done = paceline("list", "-o", "json")
    other.close()
    assert json.loads(done.stdout) == before
    assert "reading the jobs' folders instead" in done.stderr


def test_folders_that_are_no_jobs_are_no_jobs(paceline: Paceline) -> None:
    paceline.script("")
    submit(paceline, "--name", "it", "script.py")
    paceline("wait", "it")
    jobs = paceline.home / "jobs"
    (jobs / "empty").mkdir()
    (jobs / "file").touch()
    (jobs / "broken").mkdir()
    (jobs / "broken" / "spec.json").write_text("{")
    (jobs / "dangling").symlink_to("nowhere")
    assert [job["name"] for job in listed(paceline, "-A")] == ["it"]


# -- secrets, attach, resubmit -----------------------------------------------------------------------------------------


def test_secrets_reach_the_ranks_and_nobody_else(paceline: Paceline) -> None:
    paceline.script("""
        import hashlib, os, threading
        print(hashlib.sha256(os.environ["TOKEN"].encode()).hexdigest(), flush=True)
        threading.Event().wait()
    """)
    one_line(paceline("submit", "--secret", "TOKEN", "script.py"), "secret TOKEN is not set in your environment")
    one_line(paceline("submit", "--secret", "TOKEN=hidden", "script.py"), "is no name of an environment variable")
    paceline.env["TOKEN"] = value = "swordfish-4711"
    submit(paceline, "--name", "it", "--secret", "TOKEN", "script.py")
    running(paceline, "it")
    shown = [paceline("submit", "--dry-run", "--secret", "TOKEN", "script.py")]
    shown += [paceline(verb, "it") for verb in ("get", "events", "logs")]
    shown += [paceline("list", "-o", form) for form in ("wide", "json", "yaml")]
    for done in shown:
        assert done.returncode == 0, done.stderr
        assert value not in done.stdout + done.stderr
    for path in paceline.home.rglob("*"):
        assert not path.is_file() or value.encode() not in path.read_bytes(), path
    for pid in paceline.processes():
        with open(f"/proc/{pid}/cmdline") as file:
            assert value not in file.read()
    log = (paceline.home / "jobs" / "it" / "logs" / "0" / "rank-0.log").read_text()
    assert re.fullmatch(r"[0-9a-f]{64}\n", log)
    paceline("stop", "it")


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


@pytest.mark.torch
def test_resubmit_goes_on_from_the_checkpoints(paceline: Paceline) -> None:
    pytest.importorskip("torch")
    paceline.script("""
        import os, threading, torch, paceline
        from torch.utils.data import TensorDataset

        run = paceline.init(seed=0, checkpoint_every=1)
        model = torch.nn.Linear(1, 1)
        model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), 0.1))
        train = run.dataloader(TensorDataset(torch.arange(32.0).reshape(32, 1)), batch_size=4)
        for epoch in run.epochs(1):
            for (x,) in train:
                run.backward(model(x).mean())
                optimizer.step()
                optimizer.zero_grad()
                print("step", run.step, flush=True)
                if run.step == 3 and not os.path.exists("go"):
                    threading.Event().wait()
    """)
    submit(paceline, "--name", "it", "script.py")
    log = paceline.home / "jobs" / "it" / "logs" / "0" / "rank-0.log"
    eventually(lambda: log.exists() and b"step 3\n" in log.read_bytes(), "three steps are done")
    one_line(paceline("resubmit", "it"), "job it is RUNNING")
    assert paceline("stop", "--now", "it").returncode == 0
    (paceline.folder / "go").touch()
    done = paceline("resubmit", "it")
    assert (done.returncode, done.stdout) == (0, "it-2\n"), done.stderr
    assert paceline("delete", "it").returncode == 0, "the new job does not need the old one"
    assert paceline("wait", "it-2").returncode == 0
    lines = (paceline.home / "jobs" / "it-2" / "logs" / "0" / "rank-0.log").read_text().splitlines()
    steps = [int(line.split()[1]) for line in lines if line.startswith("step")]
    assert steps[-1] == 8
    assert steps[0] in (3, 4), "it went on from the last checkpoint"


def test_from_python(paceline: Paceline) -> None:
    paceline.script("print('ran')")
    (paceline.folder / "client.py").write_text(
        "import paceline\n"
        "jobs = paceline.jobs\n"
        "job = jobs.submit(jobs.JobSpec(script='script.py', ranks=2, name='py'))\n"
        "assert jobs.wait('py').state == 'SUCCEEDED'\n"
        "assert [job.name for job in jobs.list_jobs()] == ['py']\n"
        "jobs.delete('py')\n"
        "try:\n"
        "    jobs.get('py')\n"
        "except jobs.UserError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "client.py"],
        cwd=paceline.folder,
        env=paceline.env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "no job 'py'\n"), done.stderr
