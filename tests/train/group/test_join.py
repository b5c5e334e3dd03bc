"""What a rank does before it ends."""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.distributed import HashStore  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from paceline.contract import Placement  # noqa: E402
from paceline.train.group.group import Group  # noqa: E402
from paceline.train.group.join import Membership, backend_of, gpu_is_shared, settle  # noqa: E402
from paceline.train.metrics.reduction import Reduction, Span  # noqa: E402


def test_python_does_not_finalize_while_a_thread_of_gloo_is_at_work() -> None:
    begun, ended = threading.Event(), threading.Event()

    def work() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_gloo_runloop")
        begun.set()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 300_000)  # without the GIL
        ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    settle(60.0)
    assert ended.is_set()
    thread.join()


@pytest.mark.parametrize(
    ("gpus", "is_shared"),
    [(["a", "b", "c"], False), (["a", "b", "a"], True), (["", "", "a"], False), (["", "", ""], False)],
)
def test_all_ranks_know_whether_two_have_one_gpu(gpus: list[str], is_shared: bool) -> None:
    """However many a rank sees: with --virtual-local-rank, and in Slurm's tasks, each sees its own alone."""
    store, limit = HashStore(), timedelta(seconds=60)
    with ThreadPoolExecutor(len(gpus)) as ranks:
        found = ranks.map(lambda gpu: gpu_is_shared(store, len(gpus), gpu, limit), gpus)
        assert set(found) == {is_shared}


def test_ranks_exchange_numbers_on_their_device_if_the_group_has_no_backend_for_the_cpu() -> None:
    """As with nccl alone; here the meta device, whose tensors have no numbers, is that of the ranks."""
    dist.init_process_group("meta:fake", store=FakeStore(), rank=0, world_size=2)
    try:
        placement = Placement(rank=0, world_size=2)
        group = Group(Membership(placement, torch.device("meta"), owns_group=False))
        assert group.start_all_reduce(torch.ones(1))().is_meta
        Reduction(group, ["loss"], values={"loss": (1.0, 1.0, 1.0)}, costs=[], span=Span(1, (0, 0), (0, 0)))
        for reduce in (lambda: group.all_reduce(1.0), lambda: group.mean(1.0, 2)):
            with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):  # after the exchange
                reduce()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("given", "device", "backend"),
    [("nccl", "cuda:1", "cpu:gloo,cuda:nccl"), ("nccl", "cpu", "nccl"), ("gloo", "cuda", "gloo")],
)
def test_nccl_is_for_gpus_alone(given: str, device: str, backend: str) -> None:
    assert backend_of(given, torch.device(device)) == backend
