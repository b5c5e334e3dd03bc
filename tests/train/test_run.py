"""What a training script does with `paceline.init()`, on several real ranks and on one."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import GENEROUS, free_port

torch = pytest.importorskip("torch")

from tests.train.launching import launch  # noqa: E402
from tests.train.scripts import Script  # noqa: E402

import paceline  # noqa: E402 - after torch is known to be there
from paceline.contract.functions import RankFailed  # noqa: E402
from paceline.train.parallel.errors import ModelMismatch  # noqa: E402

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event
    from pathlib import Path

    from tests.conftest import Paceline

pytestmark = pytest.mark.torch


def collectives() -> dict[str, Any]:
    with paceline.init() as run:
        rank = run.rank
        return {
            "who": (rank, run.world_size, run.local_rank, run.attempt, run.is_main),
            "sum": run.all_reduce(torch.tensor([rank, 1])).tolist(),
            "mean of integers": run.all_reduce(torch.tensor(rank), "mean").item(),
            "max": run.all_reduce(rank, "max"),
            "min": run.all_reduce(float(rank), "min"),
            "gather": [t.tolist() for t in run.all_gather(torch.full((rank + 1,), rank))],
            "gather scalars": [t.item() for t in run.all_gather(torch.tensor(rank))],
            "broadcast": run.broadcast(torch.tensor([rank + 5]), source=1 % run.world_size).item(),
            "object": run.broadcast_object({"rank": rank}),
            "objects": run.gather_objects(str(rank)),
            "weighted mean": run.mean(10 * rank, rank + 1),
        }


def test_collectives_on_three_ranks() -> None:
    for rank, seen in enumerate(launch(collectives, nproc=3)):
        assert seen == {
            "who": (rank, 3, rank, 0, rank == 0),
            "sum": [3, 3],
            "mean of integers": 1.0,
            "max": 2.0,
            "min": 0.0,
            "gather": [[0], [1, 1], [2, 2, 2]],
            "gather scalars": [0, 1, 2],
            "broadcast": 6,
            "object": {"rank": 0},
            "objects": ["0", "1", "2"],
            "weighted mean": 5.0,
        }


def test_collectives_in_one_process_need_no_group() -> None:
    assert collectives()["sum"] == [0, 1]
    assert not torch.distributed.is_initialized()


def init_again() -> list[float]:
    sums = []
    for _ in range(3):
        run = paceline.init()
        sums.append(run.all_reduce(1.0))
        run.close()
    return sums


def test_init_after_close() -> None:
    assert launch(init_again, nproc=2) == [[2.0, 2.0, 2.0]] * 2


def init_by(method: str, rank: int) -> float:
    with paceline.init(init_method=method, rank=rank, world_size=2) as run:
        return run.all_reduce(run.rank + 1.0)


def by_method(method: str) -> float:
    rank = int(os.environ.pop("PACELINE_RANK"))
    return init_by(method.replace("PORT", os.environ["MASTER_PORT"]), rank)


@pytest.mark.parametrize("method", ["tcp://127.0.0.1:PORT", "file://{folder}/meeting"])
def test_init_methods(method: str, tmp_path: object) -> None:
    assert launch(by_method, (method.format(folder=tmp_path),), nproc=2) == [3.0, 3.0]


def again_on_the_same_file(path: str, ending: str) -> list[float]:
    rank = int(os.environ.pop("PACELINE_RANK"))
    sums = [init_by(f"file://{path}", rank) for _ in range(3)]
    run = paceline.init(init_method=f"file://{path}", rank=rank, world_size=2)
    sums.append(run.all_reduce(run.rank + 1.0))
    if ending == "fails":
        raise KeyError("bad batch")
    return sums  # without run.close()


@pytest.mark.parametrize("ending", ["returns", "fails"])
def test_the_file_of_an_init_method_can_be_used_again(tmp_path: Path, ending: str) -> None:
    for _ in range(2):
        with pytest.raises(KeyError) if ending == "fails" else contextlib.nullcontext():
            assert launch(again_on_the_same_file, (str(tmp_path / "meeting"), ending), 2) == [[3.0] * 4] * 2
        if ending == "returns":
            assert not (tmp_path / "meeting").exists()
        (tmp_path / "meeting").unlink(missing_ok=True)  # a rank that is ended for another one leaves it


def killed(path: str) -> None:
    rank = int(os.environ.pop("PACELINE_RANK"))
    init_by(f"file://{path}", rank)
    run = paceline.init(init_method=f"file://{path}", rank=rank, world_size=2)
    run.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_file_that_killed_ranks_have_left_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="SIGKILL"):
        launch(killed, (str(tmp_path / "meeting"),), 2)
    with pytest.raises(RuntimeError, match="meeting is left over from ranks that were killed, or in use"):
        launch(again_on_the_same_file, (str(tmp_path / "meeting"), "returns"), 2)


NEIGHBOURS = """
    import os, sys
    import paceline
    how, rank = sys.argv[1], int(sys.argv[2])
    kwargs = {}
    if how == "by hand":
        os.environ.update(RANK=str(rank), WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[3])
    elif how == "torch":
        import torch
        torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{sys.argv[3]}", rank=rank, world_size=3)
    else:
        url = f"tcp://127.0.0.1:{sys.argv[3]}" if how == "tcp" else f"file://{os.getcwd()}/meeting"
        kwargs = {"init_method": url, "rank": rank, "world_size": 3}
    run = paceline.init(**kwargs)
    print(run.rank, run.local_rank)
    run.close()
