"""What happens when ranks, their children, the agent or the terminal die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import GENEROUS, eventually, takes_signals

if TYPE_CHECKING:
    from tests.conftest import Paceline

# Starts a child in a session of its own, ignoring SIGTERM, and waits for ever.
STUBBORN_FAMILY = """
    import os, signal, subprocess, sys, time
    child = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(1000)"
    kid = subprocess.Popen([sys.executable, "-c", child], start_new_session=True, stdout=subprocess.PIPE)
    kid.stdout.readline()
    open(f"ready-{os.environ['RANK']}", "w").close()
    THEN
    time.sleep(1000)
"""


def stubborn(then: str = "") -> str:
    """A rank with a stubborn child, which does `then` once the child runs."""
    return STUBBORN_FAMILY.replace("THEN", then)


def ready(paceline: Paceline, ranks: int) -> None:
    eventually(lambda: all((paceline.folder / f"ready-{r}").exists() for r in range(ranks)), "all ranks are ready")


def status(paceline: Paceline) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((paceline.job() / "status.json").read_text())
    return found


def next_line(process: subprocess.Popen[str]) -> str:
    """Return the next line that a run shows; a run that ends instead says why."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        pytest.fail(f"{process.communicate(timeout=GENEROUS)[1]}exit code {process.returncode}")  # pytest cuts a tuple
    return line


def rank_pid(paceline: Paceline, rank: int) -> int:
    eventually(lambda: status(paceline)["state"] == "RUNNING", "the job runs")
    return int(status(paceline)["ranks"][rank]["pid"])


@pytest.mark.parametrize("start_method", ["fork", "exec"])
def test_the_first_to_fail_is_named_last_and_once(paceline: Paceline, start_method: str) -> None:
    paceline.script("""
        import os, time
        rank = int(os.environ["RANK"])
        print("hello from", rank, flush=True)
        open(f"ready-{rank}", "w").close()
        if rank == 1:
            while not all(os.path.exists(f"ready-{r}") for r in range(3)):
                time.sleep(0.01)
            raise ValueError("bad batch")
        time.sleep(1000)
    """)
    done = paceline.run("-n", "3", "--start-method", start_method, "script.py")
    assert done.returncode == 1
    assert done.stdout == "hello from 0\n"
    *_, trace, last = done.stderr.splitlines()
    assert trace == "ValueError: bad batch"
    assert last.startswith("paceline: rank 1 failed first: ValueError: bad batch (node 0 on ")
    facts = status(paceline)
    assert f"pid {facts['ranks'][1]['pid']}, exit code 1); log {facts['ranks'][1]['log'].replace('.log', '')}" in last
    assert done.stderr.count("Traceback") == 1
    assert [r["state"] for r in facts["ranks"]] == ["STOPPED", "FAILED", "STOPPED"]
    assert facts["state"] == "FAILED"
    assert facts["exit_code"] == 1
    assert facts["failure"]["rank"] == 1


def test_a_rank_on_the_screen_shows_its_traceback_once(paceline: Paceline) -> None:
    paceline.script("print('before'); raise ValueError('bad batch')")
    for args in ((), ("-n", "1", "--tee", "all")):
        done = paceline.run(*args, "script.py", stderr=subprocess.STDOUT)
        lines = done.stdout.splitlines()
        assert lines[1] == "before"
        assert done.stdout.count("ValueError: bad batch\n") == 1
        assert lines[-1].startswith("paceline: rank 0 failed first")


def test_ranks_that_fail_for_want_of_the_first_are_one_line(paceline: Paceline) -> None:
    paceline.script("""
        import atexit, os, time
        rank, errors = int(os.environ["RANK"]), os.environ["PACELINE_RUN_DIR"] + "/errors/0"

        def wait_for(*ranks):
            while not all(os.path.exists(f"{errors}/rank-{other}.json") for other in ranks):
                time.sleep(0.01)

        if rank == 2:
            wait_for(0, 1)
            raise ValueError("the cause")
        atexit.register(wait_for, 2)  # it has failed, and is not gone before the cause is known
        raise ConnectionResetError("Connection closed by peer")
    """)
    done = paceline.run("-n", "3", "script.py")
    *_, others, first_line, _, _, _, last = done.stderr.splitlines()
    assert others == ("paceline: ranks 0, 1 failed after rank 2: ConnectionResetError: Connection closed by peer"), (
        done.stderr
    )
    assert first_line.startswith("Traceback")
    assert "rank 2 failed first: ValueError: the cause" in last


