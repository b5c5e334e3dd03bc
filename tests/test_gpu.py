"""What needs an NVIDIA GPU: `make test-gpu` where one is at hand, skipped with a reason elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from paceline.node.machine.devices import accelerators

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
    done = paceline.succeeds("run", "-n", "gpu", "script.py")
    assert done.stdout == f"{float(len(accelerators()))} 0\n"


def test_small_processes_share_a_gpu(paceline: Paceline) -> None:
    paceline.script("""
        import torch
        print(torch.ones(3, device="cuda").sum().item(), torch.cuda.device_count())
    """)
    flags = ("--framework", "indexed", "-n", "3", "--devices", accelerators()[0], "--tee", "all", "--preload", "torch")
    done = paceline.succeeds("run", *flags, "script.py")
    assert sorted(line.rpartition("] ")[2] for line in done.stdout.splitlines()) == ["3.0 1"] * 3


def test_step_times_are_those_of_the_gpu(paceline: Paceline) -> None:
    paceline.script("""
        import json, os, time, torch, paceline
        with paceline.init(progress=False) as run:
            model, optimizer = torch.nn.Linear(1, 1), None
            model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), lr=1e-4))
            data = torch.utils.data.TensorDataset(torch.arange(20.0)[:, None])
            for _ in run.epochs(1):
                for (batch,) in run.dataloader(data, global_batch_size=2):
                    loss = model(batch).mean()
                    if run.step == 5:
                        began = time.monotonic()
                        torch.cuda._sleep(400_000_000)  # cycles, which are queued and not waited for
                        assert time.monotonic() - began < 0.05
                    run.backward(loss)
                    optimizer.step()
                    run.log(loss=loss)
        (line,) = map(json.loads, open(os.environ["PACELINE_RUN_DIR"] + "/steps/rank-0.jsonl"))
        print(line["forward_backward"].index(max(line["forward_backward"][1:])), line["forward_backward"][5] > 0.1)
    """)
    done = paceline.succeeds("run", "-n", "1", "script.py")
    assert done.stdout == "5 True\n"
