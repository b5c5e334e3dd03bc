"""Which start of a Slurm job may work, and what is seen of it on a disk that remembers what was missing."""

from __future__ import annotations

import builtins
import contextlib
import io
import json
import os
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import GENEROUS, eventually

from paceline.node.host import check
from paceline.node.host.slurm import job_folders
from paceline.node.host.slurm.end import finish
from paceline.node.host.slurm.job_folder import JobFolder, Start
from paceline.node.host.slurm.job_folders import Jobs
from paceline.node.host.slurm.look.queue import Queue
from paceline.node.host.slurm.place import task
from paceline.node.journal.state import cached
from paceline.node.logs import growing_file
from paceline.node.logs.following import Output, updates
from paceline.node.logs.query import LogQuery
from paceline.node.logs.reader import read
from paceline.node.rundir.directory import RunDirectory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STARTS = [Start("90", 0), Start("90", 1), Start("7", 0), Start("7", 1)]  # of a chain whose numbers have begun again


def made(root: Path, ids: tuple[str, ...] = ("90", "7")) -> JobFolder:
    new = Jobs(root).new("it")
    new.job.write_text(json.dumps({"job_id": "abc"}))
    (new.path / "lives").mkdir()
    for number in ids:
        new.add_id(number)
    folder = Jobs(root).settle(new)
    assert folder is not None
    return folder


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(STARTS), min_size=1, max_size=8))
def test_the_newest_start_works_however_late_others_come(order: list[Start]) -> None:
    with TemporaryDirectory() as root:
        folder = made(Path(root))
        answers = [folder.take_over(start) for start in order]
        newest = max(order, key=STARTS.index)
        assert folder.claimed == sorted(set(order), key=STARTS.index)
        assert folder.follower(newest) == ""
        for number, (start, answer) in enumerate(zip(order, answers, strict=True)):
            before = max(order[: number + 1], key=STARTS.index)
            assert answer == (None if start == before else before)
            may_work = answer is None and not folder.follower(start)
            assert may_work == (start == newest), "an agent of another one ends, or was refused"


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Makes this process the only task of a Slurm job; scancel is written down."""
    (tmp_path / "scancel").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/cancelled\n')
    (tmp_path / "scancel").chmod(0o755)

    def start(number: str, restarts: str) -> None:
        env = {
            "PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": number, "SLURM_RESTART_COUNT": restarts,
            "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NNODES": "1",
            "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1",
            "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_TASKS_PER_NODE": "1",
            "SLURM_STEP_NODELIST": "n0", "SLURM_JOB_NODELIST": "n0",
        }  # fmt: skip
        for name, value in env.items():
            monkeypatch.setenv(name, value)

    monkeypatch.setattr(task, "_NOTING", 0.5)
    return start


def test_a_late_task_of_an_old_start_refuses_to_work(
    tmp_path: Path, started: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made(tmp_path)
    assert folder.take_over(Start("7", 0)) is None
    started("90", "3")
    with pytest.raises(SystemExit) as ended:
        task.main(str(folder.path))
    assert ended.value.code == 2
    assert "Slurm has started the job it again meanwhile, as 7.0; this start, 90.3, ends" in capsys.readouterr().err
    assert folder.follower(Start("7", 0)) == "" and folder.refusals(Start("90", 3)) == []
    assert (tmp_path / "cancelled").read_text() == "--quiet --signal=TERM 90.0\n"


def test_an_old_start_decides_nothing(tmp_path: Path, started: Callable[[str, str], None]) -> None:
    folder = made(tmp_path)
    folder.take_over(Start("90", 0))
    folder.take_over(Start("90", 1))
    started("90", "0")
    folder.stop.touch()
    assert finish.decide(str(folder.path), "143") == 1
    assert (folder.outcome(Start("90", 0)) or {})["next"] is None
    assert not (tmp_path / "cancelled").exists(), "its Slurm job is that of the new start"


def test_a_slurm_job_of_somebody_else_with_the_same_script(
    tmp_path: Path, started: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made(tmp_path)
    started("555", "0")
    folder.of(Start("555", 0)).mkdir()  # its batch script makes it
    with pytest.raises(SystemExit) as ended:
        task.main(str(folder.path))
    assert ended.value.code == 2
    assert "Slurm job 555 is none of the job it, whose script it has" in capsys.readouterr().err
    assert folder.starts == []
    assert finish.decide(str(folder.path), "2") == 2
    assert list((folder.path / "lives").iterdir()) == []


def test_a_number_that_is_noted_late(
    tmp_path: Path, started: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made(tmp_path)
    started("555", "0")
    monkeypatch.setattr(task, "_NOTING", GENEROUS)
    folder.stop.touch()  # it ends once it has claimed the job
    threading.Timer(0.2, folder.add_id, ["555"]).start()
    with pytest.raises(SystemExit) as ended:
        task.main(str(folder.path))
    assert ended.value.code == 143 and folder.claimed == [Start("555", 0)]


def test_when_a_start_is_over(tmp_path: Path) -> None:
    folder, start = made(tmp_path), Start("90", 0)
    folder.take_over(start)
    assert not folder.is_over(start), "its nodes may be about to make their run directories"
    for rank in (0, 1):
        run = RunDirectory(folder.part(start, rank) / "it")
        run.path.mkdir(parents=True)
        run.spec.write_text("{}")
        run.status.write_text(json.dumps(cached({"state": "STOPPED"}, 0)))
        assert folder.is_over(start)
    run.status.write_text(json.dumps(cached({"state": "RUNNING"}, 0)))
    assert not folder.is_over(start)
    folder.part(start, 2).mkdir()
    run.status.write_text(json.dumps(cached({"state": "FAILED"}, 0)))
    assert not folder.is_over(start), "one node has not made its run directory"
    (folder.part(start, 2) / "refused").write_text("no GPU")
    assert folder.is_over(start)
    (folder.of(start) / "outcome.json").write_text('{"next": null}')
    (folder.part(start, 3)).mkdir()
    assert folder.is_over(start)


# -- NFS ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """A disk that remembers names that were missing until their folder is read, as clients of NFS do."""
    missing: set[str] = set()
    for module, name in ((builtins, "open"), (io, "open"), (os, "open"), (os, "stat")):
        monkeypatch.setattr(module, name, _remembering(getattr(module, name), missing))
    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, _reading(getattr(os, name), missing))
    return missing


def _remembering(real: Callable[..., Any], missing: set[str]) -> Callable[..., Any]:
    def looked_up(path: Any, *args: Any, **kwargs: Any) -> Any:
        name = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
        writes = "w" in str(args[:1]) or (args and isinstance(args[0], int) and args[0] & os.O_CREAT)
        if name in missing and not writes:
            raise FileNotFoundError(2, "remembered as missing", name)
        try:
            return real(path, *args, **kwargs)
        except FileNotFoundError:
            if name is not None:
                missing.add(str(name))
            raise

    return looked_up


def _reading(real: Callable[..., Any], missing: set[str]) -> Callable[..., Any]:
    def read_folder(path: Any = ".") -> Any:
        missing.difference_update({name for name in missing if os.path.dirname(name) == os.fspath(path)})
        return real(path)

    return read_folder


def elsewhere(path: Path, text: str) -> None:
    """Write as another machine does: this one does not hear of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(fd, text.encode())
    os.close(fd)


