"""One rank does something wrong or ends: the error names it, and nobody waits for it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import GENEROUS, eventually, free_port

torch = pytest.importorskip("torch")

from tests.train.launching import launch  # noqa: E402
from tests.train.scripts import Script, run  # noqa: E402

import paceline as library  # noqa: E402 - after torch is known to be there
from paceline.train.parallel.errors import UnusedParameters, WrongDevice  # noqa: E402

if TYPE_CHECKING:
    from tests.conftest import Paceline

pytestmark = pytest.mark.torch

TRAIN = """
    import os, sys, threading, time, torch, paceline
    from torch.utils.data import TensorDataset

    run = paceline.init(seed=0)
    samples = TensorDataset(torch.randn(400, 4))
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = run.setup(model, optimizer)
    train = run.dataloader(samples, global_batch_size=8)

    def step(x):
        run.backward(model(x).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
"""


def ranks_by_hand(paceline: Paceline, count: int = 2) -> list[Script]:
    """Start ranks of a script as a scheduler would that does not look after them."""
    main = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count)}
    return [
        Script(paceline, "script.py", env={**main, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(count)
    ]


def outcomes(processes: list[Script]) -> list[tuple[int, str]]:
    """Exit code and stderr of each."""
    try:
        ends = [process.communicate(timeout=GENEROUS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, err) for process, (_, err) in zip(processes, ends, strict=True)]


def test_an_exception_on_one_rank_ends_the_others(paceline: Paceline) -> None:
    paceline.script(
        TRAIN
        + """
    for (x,) in train:
        if run.rank == 1 and run.step == 3:
            raise ValueError("bad sample")
        step(x)
    """
    )
    done = paceline.run("-n", "2", "script.py")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("paceline: rank 1 failed first: ValueError: bad sample")
    (zero, first, two) = outcomes(ranks_by_hand(paceline, 3))
    assert "ValueError: bad sample" in first[1]
    for code, err in (zero, two):
        assert code == 1
        assert "PeerLost: rank 1 failed (ValueError: bad sample)" in err


@pytest.mark.parametrize("guilty", [0, 1])
def test_a_rank_that_waits_where_nobody_comes_is_ended(paceline: Paceline, guilty: int) -> None:
    """What gloo notices by itself other backends do not: here the others wait for something else."""
    paceline.script(
        TRAIN
        + f"""
    for (x,) in train:
        step(x)
        if run.step == 3:
            open(f"there-{{run.rank}}", "w").close()
            threading.Event().wait()  # rank {guilty} is killed meanwhile
    """
    )
    ranks = ranks_by_hand(paceline, 3)
    eventually(lambda: all((paceline.folder / f"there-{rank}").exists() for rank in range(3)), "all have come")
    ranks[guilty].kill()
    for rank, (code, err) in enumerate(outcomes(ranks)):
        if rank != guilty:
            assert code == 1
            assert f"PeerLost: rank {guilty} failed (it is gone); rank {rank} cannot go on without it" in err


def test_a_rank_that_leaves_the_loop_early_is_the_one_with_the_error(paceline: Paceline) -> None:
    paceline.script(
        TRAIN
        + """
    for epoch in range(2):
        for (x,) in train:
            step(x)
            if run.rank == 1 and run.step == 5:
                break
        accuracy = run.mean(1, 2)
    """
    )
    done = paceline.run("-n", "2", "script.py")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert (
        "paceline: rank 1 failed first: LeftEarly: rank 1 left after step 5, while rank 0 went on with step 6" in last
    )
    assert "line " in done.stderr  # where rank 1 stood


def test_all_may_leave_the_loop_at_the_same_step(paceline: Paceline) -> None:
    paceline.script(
        TRAIN
        + """
    for epoch in range(3):
        for number, (x,) in enumerate(train):
            if number == 7:
                break
            step(x)
    print(run.step, run.mean(1, 2))
    run.close()
    """
    )
    done = paceline.run("-n", "2", "script.py")
    assert (done.returncode, done.stdout) == (0, "21 0.5\n"), done.stderr


def test_a_rank_may_stay_longer_when_training_is_over(paceline: Paceline) -> None:
    paceline.script(
        TRAIN
        + """
    for (x,) in train:
        step(x)
    if run.rank == 0:
        while os.path.exists(f"/proc/{other}") if (other := run_other()) else False:
            time.sleep(0.01)
        print("evaluated")
    """.replace("run_other()", "os.path.exists('pid-1') and open('pid-1').read()")
        + """
    else:
        open("pid-1", "w").write(str(os.getpid()))
    """
    )
    done = paceline.run("-n", "2", "script.py")
    assert (done.returncode, done.stdout) == (0, "evaluated\n"), done.stderr


def unused(who: str) -> None:
    run = library.init(timeout=60)
    model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in ("used", "spare")})
    model.forward = lambda x, both: model["spare"](model["used"](x)) if both else model["used"](x)
    wrapped = run.setup(model)
    for _ in range(3):
        run.backward(wrapped(torch.ones(1, 2), who == "one" and run.rank == 0).sum())


@pytest.mark.parametrize("who", ["all", "one"])
def test_parameters_without_gradient_are_named(who: str) -> None:
    with pytest.raises(UnusedParameters, match=r"no gradient for spare\.weight, spare\.bias on rank \d: the loss at "):
        launch(unused, (who,), nproc=2)


def wrong_device() -> None:
    run = library.init(timeout=60)
    model = run.setup(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2, device="meta"))


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_batch_on_the_wrong_device(nproc: int) -> None:
    with pytest.raises(
        WrongDevice, match=r"the model is on cpu, but its argument of shape \[1, 2\] on meta; take batches from"
    ):
        launch(wrong_device, nproc=nproc)


def fails_within(where: str) -> None:
    with library.init(timeout=600) as run:
        if run.rank == 1:
            raise KeyError("bad")
        run.barrier()


def test_an_exception_within_a_block_ends_the_others() -> None:
    with pytest.raises(KeyError, match="bad"):
        launch(fails_within, ("",), nproc=2)


def test_a_child_of_a_rank_can_be_terminated(paceline: Paceline) -> None:
    """The handlers that a rank has for SIGTERM are not those of what it forks."""
    paceline.script(
        TRAIN
        + """
    import multiprocessing
    if run.rank == 0:
        for (x,) in train:
            step(x)
            break
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        child.start()
        child.terminate()
        child.join()
        print(child.exitcode)
    """
    )
    done = paceline.run("script.py")
    assert (done.returncode, done.stdout) == (0, f"{-signal.SIGTERM}\n"), done.stderr


def details(done: Any) -> str:
    return f"{done.returncode}\n{done.stdout}\n{done.stderr}"


def torchrun(paceline: Paceline) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"],
        cwd=paceline.folder, env=paceline.env, text=True, capture_output=True, timeout=GENEROUS, check=False,
    )  # fmt: skip


def test_torchrun_reports_the_guilty_rank(paceline: Paceline) -> None:
    paceline.script(
        TRAIN
        + """
    for (x,) in train:
        if run.rank == 1 and run.step == 3:
            os.kill(os.getpid(), 9)
        step(x)
    """
    )
    done = torchrun(paceline)
    assert done.returncode != 0
    assert "Signal 9 (SIGKILL) received by PID" in done.stderr, details(done)


# Torch first, so that ranks start from a process that has imported it.
QUICKLY = """
    import torch
    from paceline.train import collective_trace
    assert collective_trace.SETTLED + collective_trace.ASK_SECONDS + collective_trace.LATE_SECONDS > 10
    collective_trace.SETTLED, collective_trace.ASK_SECONDS, collective_trace.LATE_SECONDS = 0.5, 0.5, 1.0
"""

MISMATCHED = {
    "barrier": ("run.barrier()", "barrier", "backward"),
    "all_reduce": ("run.all_reduce(torch.ones(3))", "all_reduce", "backward"),
    "mean": ("run.mean(1, 2)", "mean", "backward"),
    "save": ("run.save()", "save", "backward"),
    "backward": ("continue", "asked for the next batch", "entered backward"),
}


def mismatched(paceline: Paceline, what: str, guilty: int) -> list[str]:
    """A script in which one rank calls something that the others do not; returns what the error must say."""
    call, its, theirs = MISMATCHED[what]
    paceline.script(
        QUICKLY
        + TRAIN.replace("paceline.init(seed=0", "paceline.init(seed=0, checkpoint_dir='checkpoints'")
        + f"""
    for epoch in range(2):
        for (x,) in train:
            if run.rank == {guilty} and run.step in (3, 6):
                {call}
            step(x)
    run.close()
    """
    )
    lines = (paceline.folder / "script.py").read_text().splitlines()

    def numbered(verb: str, text: str) -> str:
        at = next(number for number, line in enumerate(lines, 1) if text in line)
        return f"{verb if ' ' in verb else f'entered {verb}'} (script.py:{at})"

    if what == "backward":
        return [f"rank {guilty} {numbered(its, 'in train:')}", numbered(theirs, "run.backward")]
    return [f"rank {guilty} {numbered(its, call)}", numbered(theirs, "run.backward")]


@pytest.mark.parametrize(
    ("ranks", "guilty", "what"),
    [
        *((2, 0, what) for what in MISMATCHED),
        *(pytest.param(3, 1, what, marks=pytest.mark.nightly if what != "barrier" else ()) for what in MISMATCHED),
    ],
)
def test_a_collective_that_some_do_not_call(paceline: Paceline, ranks: int, guilty: int, what: str) -> None:
    needed = mismatched(paceline, what, guilty)
    done = paceline.run("-n", str(ranks), "script.py")
    assert done.returncode == 1, done.stderr
    last = done.stderr.splitlines()[-1]
    assert "CollectiveMismatch: rank 0 " in last, done.stderr
    for text in needed:
        assert text in last


@pytest.mark.parametrize("loader", ["train", "run.dataloader(samples, 4, evaluation=True)"])
def test_a_batch_that_one_rank_takes_before_the_loop_is_named(paceline: Paceline, loader: str) -> None:
    training = TRAIN if loader == "train" else TRAIN.replace("train = ", "# ")
    paceline.script(
        training
        + f"""
    if run.rank == 1:
        next(iter({loader}))
    for epoch in run.epochs(1):
        pass
    """
    )
    done = paceline.run("-n", "2", "script.py")
    assert done.returncode == 1
    lines = (paceline.folder / "script.py").read_text().splitlines()
    taken, loop = (next(n for n, line in enumerate(lines, 1) if text in line) for text in ("next(iter", "run.epochs"))
    assert f"rank 1 asked for the next batch (script.py:{taken})" in done.stderr
    assert f"rank 0 entered epochs (script.py:{loop})" in done.stderr


@pytest.mark.parametrize("launcher", ["", "paceline"])
def test_a_checkpoint_that_cannot_be_written_at_the_end_is_an_error(paceline: Paceline, launcher: str) -> None:
    paceline.script(
        TRAIN.replace("seed=0", "checkpoint_dir='checkpoints'").replace("(4, 1)", "(4, 1000)")
        + """
    import resource
    last = open("last", "w")
    last.write("whole")
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    run.save()
    """
    )
    done = paceline.run("script.py") if launcher else run(paceline, "script.py", timeout=GENEROUS)
    assert done.returncode == 1, done.stderr
    assert "CheckpointError: cannot save step 0 in " in done.stderr.splitlines()[-1], done.stderr
    assert (paceline.folder / "last").read_text() == "whole", "Python has ended as it does"


def test_batches_of_another_loader_may_not_be_uneven_in_training_mode(paceline: Paceline) -> None:
    """Each forward pass shares rank 0's running means."""
    paceline.script(
        QUICKLY
        + TRAIN
        + """
    model = run.setup(torch.nn.BatchNorm1d(3))
    for x in torch.ones(3 - run.rank, 2, 3):
        model(x)
    run.mean(1, 2)
    """
    )
    done = paceline.run("-n", "2", "script.py")
    assert done.returncode == 1, done.stderr
    number = (paceline.folder / "script.py").read_text().splitlines().index("    model(x)") + 1
    text = f"rank 0 entered forward (script.py:{number}) while rank 1 entered mean (script.py:{number + 1})"
    assert f"CollectiveMismatch: {text}" in done.stderr.splitlines()[-1], done.stderr


def test_a_collective_that_a_rank_never_comes_to_because_it_has_ended(paceline: Paceline) -> None:
    paceline.script("""
        import torch, paceline
        run = paceline.init()
        if run.is_main:
            run.barrier()
    """)
    done = paceline.run("-n", "2", "script.py")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "rank 0 entered barrier (script.py:5)" in last
    assert "rank 1 left after step 0" in last or "rank 1 reached the end of the script" in last, (
        "whichever is known first"
    )


def test_a_slow_rank_is_named_and_waited_for(paceline: Paceline) -> None:
    """One evaluates, or compiles, or sleeps for longer than anything the others may suspect."""
    paceline.script(
        QUICKLY
        + TRAIN
        + """
    import logging

    class Heard(logging.Handler):
        def emit(self, record):
            open(f"heard-{run.rank}", "a").write(record.getMessage() + "\\n")

    logging.getLogger("paceline").addHandler(Heard())
    collective_trace.LATE_SECONDS = 600.0
    for (x,) in train:
        step(x)
        if run.step == 3:
            collective_trace.LATE_SECONDS = 1.0
            if run.rank == 1:
                while not os.path.exists("heard-0"):
                    time.sleep(0.01)
        run.barrier()
        collective_trace.LATE_SECONDS = 600.0  # the next step may take longer than that
        if run.step == 5:
            break
    run.print(run.mean(1, 2))
    """
    )
    done = paceline.run("-n", "2", "script.py")
    assert (done.returncode, done.stdout) == (0, "0.5\n"), done.stderr
    (line,) = (paceline.folder / "heard-0").read_text().splitlines()
    assert "s for rank 1, which has not entered barrier (script.py:" in line
    assert "; it is at script.py:" in line
    assert not (paceline.folder / "heard-1").exists()


@pytest.mark.parametrize("code", [0, "'no more data'"])
def test_a_rank_that_leaves_by_itself_is_not_accused_of_leaving_a_loop(paceline: Paceline, code: object) -> None:
    paceline.script(
        TRAIN
        + f"""
    for (x,) in train:
        if run.rank == 1 and run.step == 3:
            sys.exit({code})
        step(x)
    """
    )
    (zero, first) = outcomes(ranks_by_hand(paceline))
    assert first[0] == (code if isinstance(code, int) else 1)
    assert "LeftEarly" not in first[1]
    assert zero[0] == 1
    if code == 0:
        known_first = "rank 1 left after step 4|while rank 1 reached the end of the script"  # it had begun step 4
        assert re.search(known_first, zero[1]), zero[1]
    else:
        how = "exited with code 1 (no more data)"
        assert f"PeerLost: rank 1 {how}; rank 0 cannot go on without it" in zero[1]


def test_a_forward_pass_in_training_on_one_rank_is_named(paceline: Paceline) -> None:
    """It shares buffers, so it is a collective; more of the same name are seen by their lines."""
    paceline.script(
        TRAIN.replace("torch.nn.Linear(4, 1)", "torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))")
        + """
    for (x,) in train:
        if run.rank == 1 and run.step == 3:
            model(torch.randn(4, 4))  # a sample
        step(x)
    """
    )
    done = paceline.run("-n", "2", "script.py")
    assert done.returncode == 1
    lines = (paceline.folder / "script.py").read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "# a sample" in text)
    assert "CollectiveMismatch: rank 0 entered " in done.stderr
    assert f"entered forward (script.py:{line})" in done.stderr
