"""What needs an NVIDIA GPU: `make test-gpu` where one is at hand, skipped with a reason elsewhere."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING

import pytest

from paceline.node.machine import nvml
from paceline.node.machine.devices import accelerators
from tests.conftest import eventually, why_says

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


def test_a_full_gpu_is_named_with_what_helps(paceline: Paceline) -> None:
    paceline.script("""
        import torch
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    """)
    done = paceline.run("script.py")
    assert done.returncode == 1
    assert "GPU 0 is full" in done.stderr and "use a smaller batch" in done.stderr


def test_a_warm_process_has_not_touched_the_gpu(paceline: Paceline) -> None:
    paceline.env["PACELINE_WARM_DIR"] = str(paceline.folder / "warm")
    paceline.script("""
        import torch
        print(torch.cuda.is_initialized())
        print(torch.ones(2, device="cuda").sum().item())
    """)
    try:
        paceline.succeeds("warm")
        done = paceline.succeeds("run", "-v", "script.py")
    finally:
        paceline.succeeds("warm", "--stop")
    assert "started from a process that was kept warm" in done.stderr
    assert done.stdout == "False\n2.0\n"


def test_a_rank_that_stays_in_a_kernel_is_named(paceline: Paceline) -> None:
    paceline.script("""
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        if os.environ["RANK"] == "1":
            torch.cuda._sleep(1 << 40)  # cycles: longer than the test
            torch.cuda.synchronize()
        dist.barrier()
    """)
    process = paceline.start("run", "-n", "2", "--devices", accelerators()[0], "--share-devices", "--hang-after", "5s",
                             "--max-restarts", "0", "script.py")  # fmt: skip
    try:
        assert process.stderr is not None
        said = ""
        for line in process.stderr:
            said += line
            if "rank 1" in line and "synchronize" in line:
                break
        assert "rank 1" in said, said
    finally:
        process.terminate()
        process.communicate(timeout=120)


def test_the_use_of_a_gpu_is_measured(paceline: Paceline) -> None:
    paceline.script("""
        import time, torch
        a = torch.randn(4096, 4096, device="cuda")
        began = time.monotonic()
        while time.monotonic() - began < 20:
            a = (a @ a).clamp(-1, 1)
        torch.cuda.synchronize()
    """)
    paceline.succeeds("run", "--name", "busy", "script.py")
    uses = [
        gpu["use"]
        for line in (paceline.home / "jobs" / "busy" / "telemetry.jsonl").read_text().splitlines()
        for gpu in json.loads(line).get("gpus", ())
    ]
    assert max(uses, default=0) > 0.5, uses


@pytest.mark.parametrize("name", ["number", "uuid"])
def test_a_rank_has_the_gpu_that_is_named(paceline: Paceline, name: str) -> None:
    gpu = next(gpu for gpu in reversed(nvml.gpus()) if any(map(gpu.is_called, accelerators())))
    paceline.script("""
        import torch
        print(torch.cuda.device_count(), torch.cuda.get_device_properties(0).uuid)
    """)
    for variable in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):  # numbers are the driver's then
        paceline.env.pop(variable, None)
    named = str(gpu.index) if name == "number" else gpu.uuid
    if name == "uuid":
        paceline.env["CUDA_VISIBLE_DEVICES"] = named
    done = paceline.succeeds("run", "--devices", named, "script.py")
    assert done.stdout == f"1 {gpu.uuid.removeprefix('GPU-')}\n"


@pytest.mark.skipif(len(accelerators()) < 2, reason="nccl wants a GPU for each of 2 ranks")
def test_ranks_that_see_their_own_gpu_alone_use_nccl(paceline: Paceline) -> None:
    paceline.script("""
        import torch, paceline
        with paceline.init(progress=False) as run:
            print(torch.cuda.device_count(), torch.distributed.get_backend(), run.all_reduce(1.0))
    """)
    done = paceline.succeeds("run", "-n", "2", "--virtual-local-rank", "script.py")
    count, backend, total = done.stdout.split()
    assert (count, "nccl" in backend, float(total)) == ("1", True, 2.0)


def test_an_import_that_has_asked_for_gpus_spoils_no_rank(paceline: Paceline) -> None:
    """CUDA fails in a fork of such a process, so ranks are no forks of it."""
    paceline.script("import torch; torch.cuda.is_available()", "asks.py")
    paceline.script("""
        import asks, torch
        print(torch.ones(2, device="cuda").sum().item())
    """)
    paceline.env["PYTHONPATH"] = str(paceline.folder)
    done = paceline.succeeds("run", "--preload", "torch,asks", "script.py")
    assert done.stdout == "2.0\n"
    assert "an import initialised CUDA, as torch.cuda.is_available() does" in done.stderr


TRAINS = """
    import torch
    model = torch.nn.Linear(512, 512, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    while True:
        model(torch.ones(64, 512, device="cuda")).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        open("steps", "a").close()
"""


def test_a_profile_has_the_kernels(paceline: Paceline) -> None:
    paceline.script(TRAINS)
    paceline.succeeds("submit", "--name", "it", "-n", "1", "--devices", accelerators()[0], "script.py")
    try:
        eventually((paceline.folder / "steps").exists, "it trains")
        said = paceline.succeeds("profile", "it", "--steps", "3", "-o", "traces").stdout
    finally:
        paceline.succeeds("stop", "--now", "it")
    (trace,) = (paceline.folder / "traces").glob("*.pt.trace.json.gz")
    found = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    kernels = [event for event in found if event.get("cat") == "kernel"]
    assert len(kernels) >= 9, said  # of the forward pass, the backward pass and the optimizer, three times
    assert "aten::addmm" in said


def test_why_of_an_idle_gpu(paceline: Paceline) -> None:
    """It takes a minute: five measurements, ten seconds apart."""
    paceline.script("""
        import time, torch
        a = torch.ones(8, device="cuda")
        def prepare():
            time.sleep(0.05)
        while True:
            prepare()
            a.add_(1)
    """)
    paceline.succeeds("submit", "--name", "it", "-n", "1", "--devices", accelerators()[0], "script.py")
    try:
        why_says(paceline, "it", "GPUs compute in")
    finally:
        paceline.succeeds("stop", "--now", "it")
