"""Elastic states, samplers and trainings; and jobs whose machines change."""

from __future__ import annotations

import errno
import logging
import os
import pickle
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from paceline.horovod.common.elastic import HostUpdateResult, run_fn
from tests.conftest import all_end, eventually
from tests.late import hvd, torch
from tests.node.rendezvous.test_nodes import Cluster
from tests.train.launching import launch

from .ranks import started
from .test_optimizer import net

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Paceline


@pytest.fixture
def cluster(paceline: Paceline) -> Any:
    it = Cluster(paceline.folder)
    yield it
    for node in it.nodes:
        all_end(node.processes, "a node", node.home / "jobs")


def states() -> None:
    rank, _ = started()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1), momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    second = torch.nn.Linear(1, 1)
    state = hvd.elastic.TorchState(
        model=model, optimizer=optimizer, second=second, scheduler=scheduler, epoch=rank, batch=0, history=[rank]
    )
    with torch.no_grad():
        model[0].weight.fill_(rank)
        second.weight.fill_(rank)
    state.sync()  # all get what rank 0 has
    assert (state.epoch, state.batch, state.history) == (0, 0, [0])
    assert model[0].weight.sum() == second.weight.sum() == 0
    assert optimizer.param_groups[0]["lr"] == 0.1
    # restore returns to the last commit, in the very objects; sync counts as one.
    for _ in range(2):
        with torch.no_grad():
            model[0].weight.fill_(5.0)
        state.epoch, state.history = 7, [7]
        state.new = "not part of the state"
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        state.restore()
        assert (state.epoch, state.history) == (0, [0])
        assert model[0].weight.sum() == 0
        assert not optimizer.state_dict()["state"]
    state.batch = 3
    with torch.no_grad():
        second.weight.fill_(2.0)
    state.commit()
    state.batch = 4
    with torch.no_grad():
        second.weight.fill_(9.0)
    state.restore()
    assert (state.batch, second.weight.item()) == (3, 2.0)
    # What is assigned takes the place of the old one.
    third = torch.nn.Linear(1, 1)
    state.second = third
    with torch.no_grad():
        third.weight.fill_(rank + 1)
    state.sync()
    assert third.weight.item() == 1
    assert state.second is third
    plain = hvd.elastic.ObjectState(step=rank, name="x")
    plain.sync()
    assert (plain.step, plain.name) == (0, "x")
    plain.step = 4
    plain.restore()
    assert plain.step == 0
    # Messages about hosts: rank 0's count, on all ranks, once.
    for what, skips in (
        (HostUpdateResult.added, False), (HostUpdateResult.removed, True), (HostUpdateResult.mixed, False),
    ):  # fmt: skip
        state.check_host_updates()
        state.on_hosts_updated(time.time(), what)
        with pytest.raises(hvd.HostsUpdatedInterrupt) as interrupt:
            state.commit()
        assert interrupt.value.skip_sync == skips
        state.commit()
    if rank == 1:
        state.on_hosts_updated(time.time(), HostUpdateResult.added)
    state.commit()
    # Callbacks after a reset.
    called: list[str] = []
    state.register_reset_callbacks([lambda: called.append("first"), lambda: called.append("second")])
    state.on_reset()
    assert called == ["first", "second"]


def test_states() -> None:
    launch(states, nproc=2)