def test_what_other_machines_write_is_seen_at_once(tmp_path: Path, forgetful: set[str]) -> None:
    folder, start = made(tmp_path, ids=()), Start("90", 0)

    def seen() -> list[Any]:
        return [
            folder.is_stopped, folder.ids, folder.outcome(start), folder.step(start), folder.node(start, 0),
            [why for why, _ in folder.refusals(start)], folder.follower(start), len(folder.runs(start)),
        ]  # fmt: skip

    assert seen() == [False, [], None, None, "", [], "", 0]
    for name, text in {
        "stop": "", "ids": "90\n", "lives/90.0/outcome.json": "{}", "lives/90.0/step": "4", "lives/90.0/0/node": "n7",
        "lives/90.0/0/refused": "no", "lives/90.0/followed": "90.1", "lives/90.0/0/it/spec.json": "{}",
    }.items():  # fmt: skip
        elsewhere(folder.path / name, text)
    assert seen() == [True, ["90"], {}, "90.4", "n7", ["no"], "90.1", 1]


def test_the_fake_disk_remembers(tmp_path: Path, forgetful: set[str]) -> None:
    assert not (tmp_path / "it").exists()
    elsewhere(tmp_path / "it", "here")
    assert not (tmp_path / "it").exists()
    with contextlib.suppress(FileNotFoundError):
        assert not (tmp_path / "it").read_text()
    os.listdir(tmp_path)
    assert (tmp_path / "it").read_text() == "here"


