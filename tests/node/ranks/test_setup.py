"""The commands of a setup: what of them reaches the ranks, and what is said when one fails."""

from __future__ import annotations

import json
import os
import signal
import sys
import venv
from typing import TYPE_CHECKING

import pytest
from tests.conftest import eventually

if TYPE_CHECKING:
    from tests.conftest import Paceline


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("true\nmodule load nope\ntrue", "with exit code 127: module load nope: module: command not found"),
        (
            "echo 'no licence' >&2; exit 4",
            " as the command ended the shell with exit code 4: echo 'no licence' >&2; exit 4: no licence",
        ),
        ("exec true", " as the command ended the shell with exit code 0: exec true"),
        ("echo 'open", "with exit code 2: echo 'open: unexpected EOF while looking for matching `''"),
    ],
)
def test_a_command_that_fails_is_named(paceline: Paceline, command: str, said: str) -> None:
    done = paceline("run", "--setup", command, paceline.script("open('ran', 'w')"))
    last = done.stderr.splitlines()[-1]
    assert (done.returncode, last.startswith("paceline: setup failed on ")) == (1, True), done.stderr
    assert said in last
    assert not (paceline.folder / "ran").exists()


def test_files_that_it_reads_handle_their_own_failures(paceline: Paceline) -> None:
    (paceline.folder / "env.sh").write_text("false\nexport A=1\n")
    done = paceline("run", "--setup", "source ./env.sh", paceline.script("import os; print(os.environ['A'])"))
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


def test_it_chooses_the_python_and_threads_of_the_ranks_and_runs_once(paceline: Paceline) -> None:
    venv.create(paceline.folder / "venv", system_site_packages=True)
    script = paceline.script("""
        import os, sys
        print(sys.prefix, os.environ["OMP_NUM_THREADS"], os.getcwd(), flush=True)
        sys.exit(os.environ["PACELINE_ATTEMPT"] == "0")
    """)
    setup = ("--setup", "source venv/bin/activate; echo x >> count; cd /", "--setup", "export OMP_NUM_THREADS=7")
    for how in ("fork", "exec"):
        done = paceline("run", "--max-restarts", "1", "--start-method", how, *setup, script)
        seen = f"{paceline.folder}/venv 7 {paceline.folder}\n"
        assert (done.returncode, done.stdout) == (0, 2 * seen), done.stderr
    assert (paceline.folder / "count").read_text() == "x\nx\n", "once for all attempts"
    assert sys.prefix != f"{paceline.folder}/venv"


def test_the_setup_of_this_machine_comes_first_and_attach_has_what_it_has_set(paceline: Paceline) -> None:
    paceline.env["PACELINE_TRUST"] = "1"
    (paceline.folder / "paceline.toml").write_text('[local]\nsetup = "export A=1"\n')
    script = paceline.script("""
        import os, threading
        print(os.environ["A"], flush=True)
        threading.Event().wait()
    """)
    assert paceline("submit", "--name", "it", "--setup", "export A=$A-2", script).returncode == 0
    follower = paceline.start("logs", "-f", "it")
    assert follower.stdout is not None
    assert follower.stdout.readline() == "1-2\n"
    assert paceline("attach", "it", "--", "sh", "-c", "echo $A").stdout == "1-2\n"
    assert paceline("stop", "it").returncode == 0
    follower.communicate()
    again = paceline("resubmit", "--dry-run", "it").stdout
    assert again.count("export A=1") == 1, "it has them already"


BACKGROUND = """
(echo $BASHPID >>left; while :; do sleep 1000; done) &
setsid -f sh -c 'echo $$ >>left; exec sleep 1000'
env -i "$(command -v setsid)" -f sh -c 'echo $$ >>left; exec sleep 1000'
while [ "$(wc -l <left)" -lt 3 ]; do :; done
"""


@pytest.mark.parametrize("end", ["success", "failure", "setup", "fork server", "agent", "guard and agent", "stop"])
def test_what_it_leaves_behind_ends_with_its_job(paceline: Paceline, end: str) -> None:
    (paceline.folder / "left").touch()
    forever = "import os, time; open('ppid', 'w').write(f'{os.getppid()}\\n'); time.sleep(1000)"
    script = paceline.script({"success": "pass", "failure": "raise SystemExit(3)"}.get(end, forever))
    setup = ("--setup", BACKGROUND, *(("--setup", "false") if end == "setup" else ()))
    paceline("submit", "--name", "it", *setup, script)
    if end not in ("success", "failure", "setup"):
        ppid = paceline.folder / "ppid"
        eventually(lambda: ppid.exists() and ppid.read_text().endswith("\n"), "the rank runs")
        agent = json.loads((paceline.home / "jobs" / "it" / "status.json").read_text())["agent"]
        pids = {"fork server": [int(ppid.read_text())], "agent": [agent["pid"]]}
        for pid in pids.get(end, [agent["guard"]["pid"], agent["pid"]] if end != "stop" else []):
            os.kill(pid, signal.SIGKILL)
        if end == "stop":
            paceline("stop", "it")
    paceline("wait", "it")
    left = [int(line) for line in (paceline.folder / "left").read_text().split()]
    assert len(left) == 3
    eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in left), f"nothing is left of {left}")