@pytest.mark.parametrize(("number", "name"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGSEGV, "SIGSEGV")])
def test_killed_rank_ends_the_job_with_128_and_the_signal(paceline: Paceline, number: int, name: str) -> None:
    paceline.script(stubborn())
    process = paceline.start("run", "-n", "2", "script.py")
    ready(paceline, 2)
    os.kill(rank_pid(paceline, 1), number)
    _, err = process.communicate(timeout=GENEROUS)
    assert process.returncode == 128 + number
    assert f"rank 1 failed first: killed by {name}" in err.splitlines()[-1]


@pytest.mark.parametrize("start_method", ["fork", "exec"])
def test_restart_counts_attempts_and_takes_a_fresh_port(paceline: Paceline, start_method: str) -> None:
    paceline.script("""
        import os, sys
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        print(attempt, os.environ["PACELINE_ATTEMPT"], os.environ["MASTER_PORT"], os.getppid(), flush=True)
        sys.exit(3 if attempt != "2" else 0)
    """)
    done = paceline.succeeds("run", "-n", "1", "--max-restarts", "3", "--start-method", start_method, "script.py")
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[:2] for row in rows] == [["0", "0"], ["1", "1"], ["2", "2"]]
    assert rows[0][2] != rows[1][2] != rows[2][2]
    assert len({row[3] for row in rows}) == 1  # the same warm server
    assert done.stderr.count("starting again") == 2
    assert sorted(p.name for p in (paceline.job() / "logs").iterdir()) == ["0", "1", "2"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 128 + signal.SIGTERM), (None, 0)])
def test_ctrl_c_does_not_end_what_a_shell_without_job_control_has_in_the_background(
    paceline: Paceline, number: int | None, code: int
) -> None:
    """Such a shell ignores SIGINT in it, since Ctrl-C is for what is in the foreground; SIGTERM is for this."""
    paceline.script("""
        import os, time
        print("here", flush=True)
        while not os.path.exists("go"):
            time.sleep(0.01)
    """)
    python = ("sh", "-c", 'trap "" INT; exec "$0" "$@"', sys.executable)
    process = paceline.start("run", "script.py", python=python)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGINT)
    if number is None:
        (paceline.folder / "go").touch()
    else:
        process.send_signal(number)
    assert process.wait(GENEROUS) == code


