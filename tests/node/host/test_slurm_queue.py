"""What Slurm is asked about a user's jobs, how often, and whose jobs are whose."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import GENEROUS
from tests.late import job_spec

from paceline.contract.nodejob import NodeJob
from paceline.node.errors import Refused
from paceline.node.host.slurm import call
from paceline.node.host.slurm.end import stop as stopping
from paceline.node.host.slurm.job_folder import Identity, JobFolder, SlurmJob, Start
from paceline.node.host.slurm.job_folders import Jobs
from paceline.node.host.slurm.look import describe, queue, scheduler
from paceline.node.host.slurm.look.queue import _FIELDS, Queue
from paceline.node.journal.state import cached
from paceline.node.rundir.directory import RunDirectory
from paceline.node.store.home import Home

if TYPE_CHECKING:
    from collections.abc import Callable


def squeue(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    (folder / "bin").mkdir(exist_ok=True)
    command(folder, "squeue", f"echo called >> {folder}/calls\n{body}")
    monkeypatch.setenv("PATH", f"{folder}/bin:/usr/bin:/bin")


def command(folder: Path, name: str, body: str) -> None:
    path = folder / "bin" / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def line(**columns: str) -> str:
    """A row of squeue, which counts bytes."""
    return b"".join(columns.get(name, "").encode().ljust(width)[:width] for name, width in _FIELDS.items()).decode()


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> float:
    """The disk's clock stands still: answers are not too old because this machine is slow."""
    monkeypatch.setattr(queue, "disk_time", lambda _: 1e9)
    return 1e9


def test_squeue_is_asked_once_by_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, still: float) -> None:
    rows = [line(JobID="7", State="PENDING", Reason="Priority", StartTime="1700000000", Comment="paceline:abc")]
    rows.append(line(JobID="8", State="RUNNING", RestartCnt="2", Comment="mine"))
    (tmp_path / "rows").write_text("\n".join(rows) + "\n")
    squeue(tmp_path, monkeypatch, f"cat {tmp_path}/rows")
    for _ in range(20):
        found = Queue(tmp_path / "root")
        entry = found.entry("7", None)
        assert entry is not None and entry.is_pending and entry.start == 1700000000 and entry.job_id == "abc"
        other = found.entry("8", None)
        assert other is not None and other.is_running and (other.restarts, other.job_id) == (2, "")
        assert found.entry("9", None) is None
    assert (tmp_path / "calls").read_text() == "called\n"


def test_a_path_with_letters_of_several_bytes_moves_no_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, still: float
) -> None:
    row = line(JobID="7", State="RUNNING", WorkDir="/data/\u9879\u76ee/gr\u00f6\u00dfe", Comment="paceline:abc")
    (tmp_path / "rows").write_text(row + "\n")
    squeue(tmp_path, monkeypatch, f"cat {tmp_path}/rows")
    (found,) = call.table("squeue", columns=_FIELDS)
    assert (found["WorkDir"], found["Comment"]) == ("/data/\u9879\u76ee/gr\u00f6\u00dfe", "paceline:abc")


