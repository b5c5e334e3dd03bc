"""`paceline profile` records ranks that run, and says of others why it cannot."""

from __future__ import annotations

import gzip
import json
import re
import signal
from typing import TYPE_CHECKING

import pytest
from tests.conftest import eventually

if TYPE_CHECKING:
    from tests.conftest import Paceline

TRAINS = """
import os, resource, torch, torch.distributed as dist
from torch import nn

limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit, 4096), limit))
files = [open(os.devnull) for _ in range(1024)]  # as ranks with many workers that load data have
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    open(f"steps-{os.environ['RANK']}", "a").close()
"""


def submit(paceline: Paceline, script: str, *flags: str) -> None:
    (paceline.folder / "script.py").write_text(script)
    paceline.succeeds("submit", "--name", "it", *flags, "script.py")


def test_traces_of_ranks_that_train(paceline: Paceline) -> None:
    pytest.importorskip("torch")
    submit(paceline, TRAINS, "-n", "2")
    eventually(lambda: all((paceline.folder / f"steps-{rank}").exists() for rank in range(2)), "both train")
    process = paceline.start("profile", "it", "--steps", "1000000")
    folder = paceline.home / "jobs" / "it"
    eventually(lambda: list(folder.glob(".profile-*")), "it is asked for")
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    assert not list(folder.glob(".profile-*"))

    def done() -> bool:
        nonlocal said
        said = paceline("profile", "it", "--steps", "3", "--ranks", "all", "-o", "traces")
        return said.returncode == 0

    said = paceline("profile", "it", "--ranks", "0,9")
    assert (said.returncode, "--ranks 9: job it has no such instance" in said.stderr) == (2, True), said.stderr
    eventually(done, "the first profile has ended in its rank")
    rows = [line.split() for line in said.stdout.splitlines()[1:3]]
    assert [(row[0], row[2]) for row in rows] == [("0", "3"), ("1", "3")], said.stdout
    for row in rows:
        assert re.fullmatch(r"traces/[^/]+_\d+\.\d+\.pt\.trace\.json\.gz", row[-1])
        found = json.loads(gzip.decompress((paceline.folder / row[-1]).read_bytes()))["traceEvents"]
        names = [event["name"] for event in found if event.get("ph") == "X"]
        assert {f"ProfilerStep#{number}" for number in range(3)} <= set(names)
        for name in ("aten::linear", "AddmmBackward0", "Optimizer.step#SGD.step"):
            assert 2 <= names.count(name) <= 4, (name, names.count(name))
    assert re.search(r"^aten::addmm +[0-9.]+ ms +[0-9.]+ % +1$", said.stdout, re.M), said.stdout
    paceline("stop", "--now", "it")
    said = paceline("profile", "it")
    assert (said.returncode, "so no rank runs" in said.stderr) == (2, True), said.stderr


@pytest.mark.parametrize(
    ("flags", "why"),
    [((), "it has not imported torch.*py-spy record --pid"), (("--hang", "off"), "started with --hang off")],
)
def test_ranks_that_cannot_be_profiled(paceline: Paceline, flags: tuple[str, ...], why: str) -> None:
    submit(paceline, "open('begun', 'w').close(); import time; time.sleep(600)", *flags)
    eventually((paceline.folder / "begun").exists, "it runs")
    eventually(lambda: '"RUNNING"' in paceline("get", "-o", "json", "it").stdout, "its state is known")
    said = paceline("profile", "it")
    paceline("stop", "--now", "it")
    assert said.returncode == 2
    assert re.fullmatch(f"paceline: rank 0: .*{why}.*\n", said.stderr), said.stderr
