"""Checkpoints of several ranks over gloo."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from tests.conftest import eventually  # noqa: E402
from tests.train.checkpoint.checkpoint_ranks import Ranks, rank_state, same, save, shared_state, single  # noqa: E402

from paceline.contract.folder_lock import LOCK  # noqa: E402
from paceline.train.checkpoint.store import CheckpointError, CheckpointStore, ExchangeError, SocketExchange  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.train.checkpoint.store import Exchange

pytestmark = pytest.mark.torch


def store_of(rank: int, exchange: Exchange, folder: Path, **options: Any) -> CheckpointStore:
    return CheckpointStore(folder, rank=rank, world_size=dist.get_world_size(), exchange=exchange, **options)


def _save_and_load(rank: int, exchange: Exchange, folder: Path, step: int, found_world: int) -> None:
    store = store_of(rank, exchange, folder)
    found = store.load()
    if found_world:
        assert found is not None
        assert found.world_size == found_world
        assert same(found.shared_state, shared_state(step - 1))
        assert same(found.rank_state, rank_state(step - 1, rank) if rank < found_world else None)
    else:
        assert found is None
    save(store, step, rank)


def test_another_number_of_ranks_loads_it(tmp_path: Path) -> None:
    found_world = 0
    for step, world in enumerate((2, 3, 1, 2), start=1):
        Ranks(tmp_path / f"meeting-{step}", world, _save_and_load, tmp_path / "c", step, found_world).values()
        found_world = world
    assert single(tmp_path / "c").latest() is not None


def _save_while_training(rank: int, exchange: Exchange, folder: Path) -> float:
    store = store_of(rank, exchange, folder)
    total = torch.zeros(1000)
    for step in range(1, 21):
        total += rank + 1
        dist.all_reduce(total)
        store.save(step, {"total": total}, rank)
        for _ in range(10):  # collectives of the training while the ranks agree in the background
            dist.all_reduce(torch.ones(1000))
    store.close()
    found = store.load()
    assert found is not None
    assert found.step == 20
    assert torch.equal(found.shared_state["total"], total)
    return float(total[0])


def test_saving_does_not_disturb_the_collectives_of_the_training(tmp_path: Path) -> None:
    first, second = Ranks(tmp_path / "meeting", 2, _save_while_training, tmp_path / "c").values()
    assert first == second


def _fail_in_turn(rank: int, exchange: Exchange, folder: Path) -> list[str]:
    store = store_of(rank, exchange, folder)
    save(store, 1, rank)
    errors = []
    for step, own in ((2 + rank, None), (2, (lambda: None) if rank == 1 else None)):
        with pytest.raises(CheckpointError) as error:
            store.save(step, shared_state(step), own, block=True)
        errors.append(str(error.value))
    save(store, 2, rank)
    return errors


def test_a_failure_on_one_rank_fails_the_save_on_all(tmp_path: Path) -> None:
    first, second = Ranks(tmp_path / "meeting", 2, _fail_in_turn, tmp_path / "c").values()
    assert first == second
    assert first[0].endswith("rank 1 saves step 3 and rank 0 step 2; all ranks must save after the same step")
    assert first[1].startswith("rank 1 on ")
    assert "cannot save step 2 in" in first[1]
    assert "cannot copy 'rank-00001.pt'" in first[1]
    assert sorted(path.name for path in (tmp_path / "c").iterdir() if path.name != LOCK) == [
        "step-000001",
        "step-000002",
    ]


def _unwritable(rank: int, exchange: Exchange, folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        store_of(rank, exchange, folder)
    return str(error.value)


def test_all_ranks_hear_that_the_folder_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    first, second = Ranks(tmp_path / "meeting", 2, _unwritable, tmp_path / "file").values()
    assert first == second
    assert first.startswith("rank 0 on ")
    assert first.endswith(f"cannot write checkpoints to {tmp_path / 'file'}: File exists")


def _one_dies(rank: int, exchange: Exchange, folder: Path, victim: int) -> list[str]:
    store = store_of(rank, exchange, folder)
    save(store, 1, rank)
    if rank == victim:
        os._exit(1)
    errors = []
    for _ in range(2):
        with pytest.raises(ExchangeError) as error:
            save(store, 2, rank)
        errors.append(str(error.value))
    return errors


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_dies_is_named_on_all_others(tmp_path: Path, victim: int) -> None:
    outcomes = Ranks(tmp_path / "meeting", 3, _one_dies, tmp_path / "c", victim).outcomes()
    assert outcomes.pop(victim) is None
    for outcome in outcomes:
        assert outcome is not None
        assert outcome.value == [f"rank {victim} ended while the ranks agreed on a checkpoint"] * 2
    found = single(tmp_path / "c").latest()
    assert found is not None
    assert found.step == 1


def _one_is_late_for_the_news(rank: int, exchange: Exchange, folder: Path) -> str:
    store = store_of(rank, exchange, folder)
    known, told = folder / "known", folder / "told"
    if rank == 2:
        os._exit(1)
    if rank == 1:
        eventually(known.exists, "rank 0 knows that rank 2 ended")
    with pytest.raises(ExchangeError) as error:
        store.save(1, {}, torch.zeros(20_000_000), block=True)  # more than fits into buffers on the way
    (told if rank else known).touch()
    eventually(told.exists, "rank 1 knows it, too")
    return str(error.value)


def test_a_rank_that_dies_is_named_on_a_rank_that_comes_late(tmp_path: Path) -> None:
    first, second, _ = Ranks(tmp_path / "meeting", 3, _one_is_late_for_the_news, tmp_path / "c").outcomes()
    assert first is not None
    assert first == second
    assert first.value == "rank 2 ended while the ranks agreed on a checkpoint"


def _one_does_not_come(rank: int, exchange: SocketExchange, folder: Path) -> str:
    store = store_of(rank, exchange, folder)
    exchange._timeout = 1.0
    error = ""
    if rank == 0:
        with pytest.raises(ExchangeError) as caught:
            save(store, 1)
        error = str(caught.value)
    dist.barrier()
    exchange.close()
    with pytest.raises(ExchangeError, match="closed" if rank else "did not answer"):
        save(store, 1)
    return error


def test_a_rank_that_does_not_come_is_named_after_a_while(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path / "meeting", 2, _one_does_not_come, tmp_path / "c")
    assert ranks.values() == ["rank 1 did not answer within 1 s while the ranks agreed on a checkpoint", ""]


def _closes_while_it_waits(rank: int, exchange: SocketExchange, folder: Path, waiting: int) -> None:
    store = store_of(rank, exchange, folder)
    if rank == waiting:
        store.save(1, shared_state(1), rank_state(1, rank))

        def waits() -> bool:
            is_free = exchange._deciding.acquire(blocking=False)
            if is_free:
                exchange._deciding.release()
            return not is_free

        eventually(waits, "the save waits for the other rank")
        store.disconnect()
        with pytest.raises(ExchangeError, match="closed"):
            store.close()
    dist.barrier()


@pytest.mark.parametrize("waiting", [0, 1])
def test_a_save_that_waits_for_others_ends_when_its_rank_leaves_them(tmp_path: Path, waiting: int) -> None:
    Ranks(tmp_path / "meeting", 2, _closes_while_it_waits, tmp_path / "c", waiting).values()


def _reads_late(rank: int, exchange: SocketExchange, folder: Path) -> None:
    failed, select = folder / "failed", exchange._star.select

    def late(timeout: float | None) -> Any:
        if timeout:  # it waits for the answer, and not to give its own vote
            eventually(failed.exists, "the next round has failed")
        return select(timeout)

    if rank == 2:
        exchange._star.select = late  # type: ignore[method-assign]
    assert exchange.decide(b"", lambda _: b"first") == b"first"
    if rank == 1:
        exchange.close()
        return
    with pytest.raises(ExchangeError, match="rank 1 ended"):
        exchange.decide(b"", lambda _: b"second")
    failed.touch()


def test_an_answer_is_not_lost_when_the_next_round_has_failed_before_it_is_read(tmp_path: Path) -> None:
    Ranks(tmp_path / "meeting", 3, _reads_late, tmp_path).values()


def _load(rank: int, exchange: Exchange, folder: Path) -> int:
    found = store_of(rank, exchange, folder).load()
    assert found is not None
    assert same(found.shared_state, shared_state(found.step))
    return found.step


def _save_two(rank: int, exchange: Exchange, folder: Path) -> None:
    store = store_of(rank, exchange, folder)
    save(store, 1, rank)
    save(store, 2, rank)


@pytest.mark.parametrize("name", ["model.pt", "rank-00001.pt", "manifest.json"])
def test_all_ranks_skip_a_damaged_checkpoint_with_one_warning(tmp_path: Path, name: str) -> None:
    Ranks(tmp_path / "save", 2, _save_two, tmp_path / "c").values()
    file = tmp_path / "c" / "step-000002" / name
    file.write_bytes(file.read_bytes().replace(b"\0" * 8, b"\1" * 8).replace(b'"step": 2', b'"step": 3'))
    outcomes = [outcome for outcome in Ranks(tmp_path / "load", 2, _load, tmp_path / "c").outcomes() if outcome]
    assert [outcome.value for outcome in outcomes] == [1, 1]
    assert outcomes[1].warnings == []
    (line,) = outcomes[0].warnings
    assert line.startswith(f"checkpoint {tmp_path}/c/step-000002 is damaged and not used: {name}: ")
