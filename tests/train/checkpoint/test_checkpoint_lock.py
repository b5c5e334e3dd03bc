"""One job at a time saves checkpoints into a folder."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from tests.conftest import GENEROUS, eventually  # noqa: E402
from tests.train.checkpoint.checkpoint_ranks import Ranks, processes, rank_state, save, shared_state, single  # noqa: E402
from tests.train.scripts import run as run_script  # noqa: E402

from paceline.contract import folder_lock  # noqa: E402
from paceline.contract.folder_lock import LOCK, FolderLock, FolderTaken, holder_of  # noqa: E402
from paceline.train.checkpoint import disk_format  # noqa: E402
from paceline.train.checkpoint.store import CheckpointError, CheckpointFolderTaken, CheckpointStore  # noqa: E402

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path

    from tests.conftest import Paceline

    from paceline.train.checkpoint.store import Exchange

pytestmark = pytest.mark.torch

# Takes checkpoints until there is a file `end`, or as one of several ranks until the second attempt.
TRAIN = """
    import os, sys, time
    import torch, paceline
    with paceline.init(checkpoint_dir=sys.argv[1] if len(sys.argv) > 1 else None, progress=False) as run:
        model = torch.nn.Linear(1, 1)
        model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), 0.1))
        run.resume()
        open(f"began-{os.environ.get('PACELINE_JOB')}-{run.attempt}", "w").close()
        while not (os.path.exists("end") if run.world_size == 1 else run.attempt):
            run.save(block=True)
            time.sleep(0.1)
        run.save(block=True)
    print("done")
"""


def _hold(folder: Path, end: Connection) -> None:
    store = single(folder)
    save(store, 1)
    end.send(os.getpid())
    end.recv()
    save(store, 2)
    store.close()
    end.send("intact")


def test_the_second_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    ours, theirs = processes.Pipe()
    first = processes.Process(target=_hold, args=(tmp_path, theirs))
    first.start()
    try:
        assert ours.poll(GENEROUS)
        pid = ours.recv()
        before = sorted(os.listdir(tmp_path))
        second = single(tmp_path)
        for attempt in (second.hold, lambda: save(second, 7)):
            with pytest.raises(CheckpointFolderTaken, match=rf"{tmp_path}: held by .*pid {pid} on .*; stop that first"):
                attempt()
        found = second.latest()  # reading takes no hold
        assert found is not None and found.step == 1
        assert sorted(os.listdir(tmp_path)) == before
        ours.send("go on")
        assert ours.poll(GENEROUS)
        assert ours.recv() == "intact"
        first.join(GENEROUS)
        save(second, 8)
    finally:
        first.kill()
        first.join()
    second.close()
    assert sorted(os.listdir(tmp_path)) == ["step-000001", "step-000002", "step-000008"]


def test_a_killed_holder_is_followed_at_once_though_its_children_live(tmp_path: Path) -> None:
    code = (
        "import os, sys, signal; from pathlib import Path; from paceline.contract.folder_lock import FolderLock\n"
        "lock = FolderLock(Path(sys.argv[1]), 0)\n"
        "if os.fork() == 0: signal.pause()\n"
        "print(flush=True); signal.pause()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, process_group=0)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        assert f"pid {process.pid}" in (holder_of(tmp_path) or "")
        process.kill()
        process.wait()
        eventually(lambda: holder_of(tmp_path) is None, "the child, which has just been forked, lets go")
        FolderLock(tmp_path, 0).release()
        assert not os.listdir(tmp_path)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()


def test_an_earlier_attempt_on_another_machine_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a file server does not know that the machine with the lock is gone."""
    code = "import os, sys, signal; from pathlib import Path; from paceline.contract import folder_lock\n"
    code += "folder_lock.boot_id = lambda: 'another'; folder_lock.socket.gethostname = lambda: 'far'\n"
    code += "lock = folder_lock.FolderLock(Path(sys.argv[1]), 0, ['one', 'two']); print(flush=True); signal.pause()\n"
    env = {**os.environ, "PACELINE_ATTEMPT": "1", "PACELINE_JOB": "it"}
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, env=env)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        monkeypatch.setenv("PACELINE_ATTEMPT", "2")
        with pytest.raises(FolderTaken, match=r"job it \(rank 0, pid \d+ on far\)"):
            FolderLock(tmp_path, 0, ["other"])
        lock = FolderLock(tmp_path, 0, ["two", "three"])
        assert json.loads((tmp_path / LOCK).read_text())["attempt"] == 2
        lock.release()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _take_over(folder: Path, end: Connection) -> None:
    os.environ.update(PACELINE_JOB_ID="it", PACELINE_ATTEMPT="1")
    store = single(folder)
    store.hold()
    end.send(os.getpid())
    step = end.recv()
    while step:
        save(store, step)
        end.send(step)
        step = end.recv()
    store.close()


