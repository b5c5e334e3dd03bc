"""Checkpoints of nodes that share no folder: each has its own copy, and gets from the others what it lacks."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from tests.conftest import eventually  # noqa: E402
from tests.train.checkpoint.checkpoint_ranks import Ranks, rank_state, same, save, shared_state, single  # noqa: E402

from paceline.contract.folder_lock import LOCK  # noqa: E402
from paceline.train.checkpoint.store import CheckpointError, CheckpointStore  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.train.checkpoint.store import Exchange

pytestmark = pytest.mark.torch


def store_of(rank: int, exchange: Exchange, folders: list[Path], **options: Any) -> CheckpointStore:
    return CheckpointStore(folders[rank], rank=rank, world_size=dist.get_world_size(), exchange=exchange, **options)


def _go_on(rank: int, exchange: Exchange, folders: list[Path], steps: list[int]) -> tuple[int, str]:
    """Load and save; returns the step found, or the error that all ranks get."""
    try:
        store = store_of(rank, exchange, folders)
        found = store.load()
        if found:
            assert found.path.parent == folders[rank]
            assert same(found.shared_state, shared_state(found.step))
            assert same(found.rank_state, rank_state(found.step, rank) if rank < found.world_size else None)
        for step in steps:
            save(store, step, rank)
    except CheckpointError as error:
        return -1, str(error)
    return found.step if found else 0, ""


class Nodes:
    """Runs of ranks, each of which sees its node's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._runs = 0

    def start(self, nodes: list[int], function: Callable[..., Any], *args: Any, **options: Any) -> Ranks:
        """A rank on each of these nodes."""
        self._runs += 1
        folders = [self.node(number) for number in nodes]
        return Ranks(self.folder / f"meeting-{self._runs}", len(nodes), function, folders, *args, **options)

    def go_on(self, nodes: list[int], *steps: int) -> int | str:
        """The step that all found, or the error that all heard."""
        answers = set(self.start(nodes, _go_on, list(steps)).values())
        assert len(answers) == 1
        step, error = answers.pop()
        return error or step

    def node(self, number: int) -> Path:
        return self.folder / f"node{number}"

    def names(self, number: int) -> list[str]:
        return sorted(path.name for path in self.node(number).iterdir() if path.name != LOCK)


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    return Nodes(tmp_path)


def spoil(file: Path) -> None:
    file.write_bytes(b"?" * file.stat().st_size)


def test_each_node_has_a_whole_copy(nodes: Nodes) -> None:
    assert nodes.go_on([0, 0, 1, 1], 1, 2) == 0  # two nodes of two ranks
    assert nodes.names(0) == nodes.names(1) == ["step-000001", "step-000002"]
    for number in (0, 1):
        found = single(nodes.node(number)).load()
        assert found is not None
        assert (found.step, found.world_size) == (2, 4)
    assert nodes.go_on([1]) == 2


def test_a_newcomer_gets_the_newest(nodes: Nodes) -> None:
    assert nodes.go_on([0], 1, 2) == 0
    assert nodes.go_on([1, 0, 2, 1]) == 2  # from rank 1, and to two nodes, one of which has two ranks
    assert nodes.names(1) == nodes.names(2) == ["step-000002"]
    assert nodes.go_on([2, 1, 3], 3) == 2
    assert nodes.names(3) == ["step-000002", "step-000003"]
    shutil.rmtree(nodes.node(2))
    assert nodes.go_on([2, 0, 1]) == 3


def test_a_stale_node_gets_the_newest_and_what_it_had_is_removed_in_time(nodes: Nodes) -> None:
    assert nodes.go_on([0, 1], 1, 2) == 0
    assert nodes.go_on([0], 3, 4) == 2
    assert nodes.go_on([0, 1], 5) == 4
    assert nodes.names(1) == ["step-000002", "step-000004", "step-000005"]
    assert nodes.go_on([1], 6, 7) == 5
    assert nodes.go_on([0, 1], 8) == 7
    assert nodes.names(0) == ["step-000005", "step-000007", "step-000008"]
    assert nodes.names(1) == ["step-000006", "step-000007", "step-000008"]


