"""The collectives, between ranks of this machine. One start of the ranks does many checks."""

from __future__ import annotations

import json
import re
import sys
import threading
from pathlib import Path

import pytest

from paceline.contract import Placement
from tests.late import hvd, process, torch
from tests.train.launching import launch

from .ranks import started


def any_order_from_several_threads() -> None:
    rank, size = started()
    for step in range(3):
        names = [f"n{index}" for index in range(60)]
        if rank % 2:
            names.reverse()
        handles: dict[str, int] = {}

        def submit(part: list[str], handles: dict[str, int] = handles, step: int = step) -> None:
            for name in part:
                value = torch.full((int(name[1:]) + 1,), float(step))
                handles[name] = hvd.allreduce_async(value, name=name, op=hvd.Sum)

        threads = [threading.Thread(target=submit, args=(names[start::3],)) for start in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for name in sorted(names):
            assert hvd.synchronize(handles[name]).tolist() == [step * size] * (int(name[1:]) + 1)
    assert hvd.synchronize(handles["n0"]) is None  # a handle is good for one call
    with pytest.raises(ValueError, match="was not created or has been cleared"):
        hvd.poll(handles["n0"])


def test_any_order_from_several_threads() -> None:
    launch(any_order_from_several_threads, nproc=2)


def process_sets() -> None:
    rank, size = started()
    assert hvd.global_process_set.ranks == list(range(size))
    pair = hvd.add_process_set([0, 2])
    assert (pair.included(), pair.rank(), pair.size()) == (rank != 1, {0: 0, 1: None, 2: 1}[rank], 2)
    if pair.included():
        assert hvd.allreduce(torch.ones(2), process_set=pair, op=hvd.Sum).tolist() == [2.0, 2.0]
        assert hvd.allgather(torch.tensor([rank]), process_set=pair).tolist() == [0, 2]
        assert hvd.broadcast(torch.tensor([rank]), 2, process_set=pair).item() == 2
        hvd.barrier(process_set=pair)
    else:
        with pytest.raises(ValueError, match="rank 1 does not belong to"):
            hvd.allreduce(torch.ones(2), process_set=pair)
    with pytest.raises(ValueError, match="exists already"):
        hvd.add_process_set([2, 0])
    assert hvd.remove_process_set(pair)
    assert pair.process_set_id is None
    assert not hvd.remove_process_set(hvd.global_process_set)
    with pytest.raises(ValueError, match="not registered"):
        hvd.allreduce(torch.ones(1), process_set=pair)
    assert hvd.add_process_set(pair).ranks == [0, 2]
    assert hvd.remove_process_set(pair)
    with pytest.raises(hvd.HorovodInternalError, match="process sets"):
        hvd.add_process_set([0] if rank else [1])
    hvd.shutdown()
    assert not hvd.is_initialized()
    with pytest.raises(ValueError, match="not been initialized"):
        hvd.rank()
    first = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[first, hvd.ProcessSet([2])])
    assert (first.process_set_id, hvd.process_set_by_id(2).ranks) == (1, [2])
    hvd.shutdown()
    if rank != 1:
        hvd.init(comm=[2, 0])
        assert (hvd.rank(), hvd.size()) == ({2: 0, 0: 1}[rank], 2)
        assert hvd.allgather(torch.tensor([rank])).tolist() == [2, 0]


def test_process_sets_and_beginning_again() -> None:
    launch(process_sets, nproc=3)


def timeline(file: str) -> None:
    rank, _ = started()
    hvd.start_timeline(file, mark_cycles=True)
    for _ in range(2):
        hvd.allreduce(torch.ones(100), name="traced")
        hvd.allreduce(torch.ones(1), name="small")
    hvd.allgather(torch.ones(2), name="gathered")
    if rank == 0:
        assert "ALLREDUCE" in {event["name"] for event in json.loads(Path(file).read_text() + "]")}  # as they come
    hvd.stop_timeline()
    hvd.shutdown()
    if rank == 0:
        events = json.loads(Path(file).read_text())
        names = [event["name"] for event in events]
        for name in ("NEGOTIATE_ALLREDUCE", "ALLREDUCE", "GLOO_ALLREDUCE", "ALLGATHER", "CYCLE_START"):
            assert name in names, name
        (small,) = {event["pid"] for event in events if event.get("args") == {"name": "allreduce.small"}}
        assert "GLOO_ALLREDUCE" not in {event["name"] for event in events if event["pid"] == small}
        for event in {event["pid"] for event in events}:
            depth = 0
            for each in events:
                depth += {"B": 1, "E": -1}.get(each["ph"], 0) if each["pid"] == event else 0
                assert depth >= 0
            assert depth == 0


def test_the_timeline_is_a_trace_whose_activities_end(tmp_path: Path) -> None:
    launch(timeline, (str(tmp_path / "trace.json"),), nproc=2)


def one_rank() -> None:
    rank, size = started()
    assert (rank, size, hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (0, 1, 0, 1, 0, 1)
    assert hvd.is_homogeneous()
    assert hvd.gloo_built()
    assert not hvd.mpi_built()
    tensor = torch.arange(4.0)
    for op in (hvd.Sum, hvd.Average, hvd.Min, hvd.Adasum):
        assert torch.equal(hvd.allreduce(tensor, op=op), tensor)
    assert torch.equal(hvd.alltoall(tensor), tensor)
    assert torch.equal(hvd.allgather(tensor), tensor)
    assert torch.equal(hvd.reducescatter(tensor), tensor)
    assert hvd.broadcast_object({"a": 1}) == {"a": 1}
    with torch.inference_mode():  # which a thread is in, and the engine's is not
        for collective in (hvd.allreduce, hvd.allreduce_):
            assert collective(torch.ones(3)).tolist() == [1.0] * 3
    assert hvd.join() == 0


def test_a_single_rank_needs_nobody() -> None:
    launch(one_rank)


def test_machines_with_different_numbers_of_ranks() -> None:
    nodes = {0: 1, 1: 2, 2: 2}
    second = Placement(rank=4, world_size=5, local_rank=1, local_world_size=2, node_rank=2, node_count=3)
    assert process.cross_of(second, nodes) == (1, 2)  # of the two that have a second rank
    first = Placement(rank=3, world_size=5, local_rank=0, local_world_size=2, node_rank=2, node_count=3)
    assert process.cross_of(first, nodes) == (2, 3)


def test_what_is_not_there_says_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mxnet", "spark", "ray"):
        with pytest.raises(ImportError, match=re.escape(f"horovod.{name} is not part of paceline: ")):
            __import__(f"paceline.horovod.{name}")
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    for name in ("tensorflow", "tensorflow.keras", "keras"):
        with pytest.raises(ImportError, match=r"horovod.tensorflow needs tensorflow: .* pip install tensorflow"):
            __import__(f"paceline.horovod.{name}")
