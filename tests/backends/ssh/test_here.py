"""Hosts that are this machine need no ssh server."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

import pytest
from tests.conftest import eventually

from paceline.backends.remote.here import is_here

if TYPE_CHECKING:
    from tests.conftest import Paceline

FOREVER = """
    import os, threading
    print("here", os.environ["RANK"], flush=True)
    threading.Event().wait()
"""


@pytest.fixture
def without_ssh(paceline: Paceline) -> Paceline:
    """paceline where ssh fails, and with an empty home."""
    programs = paceline.folder / "programs"
    programs.mkdir()
    (programs / "ssh").write_text("#!/bin/sh\necho 'ssh was called' >&2\nexit 255\n")
    (programs / "ssh").chmod(0o755)
    paceline.home = paceline.folder / ".local/state/paceline"  # also that of the hosts, so their processes are found
    paceline.env.update(
        PATH=f"{programs}:{os.environ['PATH']}", HOME=str(paceline.folder), PACELINE_HOME=str(paceline.home)
    )
    return paceline


@pytest.mark.parametrize("name", ["localhost", "LocalHost", "127.0.0.1", "127.8.9.1", "::1", socket.gethostname()])
def test_names_of_this_machine(name: str) -> None:
    assert is_here(name)


@pytest.mark.parametrize("name", ["me@localhost", "node1", "192.0.2.1", "2001:db8::1", "0.0.0.0", "::", ""])
def test_names_of_other_machines(name: str) -> None:
    assert not is_here(name)


def test_a_job_in_the_foreground(without_ssh: Paceline) -> None:
    without_ssh.script('import os; print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"])')
    done = without_ssh.run("-H", "localhost:2", "script.py")
    assert (done.returncode, done.stdout) == (0, "rank 0 of 2\n"), done.stderr
    heading, row = without_ssh("list").stdout.splitlines()
    name, target, state, *_ = row.split()
    assert (heading.split()[1], target, state) == ("TARGET", "localhost:2", "SUCCEEDED")
    assert without_ssh("logs", name).stdout == "rank 0 of 2\n"
    assert without_ssh("delete", name).returncode == 0
    assert without_ssh("list").stdout.count("\n") == 1


def test_ctrl_c_stops_the_job(without_ssh: Paceline) -> None:
    without_ssh.script(FOREVER)
    process = without_ssh.start("run", "-H", f"{socket.gethostname()}:2", "script.py")
    assert process.stdout is not None
    assert process.stdout.readline() == "here 0\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130, err


def test_verbs(without_ssh: Paceline) -> None:
    without_ssh.script(FOREVER)
    (without_ssh.folder / "paceline.toml").write_text(
        '[targets.desk]\nbackend = "ssh"\nhosts = ["localhost:1"]\n[defaults]\non = "desk"\n'
    )
    assert without_ssh("submit", "--name", "it", "script.py").returncode == 0
    eventually(lambda: "here 0" in without_ssh("logs", "it").stdout, "the rank prints")
    eventually(lambda: "RUNNING" in without_ssh("get", "it").stdout, "its agent knows it")
    shown = without_ssh.json("get", "it")
    assert (shown["state"], [rank["node"] for rank in shown["instances"]]) == ("RUNNING", [socket.gethostname()])
    attached = without_ssh("attach", "it", "--", "sh", "-c", "echo rank $RANK; exit 7")
    assert (attached.returncode, attached.stdout) == (7, "rank 0\n"), attached.stderr
    assert without_ssh("stop", "it").returncode == 0
    assert without_ssh("delete", "it").returncode == 0


def test_a_client_that_is_killed_leaves_nothing(without_ssh: Paceline) -> None:
    without_ssh.script(FOREVER)
    process = without_ssh.start("run", "-H", "localhost:1", "script.py")
    assert process.stdout is not None
    assert process.stdout.readline() == "here 0\n"
    assert len(without_ssh.processes()) > 3
    process.kill()
    process.communicate()
    eventually(lambda: not without_ssh.processes(), "all processes have ended")


def test_with_a_port_it_is_ssh(without_ssh: Paceline) -> None:
    without_ssh.script("")
    done = without_ssh.run("-H", "localhost:1", "--ssh-port", "22", "script.py")
    assert done.returncode == 2
    assert "cannot reach localhost: ssh was called" in done.stderr


def test_a_job_goes_on_on_hosts_and_back(without_ssh: Paceline) -> None:
    without_ssh.script("""
        import os, sys
        from pathlib import Path
        folder = Path(os.environ["PACELINE_RUN_DIR"], "checkpoints")
        folder.mkdir(exist_ok=True)
        print(sorted(path.name for path in folder.iterdir()), os.environ["WORLD_SIZE"], *sys.argv[1:])
        if os.environ["RANK"] == "0":  # whose output is looked at: no other rank changes what it sees
            (folder / sys.argv[1]).touch()
    """)

    def ended(*args: str) -> tuple[str, str]:
        done = without_ssh(*args)
        assert done.returncode == 0, done.stderr
        name = done.stdout.strip()
        assert without_ssh("wait", name).returncode == 0
        return name, without_ssh("logs", name).stdout

    first, _ = ended("submit", "--name", "it", "script.py", "a")
    second, log = ended("resubmit", "-H", "localhost:2", first, "--", "b")
    assert (second, log) == ("it-2", "['a'] 2 b\n")
    done = without_ssh("resubmit", "--on", "local", "--nnodes", "2", second)
    assert (done.returncode, done.stderr) == (
        2,
        "paceline: --nnodes 2, but this machine is one; change it to --nnodes 1, and -n for its ranks\n",
    )
    third, log = ended("resubmit", "--on", "local", "-n", "1", second, "--", "c")
    assert (third, log) == ("it-3", "['a', 'b'] 1 c\n")
    assert without_ssh("delete", second).returncode == 0
    assert without_ssh("delete", first, third).returncode == 0
    assert without_ssh("list").stdout.count("\n") == 1


@pytest.mark.parametrize(
    "settings", ["", '[targets.desk]\nbackend = "ssh"\nhosts = ["node1"]\n[defaults]\non = "desk"\n']
)
def test_the_python_that_is_typed_runs(without_ssh: Paceline, settings: str) -> None:
    other = without_ssh.folder / "programs" / "python"  # of PATH, not that of paceline
    other.write_text("#!/bin/sh\necho other $RANK\n")
    other.chmod(0o755)
    (without_ssh.folder / "paceline.toml").write_text(settings)
    without_ssh.script("import sys; print(sys.executable)")
    for where in (["-H", "localhost:1"], ["--on", "local"]):
        for python, said in (("python", "other 0"), (str(other), "other 0"), (sys.executable, sys.executable)):
            done = without_ssh.run(*where, python, "script.py")
            assert (done.returncode, done.stdout) == (0, f"{said}\n"), (where, python, done.stderr)
            shown = json.loads(without_ssh.run(*where, "--dry-run", python, "script.py").stdout)
            assert (shown["job"]["command"], shown["python"]) == (
                (None, [sys.executable]) if python == sys.executable else (python, [])
            )
    # On other machines PATH is not this one's: `python` is that of the target, and a line says so.
    where = [] if settings else ["-H", "node1"]
    says = (
        f"paceline: python is that of the target, not {other} of this machine; to choose another, write its whole path"
    )
    assert says in without_ssh.run(*where, "python", "script.py").stderr
    assert "is that of the target" not in without_ssh.run(*where, str(other), "script.py").stderr
