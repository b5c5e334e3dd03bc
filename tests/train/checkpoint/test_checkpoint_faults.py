"""Checkpoints outlive kills at any moment and any damage on the disk."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from tests.train.checkpoint.checkpoint_ranks import (  # noqa: E402
    Ranks,
    Warnings,
    processes,
    rank_state,
    same,
    save,
    shared_state,
    single,
)

from paceline.contract.folder_lock import LOCK  # noqa: E402
from paceline.train.checkpoint.disk_format import make_temporary  # noqa: E402
from paceline.train.checkpoint.store import CheckpointError, CheckpointStore  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

    from paceline.train.checkpoint.store import Exchange

pytestmark = pytest.mark.torch

KILLS = int(os.environ.get("PACELINE_CHECKPOINT_KILLS", "30"))  # more of them: a soak
EVERY_FILE = ["model.pt", "optimizer.pt", "scheduler.pt", "rank-00000.pt", "manifest.json"]


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """The lines that checkpoint stores log."""
    handler = Warnings()
    logging.getLogger("paceline").addHandler(handler)
    yield handler.lines
    logging.getLogger("paceline").removeHandler(handler)


def loaded_step(folder: Path) -> int:
    """The step of the newest checkpoint, which must be whole; 0 if there is none."""
    found = single(folder).load()
    if found is None:
        return 0
    assert same(found.shared_state, shared_state(found.step))
    assert same(found.rank_state, rank_state(found.step, 0))
    return found.step


def _train(folder: Path, end: Connection) -> None:
    """Save step after step in the background, and spoil the saved state at once each time."""
    torch.set_num_threads(1)
    store = single(folder, keep=2)
    found = store.load()
    step = found.step if found else 0
    while True:
        step += 1
        state = shared_state(step)
        store.save(step, state, rank_state(step, 0))
        for tensor in state["model"].values():
            tensor.fill_(-1)
        store.wait()
        end.send(step)


def _drain(end: Connection, last: int) -> int:
    try:
        while True:
            last = end.recv()
    except EOFError:
        return last


@pytest.mark.soak
def test_killed_at_random_moments(tmp_path: Path, warnings: list[str]) -> None:
    moments = random.Random(20240131)
    committed = 0
    for _ in range(KILLS):
        ours, theirs = processes.Pipe(duplex=False)
        process = processes.Process(target=_train, args=(tmp_path, theirs))
        process.start()
        theirs.close()
        for _ in range(moments.randrange(3)):
            committed = ours.recv()
        process.join(moments.random() * 0.03)  # it never ends by itself
        process.kill()
        process.join()
        told = _drain(ours, committed)
        committed = loaded_step(tmp_path)
        assert committed - told in (0, 1)  # the commit may be done and not yet told
    assert committed
    assert warnings == []
    save(single(tmp_path), committed + 2)
    assert len({path.name for path in tmp_path.iterdir()} - {LOCK}) == 3  # no leftovers


def _save_until(folder: Path, moment: int, end: Connection) -> None:
    """Save a fourth checkpoint with a leftover to remove, and die at the given file operation in the folder."""
    torch.set_num_threads(1)
    store = single(folder)

    def watch(event: str, args: tuple[Any, ...]) -> None:
        nonlocal moment
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir"):
            name = args[0]
            if isinstance(name, (str, Path)) and str(name).startswith(str(folder)):
                moment -= 1
                if moment < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    store.save(4, shared_state(4), rank_state(4, 0), block=True)
    end.send(moment)


@pytest.mark.timeout(1200)  # some 60 processes, one after the other
def test_killed_at_each_file_operation(tmp_path: Path, warnings: list[str]) -> None:
    start = tmp_path / "start"
    store = single(start)
    for step in (1, 2, 3):
        save(store, step)
    make_temporary(start / ".saving-step-000004-0123abcd")
    shutil.copytree(start / "step-000001", start / ".saving-step-000004-0123abcd", dirs_exist_ok=True)
    store.close()
    steps = set[int]()
    for moment in range(1000):
        folder = tmp_path / str(moment)
        shutil.copytree(start, folder)
        ours, theirs = processes.Pipe(duplex=False)
        process = processes.Process(target=_save_until, args=(folder, moment, theirs))
        process.start()
        theirs.close()
        ended = _drain(ours, -1) >= 0
        process.join()
        step = loaded_step(folder)
        steps.add(step)
        save(single(folder), 5)
        left = sorted(path.name for path in folder.iterdir() if path.name != LOCK)
        shutil.rmtree(folder)
        if ended:
            assert step == 4
            break
        assert process.exitcode == -signal.SIGKILL
        assert left == [f"step-{n:06d}" for n in ((2, 3, 5) if step == 3 else (3, 4, 5))]
    assert moment > 20
    assert steps == {3, 4}
    assert warnings == []


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of steps 1, 2 and 3."""
    folder = tmp_path_factory.mktemp("three")
    store = single(folder)
    for step in (1, 2, 3):
        save(store, step)
    return folder


