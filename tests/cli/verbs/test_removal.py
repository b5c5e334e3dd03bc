"""Whatever lies in a user's folders stays as it is, whichever verbs are used there."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import stat
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.conftest import Paceline

if TYPE_CHECKING:
    from collections.abc import Callable

HEX = "0123abcd"
LONG_AGO = 1_000_000.0
# Files of a user: hidden ones, and some that are called as paceline calls what it makes for itself.
THINGS = [
    ".git/HEAD",
    ".git/modules/sub/HEAD",
    ".venv/bin/python",
    ".ssh/id_ed25519",
    ".mine.1234.5678/notes.txt",
    ".mine.deleted.5678/notes.txt",
    ".mine.deleted.5679/lock",
    ".mine.1234.5679/.paceline-run",
    "mine/notes.txt",
    "nested/.git/config",
    "logs/0/rank-0.log",
    "step-000001/model.pt",
    f".saving-step-000001-{HEX}/model.pt",
    f".removing-step-000001-{HEX}/manifest.json",
    f".meeting-{'0' * 32}",
    f".status.json.{os.getpid()}",
    "checkpoints/KEEP",
    "code/.gitignore",
    "code/train/mine.py",
    f"code/.train.paceline.{HEX}/mine.py",
    "code/.other.paceline",
    "code/.third.paceline/made",
    f"code/.third.paceline/building.{HEX}/mine.py",
    "tensorboard.json",
    "metrics.jsonl",
]


def fill(folder: Path) -> None:
    """Put a user's things into a folder, all of them old, and links among them."""
    for name in THINGS:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"mine: {name}")
    outside = folder.with_name(f"{folder.name}-outside")
    (outside / "deep").mkdir(parents=True)
    (outside / "deep" / "file").write_text("mine")
    for name in (".link.1.2", "link", "step-000002", f".saving-step-000002-{HEX}", f"code/.link.paceline.{HEX}"):
        (folder / name).symlink_to(outside, target_is_directory=True)
    for root in (folder, outside):
        for parent, folders, files in os.walk(root):
            for name in (*folders, *files):
                os.utime(Path(parent, name), (LONG_AGO, LONG_AGO), follow_symlinks=False)


def contents(folder: Path) -> dict[str, bytes]:
    """What every entry of a folder holds, and of what kind it is."""
    found = {}
    for root in (folder, folder.with_name(f"{folder.name}-outside")):
        for parent, folders, files in os.walk(root):
            for name in (*folders, *files):
                path = Path(parent, name)
                status = path.lstat()
                mode = str(status.st_mode).encode()
                if stat.S_ISLNK(status.st_mode):
                    found[str(path)] = mode + os.readlink(path).encode()
                else:
                    found[str(path)] = mode + (path.read_bytes() if stat.S_ISREG(status.st_mode) else b"")
    return found


def unchanged(before: dict[str, bytes], folder: Path) -> None:
    after = contents(folder)
    assert {name: after.get(name) for name in before} == before


SUBMIT: dict[str, tuple[str, ...]] = {
    "--log-dir": ("--log-dir", "user"),
    "--output-filename": ("--output-filename", "user"),
    "--working-dir": ("--working-dir", "user", "--sync-mode", "snapshot", "--sync-source", "src"),
    "both": ("--working-dir", "user", "--sync-mode", "snapshot", "--sync-source", "src", "--log-dir", "user"),
    "--checkpoint-dir": ("--checkpoint-dir", "user"),
    "nothing": (),
}
NAMES = ("mine", "train", "third", "fresh")
VERBS = st.one_of(
    st.tuples(st.sampled_from(("submit", "run")), st.sampled_from(NAMES), st.sampled_from(sorted(SUBMIT))),
    st.tuples(st.sampled_from(("get", "stop", "resubmit", "delete", "force")), st.sampled_from(NAMES), st.just("")),
    st.tuples(st.sampled_from(("list", "prune")), st.just(""), st.just("")),
)