def test_ctrl_c_while_the_framework_is_imported(paceline: Paceline) -> None:
    paceline.script("import time\nopen('ready-0', 'w').close()\ntime.sleep(1000)\n", "framework.py")
    paceline.script("print('never')")
    process = paceline.start("run", "--preload", "framework", "script.py")
    takes_signals(process)
    ready(paceline, 1)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=GENEROUS)
    assert (process.returncode, out) == (130, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_grace_ends_with_sigkill_to_grandchildren_too(paceline: Paceline, number: int) -> None:
    paceline.script(stubborn("signal.signal(15, signal.SIG_IGN)"))
    process = paceline.start("run", "-n", "2", "--grace", "0.2s", "script.py")
    takes_signals(process)
    ready(paceline, 2)
    process.send_signal(number)
    process.communicate(timeout=GENEROUS)
    assert process.returncode == 128 + number
    assert paceline.processes() == []


def test_children_that_outlive_a_good_rank_are_ended(paceline: Paceline) -> None:
    paceline.script(stubborn("sys.exit()"))
    assert paceline.run("-n", "2", "script.py").returncode == 0
    assert paceline.processes() == []


@pytest.mark.parametrize(("whom", "start_method"), [("agent", "fork"), ("agent", "exec"), ("client", "fork")])
def test_kill_9_takes_everything_with_it(paceline: Paceline, whom: str, start_method: str) -> None:
    paceline.script(stubborn())
    process = paceline.start("run", "-n", "2", "--start-method", start_method, "script.py")
    ready(paceline, 2)
    os.kill(status(paceline)["agent"]["pid"] if whom == "agent" else process.pid, signal.SIGKILL)
    _, err = process.communicate(timeout=GENEROUS)
    eventually(lambda: paceline.processes() == [], "everything has ended")
    if whom == "agent":
        assert process.returncode == 137
        assert "the job's agent" in err
    else:
        assert status(paceline)["state"] == "STOPPED"


@pytest.mark.parametrize("restarts", [0, 1])
def test_kill_9_of_the_fork_server(paceline: Paceline, restarts: int) -> None:
    paceline.script(stubborn("sys.exit() if os.environ['PACELINE_ATTEMPT'] == '1' else None"))
    process = paceline.start("run", "-n", "2", "--max-restarts", str(restarts), "script.py")
    ready(paceline, 2)
    server = int(Path(f"/proc/{rank_pid(paceline, 0)}/stat").read_text().split(")")[1].split()[1])
    os.kill(server, signal.SIGKILL)
    _, err = process.communicate(timeout=GENEROUS)
    assert process.returncode == (0 if restarts else 1), err
    assert "the process that the ranks are forked from ended" in err


def test_detached_job_outlives_its_client(paceline: Paceline) -> None:
    paceline.script("""
        import os, time
        open("ready-0", "w").close()
        while not os.path.exists("go"):
            time.sleep(0.01)
        print("done")
    """)
    done = paceline.run("--detach", "script.py", start_new_session=True)
    assert done.returncode == 0
    ready(paceline, 1)
    os.kill(status(paceline)["agent"]["pid"], signal.SIGHUP)
    (paceline.folder / "go").touch()
    eventually(lambda: status(paceline)["state"] == "SUCCEEDED", "the job has ended well")
    assert (paceline.job() / "logs" / "0" / "rank-0.log").read_text() == "done\n"


def test_reader_that_goes_away_stops_the_job(paceline: Paceline) -> None:
    paceline.script("while True: print('line')")
    process = paceline.start("run", "script.py")
    assert process.stdout is not None
    assert process.stdout.readline() == "line\n"
    process.stdout.close()
    assert process.wait(GENEROUS) == 128 + signal.SIGPIPE


def test_out_of_memory_is_called_by_its_name(paceline: Paceline) -> None:
    group = Path("/sys/fs/cgroup/memory") / f"paceline-test-{os.getpid()}"
    if not Path("/sys/fs/cgroup/memory/memory.limit_in_bytes").exists() or os.geteuid() != 0:
        pytest.skip("needs root and the memory controller of cgroup v1 to set a limit")
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(150 << 20))
        paceline.script("""
            import os, time
            if os.environ["RANK"] == "1":
                hog = [bytearray(8 << 20) for _ in range(1000)]
            time.sleep(1000)
        """)
        inside = ("/bin/sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$0" "$@"', sys.executable)
        done = paceline.run("-n", "2", "script.py", python=inside)
        assert done.returncode == 137
        assert "rank 1 failed first: killed: out of memory" in done.stderr.splitlines()[-1]
    finally:
        eventually(lambda: (group / "cgroup.procs").read_text() == "", "the group is empty")
        group.rmdir()


@pytest.mark.torch
def test_failures_of_spawned_workers_are_named(paceline: Paceline) -> None:
    paceline.script("""
        import torch.multiprocessing as mp

        def work(index):
            raise ValueError("mine")

        if __name__ == "__main__":
            mp.spawn(work, nprocs=1)
    """)
    done = paceline.run("script.py")
    assert "ProcessRaisedException: -- Process 0 terminated with the following error: ValueError: mine" in done.stderr


KERAS = "/usr/lib/python3/site-packages/keras/src/losses/loss.py"
GRAPH = f"""Graph execution error:

Detected at node GatherV2 defined at (most recent call last):
  File "/home/me/train.py", line 10, in g

  File "{KERAS}", line 67, in __call__

indices[0] = 7 is not in [0, 3)
\t [[{{{{node GatherV2}}}}]] [Op:__inference_g_468]"""
TRACED = """in user code:

    File "/home/me/train.py", line 7, in f  *
        return inner(y)
    File "/home/me/model.py", line 3, in inner  *
        raise ValueError("mine is bad")

    ValueError: mine is bad
"""
NODE = """Graph execution error:

Detected at node
Traceback (most recent call last):

  File x, line 1

ValueError: mine



\t [[node]] [Op:step]"""
LAYER = """Exception encountered when calling M.call().

\x1b[1mDimensions must be equal, but are 2 and 3\x1b[0m

Arguments received by M.call():
  • x=tf.Tensor(shape=(None, 2), dtype=float32)"""


@pytest.mark.parametrize(
    ("message", "headline"),
    [
        (GRAPH, "Graph execution error: indices[0] = 7 is not in [0, 3) (train.py:10)"),
        (TRACED, "in user code: ValueError: mine is bad (model.py:3)"),
        (NODE, "Graph execution error: ValueError: mine"),
        (LAYER, "Exception encountered when calling M.call(). Dimensions must be equal, but are 2 and 3"),
        ("Graph execution error:", "Graph execution error:"),
    ],
)
def test_messages_of_tensorflow_are_told_with_their_cause(paceline: Paceline, message: str, headline: str) -> None:
    paceline.script(f"raise ValueError({message!r})")
    assert f"rank 0 failed first: ValueError: {headline} (node 0" in paceline.run("script.py").stderr


@pytest.mark.torch
def test_an_exception_in_a_training_loop_stands_alone(paceline: Paceline) -> None:
    paceline.script("""
        import torch, paceline
        run = paceline.init(seed=0, checkpoint_every=2)
        model = torch.nn.Linear(1, 1)
        model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), 1e-3))
        for epoch in run.epochs(1):
            for x in run.dataloader([torch.ones(1)] * 8, global_batch_size=2):
                loss = model(x).mean()
                run.backward(loss)
                optimizer.step()
                run.log(loss=loss)
                if run.step == 2:
                    raise ValueError("mine")
    """)
    done = paceline.run("script.py")
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert "cannot schedule new futures" not in done.stderr
    assert (paceline.job() / "progress.json").exists()


def test_a_job_that_is_asked_to_give_way_before_it_can_save_does_not_start_again(paceline: Paceline) -> None:
    paceline.script("""
        import os, signal, time

        def end(number, _):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

        signal.signal(signal.SIGUSR2, end)
        open('ready-' + os.environ['RANK'], 'w').close()
        time.sleep(1000)
    """)
    process = paceline.start("run", "-n", "2", "--max-restarts", "9", "script.py")
    ready(paceline, 2)
    process.send_signal(signal.SIGUSR2)
    _, err = process.communicate(timeout=GENEROUS)
    assert process.returncode == 128 + signal.SIGUSR2, err
    assert "starting again" not in err


def test_a_rank_that_exits_is_the_first_although_others_have_ended_before_it(paceline: Paceline) -> None:
    paceline.script("""
        import atexit, os, sys, time

        def when(path):
            while not os.path.exists(path):
                time.sleep(0.01)

        if os.environ["RANK"] == "1":
            @atexit.register
            def tell():  # as Horovod tells the others that it shuts down
                open("told", "w").close()
                when("never")
            sys.exit(7)
        when("told")
        raise RuntimeError("the other one has shut down")
    """)
    done = paceline("run", "-n", "2", "--grace", "1s", "script.py")
    assert done.returncode == 7, done.stderr
    assert "rank 1 failed first: exit code 7 " in done.stderr
    assert done.stderr.splitlines()[-1].count("exit code 7") == 1
    assert "rank 0 failed after rank 1: RuntimeError" in done.stderr


SIGNALLED = """
    import os, signal, threading
    if os.environ["RANK"] == "0":
        open("ready-0", "w").close()
        while not os.path.exists("go"):
            threading.Event().wait(0.05)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            # Not by print: the second signal can arrive in the flush of the first, which raises RuntimeError.
            signal.signal(number, lambda number, _: os.write(1, b"got %d\\n" % number))
    else:
        open("ready-1", "w").close()  # it handles nothing, and goes on
    while not os.path.exists("end"):
        threading.Event().wait(0.05)
    print("ends", flush=True)
"""


def test_signals_to_run_reach_the_ranks_that_handle_them(paceline: Paceline) -> None:
    paceline.script(SIGNALLED)
    process = paceline.start("run", "-n", "2", "script.py")
    ready(paceline, 2)
    process.send_signal(signal.SIGUSR1)  # before there is a handler, as while a script imports
    (paceline.folder / "go").touch()
    assert next_line(process) == f"got {int(signal.SIGUSR1)}\n"
    process.send_signal(signal.SIGUSR2)
    assert next_line(process) == f"got {int(signal.SIGUSR2)}\n"
    (paceline.folder / "end").touch()
    out, err = process.communicate(timeout=GENEROUS)
    assert (out, process.returncode) == ("ends\n", 0), err


def test_a_signal_reaches_what_a_shell_waits_for(paceline: Paceline) -> None:
    script = paceline.script("""
        import signal, sys, threading
        signal.signal(signal.SIGUSR1, lambda *_: (print("python", flush=True), sys.exit(0)))
        open("ready-0", "w").close()
        threading.Event().wait()
    """)
    shell = paceline.folder / "train.sh"
    shell.write_text(f"#!/bin/bash\ntrap 'echo shell' USR1\n{sys.executable} {script}\n")
    shell.chmod(0o755)
    process = paceline.start("run", "--no-python", str(shell))
    ready(paceline, 1)
    process.send_signal(signal.SIGUSR1)
    out, err = process.communicate(timeout=GENEROUS)
    assert (out, process.returncode) == ("python\nshell\n", 0), err