class Recorder:
    """A state that notes what is done with it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda: self.calls.append(name)


def test_what_elastic_run_does_after_each_error() -> None:
    errors: list[Exception] = [
        hvd.HorovodInternalError("a rank is gone"),
        hvd.HostsUpdatedInterrupt(False),
        hvd.HostsUpdatedInterrupt(True),
    ]

    def train(state: Recorder, number: int, *, word: str) -> str:
        if errors:
            state.calls.append("train")
            raise errors.pop(0)
        return f"{word} {number}"

    recorder = Recorder()
    resets = lambda: recorder.calls.append("reset")  # noqa: E731
    assert run_fn(train, resets)(recorder, 3, word="done") == "done 3"
    assert recorder.calls == [
        "sync", "train", "restore", "reset", "on_reset", "sync", "train", "reset", "on_reset", "sync", "train", "reset",
        "on_reset",
    ]  # fmt: skip
    with pytest.raises(KeyError, match="other"):
        run_fn(lambda _: {}["other"], resets)(Recorder())


def folds(folder: str, count: int) -> list[list[int]]:
    """The epochs of the trainings of a script, which ends after so many of them."""
    started(PACELINE_RUN_DIR=folder)
    seen: list[list[int]] = []

    @hvd.elastic.run
    def train(state: Any, fold: int) -> None:
        seen.append([])
        while state.epoch < 3:
            seen[-1].append(state.epoch)
            state.epoch += 1
            with torch.no_grad():
                state.model.weight += fold
            state.commit()
        os.kill(os.getpid(), signal.SIGUSR2)
        with pytest.raises(hvd.HostsUpdatedInterrupt):
            state.check_host_updates()

    for fold in range(count):
        state = hvd.elastic.TorchState(torch.nn.Linear(1, 1), epoch=0, **{f"only{fold}": 0})
        for times in (1, 2):  # the second training goes on with the weights of the first one
            if times == 1:
                torch.nn.init.zeros_(state.model.weight)
            state.epoch = 0
            state.save()
            train(state, fold)
            assert state.model.weight.item() == 3 * fold * times
    return seen


def test_each_training_of_a_script_has_its_own_commits(tmp_path: Path) -> None:
    assert launch(folds, (str(tmp_path), 1)) == [[[0, 1, 2]] * 2]
    assert launch(folds, (str(tmp_path), 2)) == [[[], [], [0, 1, 2], [0, 1, 2]]]  # started again, it goes on


def on_a_full_disk(folder: str) -> tuple[list[int], list[str], list[str]]:
    """Where the training begins, the files that a full disk leaves, and what is logged; the last commit is written."""
    started(PACELINE_RUN_DIR=folder)
    begins: list[int] = []
    left: list[str] = []
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("paceline").addHandler(handler)

    def refuse(_: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    @hvd.elastic.run
    def train(state: Any) -> None:
        begins.append(state.step)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", refuse)
            for state.step in (1, 2):
                state.commit()
            left.extend(os.listdir(folder))
            if len(begins) == 1:
                raise hvd.HorovodInternalError("a rank is gone")  # the commit in memory counts
        state.step = 3
        state.commit()

    train(hvd.elastic.ObjectState(step=0))
    return begins, left, told


def test_a_full_disk_does_not_end_a_training(tmp_path: Path) -> None:
    ((begins, left, (told,)),) = launch(on_a_full_disk, (str(tmp_path),))
    assert (begins, left) == ([0, 2], [])
    assert "commits cannot be written ([Errno 28] full); the training goes on" in told
    assert pickle.loads((tmp_path / "horovod-state.pickle").read_bytes())[1] == {"step": 3}


def samplers() -> None:
    rank, size = started()
    data = range(11)
    sampler = hvd.elastic.ElasticSampler(data, shuffle=False)
    assert len(sampler) == 6
    assert list(sampler) == [*range(rank, 11, size), *([0] if rank == 1 else [])]
    assert next(iter(torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler))).tolist() == [
        rank, rank + 2, rank + 4, rank + 6,
    ]  # fmt: skip
    sampler.record_batch(0, 2)
    kept = sampler.state_dict()
    assert len(sampler) == 6  # until it is reset
    sampler.reset()
    assert list(sampler) == [*range(4 + rank, 11, size), *([4] if rank == 1 else [])]
    sampler.record_batch(0, 3)
    sampler.load_state_dict(kept)
    assert len(sampler) == 4
    sampler.set_epoch(1)
    assert len(sampler) == 6
    shuffled = [hvd.elastic.ElasticSampler(data, seed=seed) for seed in (0, 0, 1)]
    orders = [hvd.allgather_object(list(one)) for one in shuffled]
    assert orders[0] == orders[1] != orders[2]
    assert {index for part in orders[0] for index in part} == set(data)
    before = list(shuffled[0])
    shuffled[0].set_epoch(1)
    assert list(shuffled[0]) != before
    for count in range(8):  # fewer samples than ranks, or none
        few = hvd.elastic.ElasticSampler(range(count))
        assert len(list(few)) == len(few) == -(-count // size)
        few.record_batch(0, count)
        few.reset()
        assert list(few) == []


def test_samplers() -> None:
    launch(samplers, nproc=2)


ELASTIC = """
    import horovod.torch as hvd
    import torch

    hvd.init()
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, step=0, sizes=[])
    state.register_reset_callbacks([lambda: print("reset with", hvd.size(), flush=True)])

    @hvd.elastic.run
    def train(state):
        print("from", state.step, "with", hvd.size(), flush=True)
        open("trains", "w").close()
        while state.sizes[-10:] != [2] * 10:
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            state.step += 1
            state.sizes = state.sizes + [hvd.size()]
            try:
                state.commit()
            except hvd.HostsUpdatedInterrupt:
                print("interrupted at", state.step, flush=True)
                raise
        return state.step, len(state.sizes), state.sizes[0], state.sizes[-1]

    print("done", *train(state), flush=True)
"""


@pytest.mark.torch
def test_a_machine_that_joins_interrupts_the_ranks_at_a_commit(cluster: Cluster, paceline: Paceline) -> None:
    paceline.script(ELASTIC)
    cluster.start("-n", "1", "script.py", nodes="1:2", rank=0)
    eventually((paceline.folder / "trains").exists, "the first machine trains")
    cluster.start("-n", "1", "script.py", nodes="1:2")
    (code, out, err), (other_code, _, other_err) = cluster.finish()
    assert (code, other_code) == (0, 0), err + other_err
    steps = [int(line.split()[2]) for line in out.splitlines() if line.startswith("interrupted at")]
    assert len(steps) == 1, out
    assert f"reset with 2\nfrom {steps[0]} with 2\n" in out  # nothing was lost or repeated
    (done,) = [line.split()[1:] for line in out.splitlines() if line.startswith("done")]
    assert done[0] == done[1]
    assert done[2:] == ["1", "2"]