def do(paceline: Paceline, verb: str, name: str, how: str) -> None:
    """One verb; it may be refused, but a traceback is none of its answers."""
    commands: dict[str, tuple[str, ...]] = {
        "list": ("list", "-A"),
        "prune": ("prune", "--since", "0s"),
        "force": ("delete", "--force", name),
    }
    args = commands.get(verb, (verb, name))
    if how:
        args = (verb, "--name", name, *SUBMIT[how], str(paceline.folder / "src" / "script.py"))
    done = paceline(*args)
    assert "Traceback" not in done.stderr
    if verb in ("submit", "resubmit") and done.returncode == 0:
        paceline("wait", done.stdout.strip())


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@example([("submit", "fresh", "--working-dir"), ("delete", "fresh", "")], False)
@given(st.lists(VERBS, min_size=2, max_size=5), st.booleans())
def test_no_verb_touches_what_is_the_users(verbs: list[tuple[str, str, str]], is_home: bool) -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        paceline = Paceline(folder)
        paceline.script("print('hello')", "src/script.py")
        fill(folder / "user")
        if is_home:
            shutil.copytree(folder / "user", folder / "home" / "jobs", symlinks=True)
            for path in (folder / "home" / "jobs").iterdir():
                os.utime(path, (LONG_AGO, LONG_AGO), follow_symlinks=False)
        before = contents(folder / "user")
        in_home = contents(folder / "home")
        for verb in (("submit", "first", "--log-dir"), *verbs, ("list", "", ""), ("delete", "first", "")):
            do(paceline, *verb)
            unchanged(before, folder / "user")
            unchanged(in_home, folder / "home")
    finally:
        shutil.rmtree(folder)


def test_an_empty_folder_is_not_replaced_by_a_job(paceline: Paceline) -> None:
    paceline.script("print('hello')")
    (paceline.folder / "user" / "job").mkdir(parents=True, mode=0o751)
    done = paceline("submit", "--log-dir", "user", "--name", "job", "script.py")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "user/job is there already, and does not belong to a job" in done.stderr
    assert os.listdir(paceline.folder / "user") == ["job"]


def test_a_folder_that_took_the_place_of_a_run_directory_stays(paceline: Paceline) -> None:
    paceline.script("print('hello')")
    user = paceline.folder / "user"
    for name in ("moved", "linked"):
        assert paceline.run("--log-dir", "user", "--name", name, "script.py").returncode == 0
        shutil.rmtree(user / name)
    fill(user / "moved")
    fill(paceline.folder / "elsewhere")
    (user / "linked").symlink_to(paceline.folder / "elsewhere")
    for place in (user / "moved", paceline.folder / "elsewhere"):
        (place / "job.json").write_text(json.dumps({"code": {"path": str(paceline.folder / "elsewhere")}}))
    before = contents(user / "moved"), contents(paceline.folder / "elsewhere")
    for name, place in (("moved", user / "moved"), ("linked", paceline.folder / "elsewhere")):
        done = paceline("delete", name)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert f"{place} was not made by paceline" in done.stderr
        assert paceline("get", name).returncode == 2, "no job any more"
    assert before == (contents(user / "moved"), contents(paceline.folder / "elsewhere"))
    assert (user / "linked").is_symlink()


def test_what_killed_clients_left_goes_where_it_was_made_only(paceline: Paceline) -> None:
    from paceline.node.rundir.staging import Staging, sweep

    jobs, user = paceline.home / "jobs", paceline.folder / "user"
    left = []
    for path, elsewhere in ((jobs / "here", None), (user / "there", jobs)):
        staging = Staging(path, elsewhere)
        os.close(staging.lock)  # as the kernel does
        left.append(staging.directory.path)
        shutil.copytree(staging.directory.path, user / ".copy.1.2", dirs_exist_ok=True)
    for path in (*left, *jobs.iterdir(), user / ".copy.1.2"):
        os.utime(path, (LONG_AGO, LONG_AGO), follow_symlinks=False)
    assert sweep(jobs) == []
    assert os.listdir(jobs) == []
    assert os.listdir(user) == [".copy.1.2"]


