"""How a job gets to Slurm, and what is left if that is interrupted."""

from __future__ import annotations

import os
import re
import signal
import sys
from typing import TYPE_CHECKING

import pytest
from tests.conftest import GENEROUS, eventually
from tests.typed import typed

from paceline.cli.terminal import write

from .fake import Login

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def login(tmp_path: Path) -> Login:
    return Login(tmp_path)


def test_slurm_is_called_no_more_than_needed(login: Login) -> None:
    done = login("submit", "--on", "lab", "--name", "it", login.script("pass"))
    assert done.returncode == 0, done.stderr
    calls = sorted(" ".join(call.split()[:2]) for call in login.calls)
    assert calls == ["sbatch --parsable", "sbatch --test-only", "scontrol show"]
    assert login.jobs() == ["it"]


def test_a_list_of_all_targets_shows_jobs_while_slurm_does_not_answer(login: Login) -> None:
    assert login("submit", "--on", "lab", "--name", "it", login.script("pass")).returncode == 0
    for name in ("squeue", "sacct"):
        login.command(name, "exec sleep 600")
    listed = login("list", env={**login.env, "PACELINE_LOOK_TIMEOUT": "5s"})
    assert re.search(r"^it +lab +PENDING ", listed.stdout, re.M), listed
    assert "squeue does not answer within 4 s; Slurm's controller may be down or busy" in listed.stderr
    assert "the states are those that the nodes wrote last" in listed.stderr


@pytest.mark.parametrize(
    ("flags", "task", "nodes", "said"),
    [
        ((), 0, 2, "on 2 nodes"), ((), 0, 1, "2 times on this node"), ((), 1, 2, None), (("--nnodes", "1"), 0, 2, None),
        (("--standalone",), 0, 2, None),
    ],
)  # fmt: skip
def test_srun_that_starts_jobs_that_train_alone(
    login: Login, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], task: int, nodes: int, said: str | None
) -> None:
    monkeypatch.setattr(write, "_said", set())
    login.env |= {
        "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(task), "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": str(nodes),
    }  # fmt: skip
    done = typed(login, "run", "-n", "2", *flags, "--dry-run", login.script("pass"))
    assert done.returncode == 0, done
    lines = done.stderr.splitlines()
    assert [line.partition(",")[0] for line in lines] == ([f"paceline: srun has started this {said}"] if said else [])


def test_the_jobs_of_an_array_share_the_files_of_their_code(login: Login) -> None:
    login.script("pass", "code/train.py")
    flags = ("--name", "it", "--array", "0-2", "--sync-mode", "snapshot", "--sync-source", "code")
    done = login("submit", "--on", "lab", *flags, "train.py")
    assert done.returncode == 0, done.stderr
    files = [login.folder / f"root/slurm/it-{task}/code/it-{task}/train.py" for task in range(3)]
    assert len({path.stat().st_ino for path in files}) == 1 and files[0].stat().st_nlink == 3
    ended = login.folder / "root/slurm/it-0/lives/8.0"
    ended.mkdir(parents=True)
    (ended / "outcome.json").write_text('{"next": null, "state": "STOPPED", "time": 1.0}')
    assert login("delete", "--on", "lab", "it-0").returncode == 0
    assert login.jobs() == ["it-1", "it-2"] and files[1].read_text() == "pass"


@pytest.mark.parametrize(
    ("verb", "how"),
    [("run", signal.SIGINT), ("submit", signal.SIGTERM), ("run", signal.SIGHUP), ("submit", signal.SIGKILL)],
)
def test_nothing_is_left_of_a_job_whose_client_is_interrupted(login: Login, verb: str, how: signal.Signals) -> None:
    asked, go = login.folder / "asked", login.folder / "go"
    os.mkfifo(go)
    login.env["TMPDIR"] = str(login.folder)  # who is killed removes nothing there
    login.command("sbatch", f'case "$*" in *test-only*) exit 0;; esac; touch {asked}; cat {go}; echo 7')
    client = login.start(verb, "--on", "lab", "--name", "it", login.script("pass"))
    eventually(asked.exists, "sbatch was called")
    client.send_signal(how)
    client.communicate()
    assert login.jobs() == ["it"], "sbatch may be about to take the job"
    go.write_text("")
    eventually(lambda: login.jobs() == [], "its folder is removed")
    assert "scancel --quiet 7" in login.calls
    assert login("list", "--on", "lab", "-o", "json").stdout == "[]\n"


def test_a_client_that_ignores_sigterm_can_be_interrupted(login: Login) -> None:
    asked, go = login.folder / "asked", login.folder / "go"
    os.mkfifo(go)
    login.command("sbatch", f'case "$*" in *test-only*) exit 0;; esac; touch {asked}; cat {go}; echo 7')
    python = ("env", "--ignore-signal=TERM", sys.executable)
    client = login.start("submit", "--on", "lab", "--name", "it", login.script("pass"), python=python)
    eventually(asked.exists, "sbatch was called")
    client.send_signal(signal.SIGINT)
    client.communicate(timeout=GENEROUS)
    go.write_text("")
    eventually(lambda: login.jobs() == [], "its folder is removed")


def test_nothing_is_left_of_an_array_whose_client_is_interrupted(login: Login) -> None:
    login.env["TMPDIR"] = str(login.folder)  # who is killed removes nothing there
    login.command("sbatch", 'case "$*" in *test-only*) exit 0;; esac; kill -KILL $CLIENT; echo 7')
    done = login(
        "submit", "--on", "lab", "--name", "it", "--array", "0-2", login.script("pass"), python=KILLED_BY_SBATCH
    )
    assert done.returncode == -signal.SIGKILL
    eventually(lambda: login.jobs() == [], "the folders are removed")
    assert "scancel --quiet 7" in login.calls


# Brings the request to the login node; one who ends the connection right after a word takes the word with him.
SSH = """
import os, select, subprocess, sys
child = subprocess.Popen(["sh", "-c", sys.argv[-1]], stdin=subprocess.PIPE)
while data := os.read(0, 1 << 16):
    if data == b"keep\\n" and select.select([0], [], [], 2)[0]:
        os._exit(255)
    child.stdin.write(data)
    child.stdin.flush()
child.stdin.close()
sys.exit(child.wait())
"""


@pytest.mark.parametrize("breaks", [False, True])
def test_a_job_that_was_submitted_over_ssh_stays(login: Login, breaks: bool) -> None:
    program = login.folder / "ssh.py"
    program.write_text(SSH.replace("select.select([0], [], [], 2)[0]", "True") if breaks else SSH)
    login.command("ssh", f'exec {sys.executable} {program} "$@"')
    settings = login.folder / "paceline.toml"
    settings.write_text(f'{settings.read_text()}ssh = "login1"\npython = "{sys.executable}"\n')
    done = login("submit", "--on", "lab", "--name", "it", login.script("pass"))
    if breaks:
        assert done.returncode and "job it may have been cancelled again" in done.stderr, done.stderr
        eventually(lambda: login.jobs() == [], "nothing is left of it")
        return
    assert done.returncode == 0, done.stderr
    assert login.jobs() == ["it"] and "scancel --quiet 7" not in login.calls


KILLED_BY_SBATCH = ("sh", "-c", 'CLIENT=$$ exec "$0" "$@"', sys.executable)
