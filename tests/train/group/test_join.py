"""What a rank does before it ends."""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

pytest.importorskip("torch")

from torch.distributed import HashStore

from paceline.train.group.join import gpu_is_shared, settle


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
