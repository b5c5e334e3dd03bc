"""What needs an NVIDIA GPU: `make test-gpu` where one is at hand, skipped with a reason elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from paceline.node.devices import accelerators

if TYPE_CHECKING:
    from tests.conftest import Paceline

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.torch,
    pytest.mark.skipif(not accelerators(), reason="this machine has no GPU"),
]


def test_ranks_forked_from_one_import_may_use_the_gpu(paceline: Paceline) -> None:
    paceline.script("""
        import os, torch, torch.distributed as dist
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
        total = torch.ones(1, device="cuda")
        dist.all_reduce(total)
        print(total.item(), torch.cuda.current_device())
        dist.destroy_process_group()
    """)
    done = paceline.run("-n", "gpu", "script.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{float(len(accelerators()))} 0\n"


def test_small_processes_share_a_gpu(paceline: Paceline) -> None:
    paceline.script("""
        import torch
        print(torch.ones(3, device="cuda").sum().item(), torch.cuda.device_count())
    """)
    flags = ("--framework", "indexed", "-n", "3", "--devices", accelerators()[0], "--tee", "all", "--preload", "torch")
    done = paceline.run(*flags, "script.py")
    assert done.returncode == 0, done.stderr
    assert sorted(line.rpartition("] ")[2] for line in done.stdout.splitlines()) == ["3.0 1"] * 3