@pytest.mark.parametrize("when", ["before it saves", "when it has saved", "when it has ended"])
def test_an_attempt_that_was_cut_off_saves_nothing_where_a_later_one_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    monkeypatch.setattr(folder_lock, "boot_id", lambda: "another")
    monkeypatch.setenv("PACELINE_JOB_ID", "it")
    cut_off = single(tmp_path)
    save(cut_off, 1)
    ours, theirs = processes.Pipe()
    later = processes.Process(target=_take_over, args=(tmp_path, theirs))
    later.start()
    try:
        assert ours.poll(GENEROUS)
        by = f"held by .*pid {ours.recv()} on .* now"
        if when != "before it saves":
            ours.send(2)
            assert ours.poll(GENEROUS)
            ours.recv()
        if when == "when it has ended":
            ours.send(0)
            later.join(GENEROUS)
            by = "another run has saved there meanwhile"
        for step in (2, 3):
            with pytest.raises(
                CheckpointFolderTaken, match=rf"cannot save step 2 in {tmp_path}: {by}; stop that first"
            ):
                save(cut_off, step)
        if when != "when it has ended":
            ours.send(4)
            assert ours.poll(GENEROUS)
    finally:
        later.kill()
        later.join()
    cut_off.close()
    expected = {"before it saves": [1, 4], "when it has saved": [1, 2, 4], "when it has ended": [1, 2]}[when]
    assert [name for name in sorted(os.listdir(tmp_path)) if name != LOCK] == [f"step-{n:06d}" for n in expected]