def _flip(path: Path, where: float) -> None:
    content = bytearray(path.read_bytes())
    bit = int(where * len(content) * 8)
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def _truncate(path: Path, where: float) -> None:
    path.write_bytes(path.read_bytes()[: int(where * path.stat().st_size)])


def _remove(path: Path, where: float) -> None:
    path.unlink()


def _extend(path: Path, where: float) -> None:
    path.write_bytes(path.read_bytes() + b"x")


DAMAGE = st.tuples(
    st.sampled_from(EVERY_FILE),
    st.sampled_from([_flip, _truncate, _remove, _extend]),
    st.floats(0, 1, exclude_max=True),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from([1, 2, 3]), DAMAGE))
def test_damage_is_told_and_the_one_before_is_used(
    three: Path, tmp_path: Path, warnings: list[str], damage: dict[int, tuple[str, Any, float]]
) -> None:
    warnings.clear()
    folder = tmp_path / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(three, folder)
    for step, (name, change, where) in damage.items():
        change(folder / f"step-{step:06d}" / name, where)
    whole = [step for step in (1, 2, 3) if step not in damage]
    try:
        step = loaded_step(folder)
    except CheckpointError as error:
        assert not whole
        assert f"all 3 checkpoints in {folder} are damaged; move the folder away" in str(error)
        step = 0
    else:
        assert step
    if step in damage:  # what changes white space of the manifest changes nothing
        assert damage[step][0] == "manifest.json"
        before, after = (json.loads((f / f"step-{step:06d}" / "manifest.json").read_text()) for f in (three, folder))
        assert before == after
    else:
        assert step == max(whole, default=0)
    expected = [s for s, (name, _, _) in damage.items() if s > step or name == "manifest.json"]
    assert {line.split(" is damaged")[0] for line in warnings} >= {
        f"checkpoint {folder}/step-{s:06d}" for s in expected if s > step
    }
    assert len(warnings) <= len(expected)
    assert all("\n" not in line and damage[int(line.split("step-")[1][:6])][0] in line for line in warnings)


def test_a_damaged_one_does_not_count_among_those_kept(tmp_path: Path, warnings: list[str]) -> None:
    store = single(tmp_path, keep=2)
    save(store, 1)
    save(store, 2)
    _flip(tmp_path / "step-000002" / "model.pt", 0.5)
    store = single(tmp_path, keep=2)
    for _ in range(2):
        found = store.load()
        assert found is not None
        assert found.step == 1
    (line,) = warnings
    assert line.startswith(f"checkpoint {tmp_path}/step-000002 is damaged and not used: model.pt: its checksum is ")
    save(store, 2)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != LOCK) == [
        "step-000001",
        "step-000002",
        "step-000002-2",
    ]
    save(store, 3)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != LOCK) == ["step-000002-2", "step-000003"]


def newest(folder: Path) -> int:
    """The step of the newest committed checkpoint, any of which may be followed and removed meanwhile; 0 if none."""
    return max((int(path.name[5:11]) for path in folder.glob("step-*")), default=0)


def _train_as_rank(rank: int, exchange: Exchange, folder: Path) -> None:
    store = CheckpointStore(folder, rank=rank, world_size=2, exchange=exchange, keep=2)
    found = store.load()
    step = found.step if found else 0
    while True:
        step += 1
        store.save(step, shared_state(step), rank_state(step, rank))


@pytest.mark.soak
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_at_random_moments_fails_the_other(tmp_path: Path, warnings: list[str], victim: int) -> None:
    moments = random.Random(victim)
    step = 0
    for kill in range(max(1, KILLS // 6)):
        ranks = Ranks(tmp_path / f"meeting-{kill}", 2, _train_as_rank, tmp_path / "checkpoints")
        while newest(tmp_path / "checkpoints") <= step and ranks.processes[victim].is_alive():
            ranks.processes[victim].join(0.01)
        ranks.processes[victim].join(moments.random() * 0.03)
        ranks.processes[victim].kill()
        outcomes = ranks.outcomes()
        other = outcomes[1 - victim]
        assert outcomes[victim] is None
        assert other is not None
        assert other.error == f"ExchangeError: rank {victim} ended while the ranks agreed on a checkpoint"
        now = loaded_step(tmp_path / "checkpoints")
        assert now > step
        step = now
    assert warnings == []