@pytest.mark.parametrize(
    ("failures", "age", "is_asked"),
    [(0, 9, False), (0, 11, True), (1, 15, False), (1, 25, True), (2, 35, False), (9, 55, False), (9, 61, True)],
)
def test_squeue_is_asked_less_often_while_slurm_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, still: float, failures: int, age: float, is_asked: bool
) -> None:
    squeue(tmp_path, monkeypatch, "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    problem = "it was down" if failures else ""
    kept = {
        "time": 0.0,
        "entries": [],
        "asked": still - age,
        "failures": failures,
        "problem": problem,
        "lost": [],
    }
    (tmp_path / "queue.json").write_text(json.dumps(kept))
    found = Queue(tmp_path)
    assert found.entry("7", None) is None and not found.knows_since(0.0)
    assert (tmp_path / "calls").exists() == is_asked
    if is_asked:
        assert "slurmctld" in str(found.problem)
        assert json.loads((tmp_path / "queue.json").read_text())["failures"] == failures + 1


UNKNOWN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
NO_USER = "echo 'Invalid user: 1000' >&2"
DOWN = "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"


@pytest.mark.parametrize(
    ("of_the_user", "alone", "is_lost"),
    [
        ("exit 0", UNKNOWN, True),
        ("exit 0", "exit 0", True),
        ("exit 0", "cat OTHER", True),
        ("exit 0", "cat OURS", False),
        ("exit 0", NO_USER, False),
        ("exit 0", DOWN, False),
        ("exit 0", "kill -9 $$", False),
        (NO_USER, UNKNOWN, False),
        ("cat OTHER; echo 'a warning of the site' >&2", UNKNOWN, True),
    ],
)
@pytest.mark.parametrize("number", ["7", None])
def test_a_job_is_gone_only_if_slurm_says_so_of_this_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, still: float, of_the_user: str, alone: str, is_lost: bool,
    number: str | None,
) -> None:  # fmt: skip
    (tmp_path / "OTHER").write_text(line(JobID="7", State="RUNNING", Comment="paceline:another") + "\n")
    (tmp_path / "OURS").write_text(line(JobID="7", State="RUNNING", Comment="paceline:abc") + "\n")
    which = "--name=it" if number is None else f"--jobs={number}"
    body = f'cd {tmp_path}\ncase "$*" in *{which}*) echo alone >> alone; {alone};; *) {of_the_user};; esac'
    squeue(tmp_path, monkeypatch, body)
    for _ in range(3):  # of clients, one after another
        found = Queue(tmp_path)
        assert found.has_lost(Identity("abc", "it", "/"), number, 0.0) == is_lost
        assert (found.problem is None) == (is_lost or "OURS" in alone)
    asked = (tmp_path / "alone").read_text().count("\n") if (tmp_path / "alone").exists() else 0
    assert asked == (0 if of_the_user == NO_USER else 3 if "OURS" in alone else 1), "what it says is kept"