def test_an_attempt_that_was_cut_off_while_it_wrote_keeps_its_checkpoint_to_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leaves alone what the later one writes."""
    monkeypatch.setenv("PACELINE_JOB_ID", "it")
    cut_off = single(tmp_path)
    save(cut_off, 1)
    write, theirs = disk_format.write_manifest, tmp_path / ".saving-step-000003-abcd1234"

    def begin(*args: Any) -> None:
        write(*args)
        (tmp_path / LOCK).unlink()
        (tmp_path / LOCK).write_text(json.dumps({"what": folder_lock._WHAT}))
        theirs.mkdir()
        holder.append(subprocess.Popen(["flock", str(tmp_path / LOCK), "sleep", "infinity"], process_group=0))
        eventually(lambda: holder_of(tmp_path), "it is locked")

    holder: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(disk_format, "write_manifest", begin)
    try:
        with pytest.raises(CheckpointFolderTaken, match="held by another process now"):
            save(cut_off, 2)
        cut_off.close()
    finally:
        for process in holder:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert sorted(os.listdir(tmp_path)) == [LOCK, theirs.name, "step-000001"]


def test_a_holder_whose_file_was_removed_locks_the_folder_again(tmp_path: Path) -> None:
    other = FolderLock(tmp_path, 0)  # of the same process
    store = single(tmp_path)
    save(store, 1)
    (tmp_path / LOCK).unlink()
    assert not other.is_kept()
    save(store, 2)
    assert f"pid {os.getpid()}" in (holder_of(tmp_path) or "")
    other.release()
    assert holder_of(tmp_path) is not None
    store.close()
    assert sorted(os.listdir(tmp_path)) == ["step-000001", "step-000002"]
    FolderLock(tmp_path, 0).release()


def test_a_file_that_is_not_ours_stays(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("mine")
    store = single(tmp_path)
    with pytest.raises(CheckpointError, match=r"\.paceline-holder there is not paceline's; move it away"):
        save(store, 1)
    assert holder_of(tmp_path) is None
    assert (tmp_path / LOCK).read_text() == "mine"
    assert os.listdir(tmp_path) == [LOCK]


def _try_to_hold(rank: int, exchange: Exchange, folders: list[Path]) -> str:
    store = CheckpointStore(folders[rank], rank=rank, world_size=2, exchange=exchange)
    try:
        store.hold()
    except CheckpointFolderTaken as error:
        return str(error)
    store.save(1, shared_state(1), rank_state(1, rank), block=True)
    store.close()
    return "saved"


@pytest.mark.parametrize("is_shared", [True, False])
def test_all_ranks_are_refused_alike(tmp_path: Path, is_shared: bool) -> None:
    folders = [tmp_path / "a", tmp_path / ("a" if is_shared else "b")]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    lock = FolderLock(folders[1], 0)
    outcomes = Ranks(tmp_path / "meeting", 2, _try_to_hold, folders).outcomes()
    first, second = (outcome.value for outcome in outcomes if outcome)
    assert first == second
    assert f"held by another run (rank 0, pid {os.getpid()}" in first
    lock.release()
    outcomes = Ranks(tmp_path / "again", 2, _try_to_hold, folders).outcomes()
    assert [outcome and outcome.value for outcome in outcomes] == ["saved", "saved"]


def test_a_job_is_refused_while_another_has_the_folder(paceline: Paceline) -> None:
    paceline.script(TRAIN)
    flags = ("--checkpoint-dir", "checkpoints", "script.py")
    assert paceline("submit", "--name", "one", *flags).returncode == 0
    began = paceline.folder / "began-one-0"
    eventually(began.exists, "the first trains")
    for verb in ("submit", "run"):
        done = paceline(verb, "--name", "two", *flags)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        for part in (f"--checkpoint-dir {paceline.folder}/checkpoints: job one (rank 0, pid ", "stop that first"):
            assert part in done.stderr
    assert paceline("get", "two").returncode == 2, "nothing is left of it"

    alone = run_script(paceline, "script.py", "checkpoints", timeout=GENEROUS)
    assert alone.returncode == 1
    assert "CheckpointFolderTaken: cannot save checkpoints in " in alone.stderr
    assert "held by job one (rank 0, pid " in alone.stderr

    (paceline.folder / "end").touch()
    assert paceline("wait", "one").returncode == 0, paceline("logs", "one").stdout
    (paceline.folder / "end").unlink()
    began.unlink()
    shutil.rmtree(paceline.folder / "home" / "jobs" / "one" / "checkpoints", ignore_errors=True)
    done = paceline.succeeds("resubmit", "one")
    again = done.stdout.strip()
    eventually((paceline.folder / f"began-{again}-0").exists, "it goes on")
    (paceline.folder / "end").touch()
    assert paceline("wait", again).returncode == 0


def test_an_attempt_follows_the_one_before_at_once(paceline: Paceline) -> None:
    paceline.script(TRAIN)
    flags = ("-n", "2", "--max-restarts", "1", "--checkpoint-dir", "checkpoints", "script.py")
    assert paceline("submit", "--name", "one", *flags).returncode == 0
    eventually((paceline.folder / "began-one-0").exists, "it trains")
    ranks = json.loads(paceline("get", "one", "-o", "json").stdout)["instances"]
    os.kill(ranks[0]["pid"], signal.SIGKILL)
    assert paceline("wait", "one").returncode == 0, paceline("logs", "one").stdout