def test_a_trial_sees_what_another_node_writes(
    tmp_path: Path, forgetful: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "_NODE_PATIENCE", GENEROUS)
    elsewhere(tmp_path / "facts-0.json", "{}")
    assert not (tmp_path / "facts-1.json").exists()
    threading.Timer(0.2, elsewhere, [tmp_path / "facts-1.json", '{"port": 7}']).start()
    assert check._wait(tmp_path, "facts", [1]) == {1: {"port": 7}}


@pytest.fixture
def late_bytes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A disk on which an open file does not show what another machine adds, until it is opened anew."""
    sizes: dict[int, int] = {}
    real = os.pread

    def opened(*args: Any, **kwargs: Any) -> Any:
        file = open(*args, **kwargs)  # noqa: SIM115 - the caller closes it
        sizes[file.fileno()] = os.fstat(file.fileno()).st_size
        return file

    monkeypatch.setattr(growing_file, "open", opened, raising=False)
    monkeypatch.setattr(os, "pread", lambda fd, n, at: real(fd, max(0, min(n, sizes.get(fd, n + at) - at)), at))
    yield


def running(path: Path) -> RunDirectory:
    """A run directory of a job on another machine."""
    run = RunDirectory(path)
    run.prepare_attempt(0)
    elsewhere(run.log(0, 0), "first\n")
    elsewhere(run.times(0), "=1.000 0o:6\n")
    entry = {"rank": 0, "local_rank": 0, "out": str(run.log(0, 0)), "err": str(run.log(0, 0)), "error": "/none"}
    elsewhere(run.journal, json.dumps({"v": 1, "event": "started", "time": 1.0, "attempt": 0, "logs": [entry]}) + "\n")
    return run


def test_the_last_lines_are_read_after_the_end(tmp_path: Path, late_bytes: None) -> None:
    run, is_over = running(tmp_path / "it"), threading.Event()
    found = []
    for text in read(run.path, LogQuery(None, follow=True), is_over.is_set):
        found.append(text.text)
        if not is_over.is_set():
            elsewhere(run.log(0, 0), "last\n")
            is_over.set()
    assert b"".join(found) == b"first\nlast\n"


def test_a_client_in_the_foreground_gets_the_last_lines(tmp_path: Path, late_bytes: None) -> None:
    run = running(tmp_path / "it")
    lifeline, end = os.pipe()
    found, has_ended = [], False
    for update in updates(run, lifeline, poll=0.05):
        found.append(update.data if isinstance(update, Output) else update.name)
        if isinstance(update, Output) and not has_ended:
            elsewhere(run.log(0, 0), "last\n")
            elsewhere(run.journal, json.dumps({"v": 1, "event": "finished", "time": 2.0, "state": "STOPPED"}) + "\n")
            os.close(end)
            has_ended = True
    assert found == ["started", b"first\n", b"last\n", "finished"]
    os.close(lifeline)


# -- clocks ------------------------------------------------------------------------------------------------------------


def test_the_clock_of_this_machine_decides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path)
    there = Jobs(tmp_path)
    young, old = there.new("young"), there.new("old")
    os.utime(old.path.parent, (0, 0))
    monkeypatch.setattr(time, "time", lambda: 4e9)
    there.sweep()
    assert young.path.is_dir() and not old.path.parent.exists()


def test_a_long_upload_does_not_count_as_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_folders, "_REFRESH", 0.05)
    there = Jobs(tmp_path)
    building = there.new("it")
    with there.filling(building):
        os.utime(building.path.parent, (0, 0))
        eventually(lambda: building.path.parent.stat().st_mtime > 0, "it has shown that it is there")
        there.sweep()
    assert building.path.is_dir()


def test_answers_of_slurm_are_as_old_as_the_disk_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, says in (("scontrol", "echo ClusterName = here"), ("squeue", f"echo called >> {tmp_path}/calls")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{says}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    made_at = made(tmp_path / "root").job.stat().st_mtime
    for ahead in (0, 600, -600):
        monkeypatch.setattr(time, "time", lambda ahead=ahead: made_at + ahead)
        assert not Queue(tmp_path / "root", fresh=500.0).knows_since(made_at + 300)
        assert Queue(tmp_path / "root", fresh=500.0).knows_since(made_at - 300)
    assert (tmp_path / "calls").read_text() == "called\n"