def test_slurms_commands_that_cannot_be_started_are_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, still: float
) -> None:
    squeue(tmp_path, monkeypatch, "exit 0")

    def full(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("subprocess.Popen", full)
    found = Queue(tmp_path)
    assert not found.knows_since(0.0)
    assert str(found.problem) == "squeue cannot be started here: Resource temporarily unavailable"


@given(st.binary(max_size=40))
def test_a_damaged_answer_is_asked_for_again(data: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        squeue(Path(folder), patch, "exit 0")
        (Path(folder) / "queue.json").write_bytes(data)
        assert Queue(Path(folder)).entry("7", None) is None


@pytest.mark.parametrize("answers", [True, False])
def test_a_file_of_another_form_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, still: float, answers: bool
) -> None:
    (tmp_path / "rows").write_text(line(JobID="7", State="RUNNING", Comment="paceline:abc") + "\n")
    squeue(tmp_path, monkeypatch, f"cat {tmp_path}/rows")
    assert Queue(tmp_path).entry("7", None) is not None
    (file,) = tmp_path.glob("queue.json")
    file.write_text(json.dumps({"time": still, "asked": still, "entries": [{"number": 7, "is": "running"}]}))
    if not answers:
        command(tmp_path, "squeue", "exit 1")
    found = Queue(tmp_path)
    assert (found.entry("7", None) is not None) == answers
    assert found.knows_since(still - 60) == answers, "a job that is not named counts as gone only if Slurm has answered"


@pytest.fixture
def sacct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Sets what sacct runs."""
    squeue(tmp_path, monkeypatch, "exit 0")
    monkeypatch.setattr(scheduler._Silence, "until", 0.0)
    program = tmp_path / "bin" / "sacct"

    def runs(body: str) -> None:
        program.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$*\" >> {tmp_path}/calls\n{body}\n")
        program.chmod(0o755)

    return runs


@pytest.mark.parametrize(
    ("said", "word"),
    [
        ("CANCELLED by 1000", "CANCELLED"), ("TIMEOUT", "TIMEOUT"), ("OUT_OF_MEMORY", "OUT_OF_MEMORY"),
        ("NODE_FAIL", "NODE_FAIL"), ("PREEMPTED", "PREEMPTED"), ("COMPLETED", "COMPLETED"), ("RUNNING", ""), ("", ""),
    ],
)  # fmt: skip
def test_sacct_is_asked_once(tmp_path: Path, sacct: Callable[[str], None], said: str, word: str) -> None:
    sacct(f"echo '{said}|1700000000'")
    for _ in range(3):
        assert scheduler.end_of("12", tmp_path / "kept") == (word, 1.7e9 if word else None)
    assert (tmp_path / "calls").read_text() == "-n -X -P -o State,End -j 12\n"
    os.utime(tmp_path / "kept", (1, 1))
    assert scheduler.end_of("12", tmp_path / "kept").word == word
    assert (tmp_path / "calls").read_text().count("\n") == (1 if word else 2), "without an answer it is asked again"


@pytest.mark.parametrize(
    "said", ["Slurm accounting storage is disabled", "sacct: error: Unable to contact slurm controller"]
)
def test_an_sacct_that_fails_is_not_asked_for_each_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sacct: Callable[[str], None], said: str
) -> None:
    sacct(f"echo '{said}' >&2; exit 1")
    for number in ("13", "14", "15"):
        assert scheduler.end_of(number, tmp_path / number).word == ""
    assert (tmp_path / "calls").read_text().count("\n") == 1
    monkeypatch.setattr(scheduler._Silence, "until", 0.0)
    sacct("echo TIMEOUT")
    assert scheduler.end_of("16", tmp_path / "16").word == "TIMEOUT"


def job(folder: Path, name: str = "it", **fields: Any) -> JobFolder:
    """A job, made as a client does it."""
    jobs = Jobs(folder / "root")
    new = jobs.new(name)
    usual: Any = {"job_id": "abc", "created": 1.0, "spec": {}, "node": {}, "options": {}}
    new.job.write_text(json.dumps({**usual, **fields}))
    (new.path / "lives").mkdir()
    made = jobs.settle(new)
    assert made is not None
    return made


@pytest.mark.parametrize(
    ("comment", "name", "place", "is_ours"),
    [
        ("paceline:abc", "it", "FOLDER", True),
        ("site=7;paceline:abc queue=x", "renamed", "/", True),
        ("paceline:other", "it", "FOLDER", False),
        ("the site's own words", "it", "FOLDER", True),
        ("", "it", "FOLDER", True),
        ("", "it", "/home/me", False),
        ("the site's own words", "its", "FOLDER", False),
        ("x" * 1014 + "paceline:a", "it", "FOLDER", True),
    ],
)
def test_only_the_jobs_own_slurm_job_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comment: str, name: str, place: str, is_ours: bool
) -> None:
    it = job(tmp_path)
    it.add_id("7")
    where = place.replace("FOLDER", str(it.path))
    (tmp_path / "rows").write_text(line(JobID="7", State="RUNNING", Comment=comment, Name=name, WorkDir=where) + "\n")
    squeue(tmp_path, monkeypatch, f"cat {tmp_path}/rows")
    command(tmp_path, "scancel", f'echo "$@" >> {tmp_path}/cancelled')
    stopping.stop(it, now=True)
    assert (tmp_path / "cancelled").exists() == is_ours
    assert not is_ours or (tmp_path / "cancelled").read_text() == "--quiet 7\n"
    found = Queue(it.root).of(it.identity(it.read()))
    assert [entry.id for entry in found] == (["7"] if is_ours else [])


@pytest.mark.parametrize("now", [False, True])
def test_that_a_job_has_left_the_queue_is_seen_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now: bool
) -> None:
    it = job(tmp_path)
    it.add_id("7")
    (tmp_path / "rows").write_text(line(JobID="7", State="PENDING", Comment="paceline:abc") + "\n")
    squeue(tmp_path, monkeypatch, f"cat {tmp_path}/rows")
    command(tmp_path, "scancel", f"sed -i s/PENDING/CANCELLED/ {tmp_path}/rows")
    stopping.stop(it, now=now)
    entry = Queue(it.root).entry("7", None)
    assert entry is not None and entry.state == "CANCELLED"


def test_a_job_of_an_array_is_known_by_the_arrays_name(tmp_path: Path) -> None:
    it = JobFolder(tmp_path / "slurm" / "sweep-3")
    asked: Any = {}
    of_array = SlurmJob("x", 1.0, NodeJob(), NodeJob(), asked, task=("abc", 3))
    assert it.identity(of_array) == Identity("abc", "sweep", str(tmp_path / "slurm"))


def test_stop_is_tried_for_a_while_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it = job(tmp_path)
    it.add_id("7")
    squeue(tmp_path, monkeypatch, "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    clock = [0.0]
    monkeypatch.setattr(
        stopping, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=lambda s: clock.append(clock.pop() + s))
    )
    with pytest.raises(Refused, match=r"slurmctld.*it was tried for 30 s; nothing was stopped; try again"):
        stopping.stop(it, now=True, patience=30.0)
    assert not it.is_stopped
    assert len((tmp_path / "calls").read_text().splitlines()) == 1 + clock[0] / stopping._PAUSE == 16


def test_the_wait_for_slurm_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, still: float) -> None:
    squeue(tmp_path, monkeypatch, "exec sleep 600")
    found = Queue(tmp_path, seconds=1.0)
    assert found.entry("7", None) is None
    assert "does not answer within" in str(found.problem)
    again = Queue(tmp_path, seconds=600.0)
    assert again.entry("7", None) is None and again.problem is not None, "it is not asked again at once"


def test_a_client_that_hangs_while_it_asks_does_not_hold_up_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    squeue(tmp_path, monkeypatch, "exit 0")
    listed = queue._listed
    monkeypatch.setattr(queue, "_listed", lambda _: listed(GENEROUS))  # the limit is for the wait alone
    with open(tmp_path / "queue.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert Queue(tmp_path, seconds=1.0).knows_since(0.0)


def test_a_suspended_job_can_only_be_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it = job(tmp_path)
    it.add_id("7")
    (tmp_path / "rows").write_text(line(JobID="7", State="SUSPENDED", Comment="paceline:abc") + "\n")
    squeue(tmp_path, monkeypatch, f"cat {tmp_path}/rows")
    command(tmp_path, "scancel", f'echo "$@" >> {tmp_path}/cancelled')
    with pytest.raises(
        Refused, match=r"job it is suspended in Slurm, so it cannot save; nothing .*; end it with .* --now it, or"
    ):
        stopping.stop(it, now=False)
    assert not it.is_stopped and not (tmp_path / "cancelled").exists()
    stopping.stop(it, now=True)
    assert it.is_stopped and (tmp_path / "cancelled").read_text() == "--quiet 7\n"


@pytest.mark.parametrize("suspended", ["7", "8"])
def test_a_stop_of_several_jobs_says_how_many_were_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suspended: str
) -> None:
    spec = {**job_spec.JobSpec(script="train.py").for_node().to_json(), "name": "it"}
    rows = []
    for name, number in (("one", "7"), ("two", "8")):
        it = job(tmp_path, name, job_id=number, spec=spec, created=1.0, options={}, data=[], node={"working_dir": "/"})
        it.add_id(number)
        state = "SUSPENDED" if number == suspended else "RUNNING"
        rows.append(line(JobID=number, State=state, Comment=f"paceline:{number}"))
    (tmp_path / "rows").write_text("\n".join(rows) + "\n")
    squeue(tmp_path, monkeypatch, f"cat {tmp_path}/rows")
    command(tmp_path, "scancel", f'echo "$@" >> {tmp_path}/cancelled')
    why = r"job (one|two) is suspended in Slurm, .*; asked to stop: 1 of 2 jobs, the others go on; end it with"
    with pytest.raises(Refused, match=why):
        stopping.slurm_stop(Home(it.root), {"names": ["one", "two"], "now": False})
    going = "7" if suspended == "8" else "8"
    command(tmp_path, "scontrol", "true")
    (it.root / "queue.json").unlink()
    with pytest.raises(Refused, match=r"job (one|two) is suspended in Slurm, .*; nothing was stopped; end it with"):
        stopping.slurm_suspend(Home(it.root), {"names": ["one", "two"], "resumes": False})
    assert (tmp_path / "cancelled").read_text() == f"--quiet --state=PENDING {going}\n--quiet --signal=15 {going}\n"


def test_a_requeued_job_whose_agents_were_killed_has_no_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = {**job_spec.JobSpec(script="train.py").for_node().to_json(), "name": "it"}
    it = job(tmp_path, spec=spec, created=1.0, options={"slurm": {}}, data=[], node={"working_dir": "/"})
    it.add_id("7")
    run = RunDirectory(it.part(Start("7", 0), 0) / "it")
    run.path.mkdir(parents=True)
    run.spec.write_text(json.dumps(spec))
    agent = {"pid": 1, "host": "n0", "boot_id": "x", "start_time": 1}
    run.status.write_text(json.dumps(cached({"state": "RUNNING", "ranks": [], "agent": agent, "attempt": 0}, 0)))
    row = {"JobID": "7", "Comment": "paceline:abc"}
    squeue(tmp_path, monkeypatch, f"cat {tmp_path}/rows")
    request = {"name": "it", "rank": 0}
    (tmp_path / "rows").write_text(line(State="RUNNING", RestartCnt="0", **row) + "\n")
    assert describe.slurm_shell(Home(it.root), request)["node"] == "n0"
    (it.root / "queue.json").unlink()
    (tmp_path / "rows").write_text(line(State="PENDING", RestartCnt="1", Reason="JobHeldUser", **row) + "\n")
    with pytest.raises(Refused, match="job it does not run now: Slurm has requeued it; its user holds it"):
        describe.slurm_shell(Home(it.root), request)