def test_who_trained_apart_longest_is_followed(nodes: Nodes) -> None:
    assert nodes.go_on([0, 1], 10) == 0
    assert nodes.go_on([0], 11) == 10
    assert nodes.go_on([1], 11, 12) == 10
    assert nodes.go_on([0, 1], 13) == 12
    assert nodes.names(0) == ["step-000011", "step-000012", "step-000013"]


@pytest.mark.parametrize("name", ["model.pt", "rank-00001.pt", "manifest.json"])
@pytest.mark.parametrize("number", [0, 1])
def test_a_damaged_copy_is_replaced_by_another_nodes(nodes: Nodes, number: int, name: str) -> None:
    assert nodes.go_on([0, 1], 1, 2) == 0
    spoil(nodes.node(number) / "step-000002" / name)
    outcomes = nodes.start([0, 1], _go_on, []).outcomes()
    assert [outcome and outcome.value for outcome in outcomes] == [(2, "")] * 2
    told = [outcome.warnings for outcome in outcomes if outcome]
    assert told[1 - number] == []
    (line,) = told[number]
    assert line.startswith(f"checkpoint {nodes.node(number)}/step-000002 is damaged and not used: {name}: ")
    assert nodes.names(number) == ["step-000001", "step-000002", "step-000002-2"]
    assert nodes.go_on([number], 3) == 2
    spoil(nodes.node(number) / "step-000003" / "model.pt")
    assert nodes.go_on([0, 1]) == 2