def test_two_clients_that_bring_code_to_one_place(paceline: Paceline) -> None:
    """The one that is too late removes nothing of the other's."""
    paceline.script("print('hello')", "src/script.py")
    place = ("--working-dir", "user", "--sync-mode", "snapshot", "--sync-source", "src", "--name", "job")
    first, second = (
        paceline.start("submit", *place, "script.py", env={**paceline.env, "PACELINE_HOME": str(home)})
        for home in (paceline.home, paceline.folder / "home2")
    )
    codes = []
    for process in (first, second):
        process.communicate(timeout=120)
        codes.append(process.returncode)
    assert sorted(codes) == [0, 2]
    assert (paceline.folder / "user" / "code" / "job" / "script.py").exists()
    assert (paceline.folder / "user" / "code" / ".job.paceline").exists()
    home = (paceline.home, paceline.folder / "home2")[codes.index(0)]
    env = {**paceline.env, "PACELINE_HOME": str(home)}
    paceline("wait", "job", env=env)
    assert paceline("delete", "job", env=env).returncode == 0
    assert sorted(os.listdir(paceline.folder / "user" / "code")) == [".gitignore"]


@pytest.mark.needs("git")
def test_code_without_the_script_leaves_nothing(paceline: Paceline) -> None:
    """That the copy lacks it is known only when the code is at its place."""
    paceline.script("print('hello')", "src/script.py")
    for command in ("git init -q", "git add .", "git -c user.email=a@b -c user.name=a commit -qm first"):
        subprocess.run(command.split(), cwd=paceline.folder / "src", check=True)
    place = ("--working-dir", "user", "--sync-mode", "git", "--sync-source", str(paceline.folder / "src"))
    done = paceline("submit", *place, "--name", "job", "other.py")
    said = [line for line in done.stderr.splitlines() if not line.endswith("…")]  # what takes long is named
    assert (done.returncode, len(said)) == (2, 1), done.stderr
    assert "no script other.py in the copy of" in said[0]
    assert not (paceline.folder / "user").exists()


def test_a_place_for_code_that_cannot_be_written_to(paceline: Paceline) -> None:
    paceline.script("print('hello')", "src/script.py")
    (paceline.folder / "file").write_text("mine")
    place = ("--working-dir", "file", "--sync-mode", "snapshot", "--sync-source", "src")
    done = paceline("submit", *place, "--name", "job", "script.py")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert f"{paceline.folder}/file/code/job: Not a directory" in done.stderr
    assert "--working-dir" in done.stderr


def test_code_that_somebody_replaced_stays(paceline: Paceline) -> None:
    paceline.script("print('hello')", "src/script.py")
    place = ("--working-dir", "user", "--sync-mode", "snapshot", "--sync-source", "src", "--name", "job")
    assert paceline.run(*place, "script.py").returncode == 0
    code = paceline.folder / "user" / "code" / "job"
    code.rename(paceline.folder / "kept")
    fill(code)
    before = contents(code)
    assert paceline("delete", "job").returncode == 0
    unchanged(before, code)
    assert (paceline.folder / "kept" / "script.py").exists()


def _database(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE jobs (mine TEXT)")
        connection.execute("INSERT INTO jobs VALUES ('mine')")
    connection.close()


def _text(path: Path) -> None:
    path.write_text("no database")


def test_a_database_that_is_not_ours_stays(paceline: Paceline) -> None:
    makers: tuple[Callable[[Path], None], ...] = (_database, _text)
    paceline.script("print('hello')")
    assert paceline.run("--name", "job", "script.py").returncode == 0
    for make in makers:
        for path in paceline.home.glob("jobs.db*"):
            path.unlink()
        make(paceline.home / "jobs.db")
        before = (paceline.home / "jobs.db").read_bytes()
        done = paceline("list", "-A")
        assert done.returncode == 0
        assert "job" in done.stdout
        assert "is not paceline's" in done.stderr
        assert (paceline.home / "jobs.db").read_bytes() == before