"""


@pytest.mark.skipif(
    subprocess.run(["unshare", "--uts", "true"], check=False, capture_output=True).returncode != 0,
    reason="needs the right to make a UTS namespace",
)
@pytest.mark.parametrize("how", ["by hand", "torch", "tcp", "file"])
def test_ranks_without_a_launcher_ask_who_shares_their_machine(paceline: Paceline, how: str) -> None:
    paceline.script(NEIGHBOURS)
    port = str(free_port())
    hosts = enumerate(["one", "two", "one"])
    ranks = [Script(paceline, "script.py", how, str(rank), port, host=host) for rank, host in hosts]
    said = [rank.communicate(timeout=GENEROUS)[0] for rank in ranks]
    assert said == ["0 0\n", "1 0\n", "2 1\n"]


def test_init_methods_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="needs rank= and world_size="):
        paceline.init(init_method="tcp://127.0.0.1:1")
    with pytest.raises(ValueError, match="is none of env://"):
        paceline.init(init_method="mpi://", rank=0, world_size=1)


def train(ranks_batch: int, accumulate: int, precision: str) -> list[float]:
    with paceline.init() as run:
        torch.manual_seed(run.rank)  # models differ at first: setup makes them rank 0's
        model = torch.nn.Linear(4, 1)
        if run.is_main:
            torch.manual_seed(7)
            torch.nn.init.normal_(model.weight)
            torch.nn.init.zeros_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = run.setup(
            model, optimizer, strategy=paceline.Strategy(accumulate=accumulate, precision=precision)
        )
        data = torch.arange(96.0).reshape(24, 4) / 96
        share = data[run.rank :: run.world_size].split(ranks_batch)
        for batch in share:
            run.backward((model(batch) - 1).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
        return [p for parameter in model.parameters() for p in parameter.flatten().tolist()]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ranks_and_accumulation_train_what_one_process_trains(precision: str) -> None:
    (alone,) = launch(train, (12, 1, precision))
    tolerance = 1e-6 if precision == "fp32" else 2e-2
    for nproc, batch, accumulate in ((2, 6, 1), (2, 3, 2), (1, 4, 3)):
        for weights in launch(train, (batch, accumulate, precision), nproc):
            assert weights == pytest.approx(alone, abs=tolerance)


def mismatch() -> None:
    run = paceline.init(timeout=60)
    run.setup(torch.nn.Linear(4, 1 + (run.rank == 1)))


def test_models_that_differ() -> None:
    with pytest.raises(ModelMismatch, match=r"rank 1 has the parameter weight|model of rank 1 differs"):
        launch(mismatch, nproc=2)


def scaled() -> list[float]:
    with paceline.init() as run:
        rates = []
        for scaling in ("none", "linear", "sqrt"):
            optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
            run.setup(optimizer, strategy=paceline.Strategy(lr_scaling=scaling))
            rates.append(optimizer.param_groups[0]["lr"])
        return rates


def test_learning_rates_scale_only_when_asked() -> None:
    assert launch(scaled, nproc=2)[1] == pytest.approx([0.1, 0.2, 0.1 * 2**0.5])


def scaled_too_late() -> list[float]:
    with paceline.init() as run:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        with pytest.raises(ValueError, match=r"the scheduler that was made with SGD before run\.setup; make the") as e:
            run.setup(optimizer, strategy=paceline.Strategy(lr_scaling="linear"))
        assert "\n" not in str(e.value)
        run.setup(optimizer, strategy=paceline.Strategy())
        optimizer.step()
        scheduler.step()
        first = optimizer.param_groups[0]["lr"]
        again = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        run.setup(again, strategy=paceline.Strategy(lr_scaling="linear"))
        scheduler = torch.optim.lr_scheduler.LambdaLR(again, lambda step: 0.5)
        return [first, again.param_groups[0]["lr"]]


@pytest.mark.parametrize("nproc", [1, 2])
def test_learning_rates_that_a_scheduler_has_noted_are_not_scaled(nproc: int) -> None:
    """It would put back what it has noted; on one rank, too, so that it is found out there."""
    assert launch(scaled_too_late, nproc=nproc) == [pytest.approx([0.1, 0.05 * nproc])] * nproc


@pytest.mark.parametrize("wrong", [{"precision": "fp8"}, {"accumulate": 0}, {"lr_scaling": "cubic"}])
def test_strategies_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        paceline.Strategy(**wrong)


def fails(how: str) -> int:
    run = paceline.init(timeout=600)
    if run.rank == 1:
        if how == "raise":
            raise KeyError("bad batch")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(7)
    run.barrier()
    return run.rank


def test_launch_raises_what_the_first_failing_rank_raised() -> None:
    with pytest.raises(KeyError, match="bad batch") as caught:
        launch(fails, ("raise",), nproc=3)
    assert 'raise KeyError("bad batch")' in str(caught.value.__cause__)
    with pytest.raises(RankFailed, match="rank 1 was killed by SIGKILL"):
        launch(fails, ("kill",), nproc=2)
    with pytest.raises(RankFailed, match="rank 1 exited with code 7"):
        launch(fails, ("exit",), nproc=2)


def follows(how: str) -> int:
    run = paceline.init(timeout=600)
    run.barrier()
    if run.rank == 0:
        if how == "stuck":
            signal.sigtimedwait([signal.SIGUSR1], 600)  # no step and no collective: its process is ended
        run.barrier()
    if how == "with":
        with run:
            raise KeyError("bad batch")
    raise KeyError("bad batch")


@pytest.mark.parametrize("how", ["with", "stuck"])
def test_launch_raises_the_cause_and_not_what_followed_from_it(how: str) -> None:
    for _ in range(5):
        with pytest.raises(KeyError, match="bad batch"):
            launch(follows, (how,), nproc=2)


def leaves(entered: Event) -> None:
    """Rank 1 leaves while rank 0 is in a collective."""
    run = paceline.init(timeout=600)
    run.barrier()
    if run.rank == 1:
        assert entered.wait(600)
        return

    def all_reduce(*_: object, **__: object) -> None:  # as on a GPU: it never ends, and nothing can be raised in it
        entered.set()
        signal.sigtimedwait([signal.SIGUSR1], 600)

    torch.distributed.all_reduce = all_reduce
    run.all_reduce(1.0)


def test_launch_says_why_a_rank_was_ended() -> None:
    with pytest.raises(RankFailed, match="rank 0 exited with code 1: LeftEarly: rank 1 left") as caught:
        launch(leaves, (multiprocessing.get_context("fork").Event(),), nproc=2)
    assert "run.all_reduce(1.0)" in str(caught.value.__cause__)


def test_launch_of_nobody() -> None:
    with pytest.raises(ValueError, match="nproc=0 starts no rank"):
        launch(fails, nproc=0)


def unsaved(folder: str) -> Any:
    run = paceline.init(checkpoint_dir=folder)
    model = run.setup(torch.nn.Linear(2, 2))
    run.save()
    return model(torch.ones(1, 2)).detach()


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_launch_returns_tensors_and_finishes_saves(tmp_path: Any, method: str) -> None:
    torch.set_num_threads(2)
    torch.randn(600, 600) @ torch.randn(600, 600)  # has started threads, which a fork does not have
    first, second = paceline.launch(unsaved, (str(tmp_path),), nproc=2, method=method)
    assert torch.equal(first, second)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000"]


def unpicklable() -> Any:
    return threading.Lock()


def test_launch_says_what_cannot_be_returned() -> None:
    with pytest.raises(RankFailed, match="its result cannot be pickled: "):
        launch(unpicklable)


def laid_out() -> tuple[Any, Any]:
    with paceline.init() as run:
        value = torch.arange(6.0).reshape(2, 3)
        if run.rank == 1:
            value = value.t().contiguous().t()
        return run.all_reduce(value), run.broadcast(value, 1)


def test_collectives_of_tensors_that_lie_differently_in_memory() -> None:
    for total, same in launch(laid_out, nproc=2):
        assert total.tolist() == [[0, 2, 4], [6, 8, 10]]
        assert same.tolist() == [[0, 1, 2], [3, 4, 5]]


def without_setup() -> None:
    run = paceline.init(timeout=60)
    run.backward(torch.nn.Linear(1, 1)(torch.ones(1, 1)).sum())


def test_training_without_setup_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"no model was set up.*pass the model to run\.setup"):
        launch(without_setup, nproc=2)


def test_both_sides_of_a_difference_are_told(paceline: Paceline) -> None:
    paceline.script("import paceline; paceline.init()")
    main = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        Script(paceline, "script.py", env={**main, "RANK": str(rank), "WORLD_SIZE": str(2 + rank)}) for rank in (0, 1)
    ]
    for rank, process in enumerate(ranks):
        _, err = process.communicate(timeout=GENEROUS)
        other = 1 - rank
        assert f"rank {rank} has world size {2 + rank}, rank {other} has {2 + other}; start all ranks alike" in err


def test_each_run_of_a_script_has_checkpoints_of_its_own(paceline: Paceline) -> None:
    paceline.script("""
        import torch, paceline
        for rate in (1, 2):
            with paceline.init(checkpoint_every=2, progress=False) as run:
                model = torch.nn.Linear(1, 1)
                model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), 0.1))
                data = torch.utils.data.TensorDataset(torch.ones(8, 1))
                for epoch in run.epochs(2):
                    for (x,) in run.dataloader(data, global_batch_size=4):
                        run.backward(model(x).mean())
                        optimizer.step()
                run.print(run.step)
    """)
    done = paceline.run("-n", "2", "script.py")
    assert (done.returncode, done.stdout) == (0, "4\n4\n"), done.stderr
    assert {path.name for path in paceline.job().glob("checkpoints*")} == {"checkpoints", "checkpoints-2"}


def begun(folder: str) -> None:
    with paceline.init(checkpoint_dir=folder) as run:
        model, optimizer = build_with(run, torch.optim.SGD)
        run.register(average=torch.nn.Linear(1, 1))
        train = run.dataloader(torch.utils.data.TensorDataset(torch.ones(4, 1)), batch_size=2)
        for (x,) in train:
            run.backward(model(x).mean())
            optimizer.step()
        run.save(block=True)


def build_with(run: paceline.Run, kind: type[torch.optim.Optimizer], apart: bool = False) -> Any:
    model = torch.nn.Linear(1, 1)
    groups = [[model.weight], [model.bias]] if apart else [[model.weight, model.bias]]
    return run.setup(model, kind([{"params": group} for group in groups], lr=0.1))  # type: ignore[call-arg]


def changed(folder: str, how: str) -> None:
    with paceline.init(checkpoint_dir=folder) as run:
        kind = torch.optim.Adam if how == "class" else torch.optim.SGD
        build_with(run, kind, apart=how == "groups")
        if how == "parts":
            run.register(scheduler=torch.nn.Linear(1, 1))
        else:
            run.register(average=torch.nn.Linear(1, 1))
        if how != "loaders":
            run.dataloader([1.0], batch_size=2)
        run.resume()


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("class", "the checkpoint's optimizer does not fit Adam: it has no betas, eps; train on with the"),
        ("groups", "the checkpoint's optimizer does not fit SGD: loaded state dict has a different number of"),
        ("parts", "does not fit this script: it has no scheduler; its average is not in the script; set up"),
        ("loaders", "it has 1 training loader, and the script has made no training loaders so far; set up"),
    ],
)
def test_a_checkpoint_of_another_script_says_where_it_differs(tmp_path: Any, how: str, why: str) -> None:
    launch(begun, (str(tmp_path),))
    with pytest.raises(RuntimeError) as caught:
        launch(changed, (str(tmp_path), how))
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("evaluation", [False, True])
def test_a_loader_has_its_data_set(evaluation: bool) -> None:
    with paceline.init() as run:
        loader = run.dataloader(list(range(7)), batch_size=2, evaluation=evaluation)
        assert (len(loader.dataset), len(loader)) == (7, 4)


def test_each_loader_has_a_seed_of_its_own() -> None:
    with paceline.init(seed=7, progress=False) as run:
        data = torch.arange(100.0)
        train, other, third = (run.dataloader(data, 100, shuffle=True) for _ in range(3))
        given = run.dataloader(data, 100, shuffle=True, seed=7)
        evaluation = run.dataloader(data, 100, shuffle=True, evaluation=True)
        orders = [next(iter(loader)).tolist() for loader in (given, train, other, third, evaluation)]
        assert orders[0] == orders[1], "the first one has that of the run"
        assert len({*map(tuple, orders)}) == 4
        for epoch in run.epochs(2):
            made = [next(iter(run.dataloader(data, 100, shuffle=True))).tolist() for _ in range(2)]
            orders += made if epoch == 0 else []
            assert orders[-2:] == made and made[0] != made[1], "those of each epoch's body are like those of the first"
        assert len({*map(tuple, orders)}) == 6


def interrupted() -> None:
    raise KeyboardInterrupt


def test_ranks_leave_the_report_of_an_interrupt_to_the_process_that_waits(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankFailed, match="exited with code 130"):
        launch(interrupted)
    assert capfd.readouterr().err == ""


def test_a_program_that_is_no_file_launches_by_fork_or_says_why_not() -> None:
    """In a process of its own: threads that tests before it have left are a reason not to fork."""
    program = """
import sys, threading
import paceline
here = [threading.current_thread()]
print(paceline.launch(lambda: here == [threading.current_thread()], nproc=2))
idle = threading.Event()
thread = threading.Thread(target=idle.wait, name="loader")
thread.start()
print(paceline.launch(lambda: 1 + len(threading.enumerate())))  # by cloudpickle
print(paceline.launch(lambda: [print("line", n) for n in range(2000)] and "", nproc=2, method="spawn"))
sys.modules["cloudpickle"] = None
for method in None, "spawn":
    try:
        paceline.launch(lambda: 1, method=method)
    except RuntimeError as error:
        print(error)
idle.set()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=GENEROUS, check=True)
    forked, spawned, *printed, returned, why, why_asked = done.stdout.splitlines()
    assert (forked, spawned, returned) == ("[True, True]", "[2]", "['', '']")
    assert sorted(printed) == sorted(2 * [f"line {n}" for n in range(2000)]), "lines of two ranks are mixed"
    assert "ranks cannot be copies of this process, because its thread 'loader' runs; " in why
    assert "install cloudpickle" in why
    assert why_asked.startswith('paceline.launch: with method="spawn" the function of a notebook goes to its ranks by')
