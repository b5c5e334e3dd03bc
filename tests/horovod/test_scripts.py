"""Unmodified scripts under `paceline run` and `paceline horovodrun`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.conftest import free_port

if TYPE_CHECKING:
    from tests.conftest import Paceline

pytestmark = pytest.mark.torch

SCRIPT = """
    import os
    import sys
    import torch
    import horovod
    import horovod.torch as hvd
    from horovod.common.exceptions import HorovodInternalError
    from horovod.torch.elastic import TorchState
    from horovod.torch.mpi_ops import allreduce_async, synchronize
    from horovod.common.util import nccl_built

    assert HorovodInternalError is hvd.HorovodInternalError and callable(horovod.run)
    hvd.init()
    total = synchronize(allreduce_async(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum))
    assert "HOROVOD_CACHE_CAPACITY" not in os.environ and not nccl_built()
    print(hvd.rank(), hvd.size(), hvd.local_rank(), total.item(), os.environ.get("HOROVOD_CYCLE_TIME"), sys.argv[1:])
    try:
        import horovod.spark.lightning
    except ImportError as error:
        print(error)
"""


def test_horovodrun_runs_a_script_that_imports_horovod(paceline: Paceline) -> None:
    script = paceline.script(SCRIPT, "train.py")
    flags = ("--verbose", "--cycle-time-ms", "3", "--disable-cache", "--tee", "all")
    done = paceline.succeeds("horovodrun", "-np", "2", *flags, script, "--lr", "1")
    for rank in (0, 1):
        assert f"{rank} 2 {rank} 3.0 3 ['--lr', '1']" in done.stdout
    assert "horovod.spark is not part of paceline" in done.stdout


def test_run_recognises_horovod_and_starts_each_rank_anew_if_asked(paceline: Paceline) -> None:
    script = paceline.script(SCRIPT, "train.py")
    done = paceline.succeeds("run", "-n", "1", "--start-method", "exec", script)
    assert "0 1 0 1.0 None []" in done.stdout


def test_the_real_horovod_must_be_installed(paceline: Paceline) -> None:
    script = paceline.script(SCRIPT, "train.py")
    done = paceline.run("-n", "1", "--horovod", "real", script)
    assert done.returncode == 2
    assert "horovod is not installed" in done.stderr
    other = paceline.script("import torch", "other.py")
    done = paceline.run("--horovod", "paceline", other)
    assert done.returncode == 2
    assert "--horovod paceline is for scripts that import horovod; add --framework horovod" in done.stderr
    done = paceline("horovodrun", "-np", "1", "--mpi", script)
    assert (done.returncode, "use gloo" in done.stderr) == (2, True)


ELASTIC = """
    import os
    import signal
    import torch
    import horovod.torch as hvd

    hvd.init()
    model = torch.nn.Linear(2, 1)
    state = hvd.elastic.TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1), step=0)

    @hvd.elastic.run
    def train(state):
        print("from", state.step, flush=True)
        while state.step < 4:
            state.step += 1
            with torch.no_grad():
                model.weight.fill_(state.step)
            state.commit()
            if state.step == 2 and os.environ["PACELINE_ATTEMPT"] == "0" and hvd.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        return model.weight[0, 0].item()

    print("weight", train(state))
"""


def test_a_killed_rank_costs_what_was_done_since_the_last_commit(paceline: Paceline) -> None:
    script = paceline.script(ELASTIC)
    done = paceline.succeeds("run", "-n", "2", "--max-restarts", "1", script)
    assert "from 0" in done.stdout
    assert "from 2" in done.stdout or "from 3" in done.stdout
    assert "weight 4.0" in done.stdout


UNEVEN = """
    import os
    import torch
    import horovod.torch as hvd

    hvd.init()
    place = (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous())
    print("places", hvd.allgather_object(place))
    assert "HOROVOD_CROSS_SIZE" not in os.environ
"""


def test_machines_may_have_different_numbers_of_ranks(paceline: Paceline) -> None:
    script = paceline.script(UNEVEN)
    meet = ("--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--nnodes", "3")
    counts = ("1", "3", "2")  # 3 nodes of 2 ranks would be as many
    parts = [
        paceline.start("run", "-n", count, *meet, "--node-rank", str(rank), "--name", f"part{rank}", script)
        for rank, count in enumerate(counts)
    ]
    out, err = parts[0].communicate()
    for part in parts[1:]:
        part.communicate()
    assert [part.returncode for part in parts] == [0, 0, 0], err
    rows = [(0, 1, 0, 3), (0, 3, 1, 3), (1, 3, 0, 2), (2, 3, 0, 1), (0, 2, 2, 3), (1, 2, 1, 2)]
    assert f"places {[(*row, False) for row in rows]}" in out