def test_all_copies_damaged_leave_the_one_before(nodes: Nodes) -> None:
    assert nodes.go_on([0, 1], 1, 2) == 0
    for number in (0, 1):
        spoil(nodes.node(number) / "step-000002" / "optimizer.pt")
    assert nodes.go_on([0, 1]) == 1
    for number in (0, 1):
        spoil(nodes.node(number) / "step-000001" / "optimizer.pt")
    error = nodes.go_on([2, 1, 0])
    assert f"rank 1 on {socket.gethostname()} cannot resume: all 2 checkpoints in {nodes.node(1)} are damaged" in error


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10_000))
def test_whatever_each_node_has_all_go_on_from_the_newest_whole(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    shutil.rmtree(tmp_path / "any", ignore_errors=True)
    (tmp_path / "any").mkdir()
    nodes = Nodes(tmp_path / "any")
    origin = single(nodes.node(9))
    for step in range(1, 4):
        save(origin, step)
    whole = set[int]()
    for number in range(3):
        nodes.node(number).mkdir()
        for step in range(1, 4):
            fate = dice.choice(["whole", "damaged", "none", "none"])
            copy = nodes.node(number) / f"step-{step:06d}"
            if fate != "none":
                shutil.copytree(nodes.node(9) / copy.name, copy)
            if fate == "damaged":
                spoil(copy / dice.choice(["model.pt", "optimizer.pt", "rank-00000.pt", "manifest.json"]))
            if fate == "whole":
                whole.add(step)
    found = nodes.go_on([0, 1, 2], 9)
    if whole:
        assert found == max(whole)
        assert nodes.go_on([dice.randrange(3)]) == 9
    else:
        assert found == 0 or "damaged; move the folder away" in str(found)


# -- shared or not -----------------------------------------------------------------------------------------------------


def test_a_folder_seen_under_other_names_has_one_writer(nodes: Nodes) -> None:
    nodes.node(0).mkdir()
    nodes.node(1).symlink_to(nodes.node(0))  # 0 and 1 share a folder, 2 has its own
    assert nodes.go_on([0, 1, 2, 1], 1) == 0
    assert nodes.go_on([2, 1, 0], 2) == 1
    assert nodes.names(0) == nodes.names(2) == ["step-000001", "step-000002"]
    shutil.rmtree(nodes.node(2))
    assert nodes.go_on([2, 1, 0]) == 2
    assert nodes.names(0) == ["step-000001", "step-000002"]  # nothing was copied to where it is
    shutil.rmtree(nodes.node(0))
    nodes.node(0).mkdir()
    assert nodes.go_on([1, 2, 0]) == 2
    assert nodes.names(0) == nodes.names(2) == ["step-000002"]


def test_a_folder_that_cannot_be_written_is_told_with_its_host(nodes: Nodes) -> None:
    nodes.node(1).touch()
    error = f"rank 1 on {socket.gethostname()} cannot write checkpoints to {nodes.node(1)}: File exists"
    assert nodes.go_on([0, 1, 2], 1) == error
    assert nodes.names(0) == nodes.names(2) == []


# -- deaths ------------------------------------------------------------------------------------------------------------


def _hook(event: str, folder: Path, act: Callable[[Path], None]) -> None:
    """Do something before each such operation on a file in the folder."""

    def watch(what: str, args: tuple[Any, ...]) -> None:
        if what == event and isinstance(args[0], (str, Path)) and str(args[0]).startswith(str(folder)):
            act(Path(args[0]))

    sys.addaudithook(watch)


def _die(_: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _save_and_die(rank: int, exchange: Exchange, folders: list[Path], victim: int) -> None:
    store = store_of(rank, exchange, folders)
    save(store, 1, rank)
    if rank == victim:
        _hook("os.rename", folders[rank], lambda path: _die(path) if path.name.startswith(".saving") else None)
    save(store, 2, rank)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_node_killed_between_two_commits_gets_it_afterwards(nodes: Nodes, victim: int) -> None:
    nodes.start([0, 1], _save_and_die, victim).outcomes()
    assert [name[:7] for name in nodes.names(victim)] == [".saving", "step-00"]
    assert nodes.names(1 - victim) == ["step-000001", "step-000002"]
    assert nodes.go_on([0, 1], 3) == 2
    assert nodes.names(0) == nodes.names(1) == ["step-000001", "step-000002", "step-000003"]


def _fetch_slowly(rank: int, exchange: Exchange, folders: list[Path], slow: int, victim: int) -> None:
    store = store_of(rank, exchange, folders)
    begun, gone = (folders[rank].parent / name for name in ("begun", "gone"))

    def hold(path: Path) -> None:
        if path.name == "optimizer.pt":
            begun.touch()
            eventually(gone.exists, "the other one is gone, or this one")

    if rank == slow:
        _hook("open", folders[rank], hold)
    store.load()


@pytest.mark.parametrize(("holder", "victim"), [(0, 0), (1, 1), (0, 1), (1, 0), (0, 2)])
def test_a_death_in_mid_transfer_is_an_error_on_all_and_the_next_start_works(
    nodes: Nodes, holder: int, victim: int
) -> None:
    size = 3_000_000  # more than the connection holds on its way
    store = single(nodes.node(holder))
    store.save(1, {"model": torch.zeros(size), "optimizer": torch.ones(size)}, {}, block=True)
    store.close()
    ranks = nodes.start([0, 1, 2], _fetch_slowly, 1 - holder, victim)
    eventually((nodes.folder / "begun").exists, "it is on its way")
    ranks.processes[victim].kill()
    ranks.processes[victim].join()
    (nodes.folder / "gone").touch()
    outcomes = ranks.outcomes()
    assert outcomes.pop(victim) is None
    errors = {outcome.error for outcome in outcomes if outcome}
    assert len(errors) == 1
    error = errors.pop()
    assert f"rank {victim} ended" in error or f"rank {victim}, which has it, has ended" in error
    found = [nodes.start([0, 1, 2], _step_of).values()]
    assert found == [[1, 1, 1]]
    assert nodes.names(0) == nodes.names(1) == nodes.names(2) == ["step-000001"]


def _step_of(rank: int, exchange: Exchange, folders: list[Path]) -> int:
    found = store_of(rank, exchange, folders).load()
    return found.step if found else 0


def _stopped(rank: int, exchange: Exchange, folders: list[Path]) -> str:
    store = store_of(rank, exchange, folders)
    if rank == 1:
        exchange.close()  # type: ignore[attr-defined]
        return ""
    with pytest.raises(CheckpointError) as error:
        store.load()
    return str(error.value)


def test_a_rank_that_leaves_before_the_search_is_told(nodes: Nodes) -> None:
    answers = nodes.start([0, 1, 2], _stopped, timeout=timedelta(seconds=100)).values()
    assert answers[0] == answers[2] == "rank 1 ended while the ranks agreed on a checkpoint"


# -- full disks --------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(nodes: Nodes, small_disk: Callable[[Path, int], Path]) -> Path:
    """Node 1 has a disk of a megabyte and a half: two checkpoints."""
    return small_disk(nodes.node(1), 1536)


def _save_until_full(rank: int, exchange: Exchange, folders: list[Path]) -> tuple[str, int]:
    store = store_of(rank, exchange, folders)
    save(store, 1, rank)
    store.save(2, {"model": torch.zeros(500_000)}, {})
    with pytest.raises(CheckpointError) as error:
        store.wait()
    save(store, 3, rank)  # it is smaller
    found = store.load()
    assert found is not None
    return str(error.value), found.step


def test_a_full_disk_of_one_node_fails_the_save_on_all(nodes: Nodes, small: Path) -> None:
    first, second, third = nodes.start([0, 1, 2], _save_until_full).values()
    assert first == second == third
    error, step = first
    assert step == 3
    who = f"rank 1 on {socket.gethostname()} cannot save step 2 in {small}: no space left: "
    assert error.startswith(f"{who}the checkpoint needs 2.0 MB and ")
    assert nodes.names(0) == nodes.names(1) == nodes.names(2) == ["step-000001", "step-000003"]


def test_a_full_disk_of_a_newcomer_is_told_on_all(nodes: Nodes, small: Path) -> None:
    (small / "mine").write_bytes(bytes(1_200_000))
    assert nodes.go_on([0], 1) == 0
    error = nodes.go_on([0, 1, 2])
    who = f"rank 1 on {socket.gethostname()} cannot fetch a checkpoint into {small}: no space left: "
    assert str(error).startswith(f"{who}the checkpoint needs 0.")
    assert nodes.names(1) == ["mine"]
    (small / "mine").unlink()
    assert nodes.go_on([0, 1, 2]) == 1


# -- strangers ---------------------------------------------------------------------------------------------------------


def _with_strangers(rank: int, exchange: Exchange, folders: list[Path]) -> int:
    """The holder's port is met by strangers first, who say nothing, or nonsense."""
    store = store_of(rank, exchange, folders)
    strangers = []
    if rank == 0:
        create = socket.create_server

        def create_server(*args: Any, **kwargs: Any) -> socket.socket:
            server = create(*args, **kwargs)
            port = server.getsockname()[1]
            for number in range(20):
                strangers.append(socket.create_connection(("127.0.0.1", port)))
                if number % 2:
                    strangers[-1].sendall(b"x" * 64)
            return server

        socket.create_server = create_server
    found = store.load()
    for stranger in strangers:
        stranger.settimeout(20)
        seen = b""
        while chunk := _received(stranger):
            seen += chunk
        assert len(seen) in (0, 64)  # nothing, or a nonce and a proof; never a checkpoint
    return found.step if found else 0


def _received(peer: socket.socket) -> bytes:
    try:
        return peer.recv(1000)
    except ConnectionError:
        return b""


def test_strangers_get_nothing_and_stop_nobody(nodes: Nodes) -> None:
    assert nodes.go_on([0], 1) == 0
    assert nodes.start([0, 1], _with_strangers).values() == [1, 1]
