"""Whatever ranks exchange, and in whichever step they are stopped: a resumed run ends as an undisturbed one."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from tests.train.launching import launch  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

import paceline  # noqa: E402
from paceline import AllReduce, DiLoCo, LocalSGD, PowerSGD, TopK  # noqa: E402
from paceline.train.parallel.sync import build as builder  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.torch
PAIRS: list[tuple[Any, int]] = [  # the method, and the step in which the run is stopped
    (AllReduce(wire="int8", hierarchical=((0, 1), (2, 3))), 7),
]
TOGETHER: list[tuple[Any, int]] = [  # on one machine
    (AllReduce(), 7),
    (PowerSGD(rank=2, warmup=3, hierarchical=False), 7),
    (TopK(fraction=0.2, hierarchical=False), 7),
    (LocalSGD(every=4, warmup=2), 4),
    (LocalSGD(every="auto", warmup=2, initial=4), 6),
    (LocalSGD(every=4, warmup=2, hierarchical=True), 10),
    (DiLoCo(every=8, fragments=2, delay=3, wire="int4"), 6),  # through shared memory
]
MACHINES: list[tuple[Any, int]] = [  # each rank is a machine
    (DiLoCo(every=4, fragments=2, overlap=False, wire="fp32"), 4),
    (DiLoCo(every=8, fragments=2, delay=3, wire="int4"), 6),  # the first exchange is under way
    (DiLoCo(every=8, fragments=2, delay=3, wire="int8"), 9),
    (DiLoCo(every=5, fragments=3, delay=2, wire="fp16"), 7),  # just after an epoch
]


def undisturbed(folder: str, cases: list[tuple[Any, int]], as_machines: bool) -> list[tuple[Any, int]]:
    """As `trained`, without checkpoints; and then what is to be resumed, in the same start."""
    whole = trained("", [(sync, None) for sync, _ in cases], as_machines)
    trained(folder, cases)
    return whole


def trained(folder: str, cases: list[tuple[Any, int | None]], as_machines: bool = False) -> list[tuple[Any, int]]:
    """With each method: the parameters at the end, none if it was stopped, and the step with which it began."""
    if as_machines:
        builder.make_groups = lambda group, _: [[rank] for rank in range(group.world_size)]
    return [_trained(folder and f"{folder}/{number}", *case) for number, case in enumerate(cases)]


def _trained(folder: str, sync: Any, stop_at: int | None) -> tuple[list[float], int]:
    keeps: Any = {"checkpoint_dir": folder, "checkpoint_every": 1} if folder else {}
    with paceline.init(seed=5, progress=False, **keeps) as run:
        torch.manual_seed(7)
        model: Any = torch.nn.Sequential(
            torch.nn.Linear(6, 40), torch.nn.BatchNorm1d(40), torch.nn.Tanh(), torch.nn.Linear(40, 3)
        )
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.05, step_size_up=4)  # of the momentum, too
        model, optimizer = run.setup(model, optimizer, strategy=paceline.Strategy(sync=sync, bucket_mb=1))
        run.register(scheduler=scheduler)
        data = TensorDataset(torch.randn(70, 6, generator=torch.Generator().manual_seed(2)))
        train = run.dataloader(data, global_batch_size=12, shuffle=True)
        begin = -1
        for _ in run.epochs(3):
            begin = run.step if begin < 0 else begin
            for (x,) in train:
                optimizer.zero_grad()
                run.backward((model(x) - x[:, :3].sin()).square().mean())
                optimizer.step()
                scheduler.step()
                if run.step + 1 == stop_at:
                    return [], begin
        return [value for each in model.state_dict().values() for value in each.double().flatten().tolist()], begin


@pytest.mark.parametrize(
    ("cases", "ranks", "as_machines"), [(PAIRS, 4, False), (TOGETHER, 2, False), (MACHINES, 2, True)]
)
def test_it_has_the_bits_of_an_undisturbed_one(cases: Any, ranks: int, as_machines: bool, tmp_path: Path) -> None:
    expected, *others = launch(undisturbed, (str(tmp_path), cases, as_machines), ranks)
    assert others == [expected] * (ranks - 1), "an epoch ends with a common model"
    whole = [(sync, None) for sync, _ in cases]
    for resumed in launch(trained, (str(tmp_path), whole, as_machines), ranks):
        for (sync, stop_at), (found, begin), (values, _) in zip(cases, resumed, expected, strict=True):
            assert begin == stop_at - 1, sync
            assert found == values, sync


def test_other_ranks_go_on_from_a_common_model(tmp_path: Path) -> None:
    syncs = [LocalSGD(every=4, warmup=0), DiLoCo(every=8, fragments=2, delay=3, wire="int8")]
    launch(trained, (str(tmp_path), [(sync, 6) for sync in syncs], True), 2)
    first, *others = launch(trained, (str(tmp_path), [(sync, None) for sync in syncs], True), 3)
    assert others == [first, first]
    assert [begin for _, begin in first] == [5, 5]


def changed(folder: str, syncs: list[Any]) -> tuple[list[tuple[Any, int]], list[str]]:
    """With what is said."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("paceline").addHandler(handler)
    return trained(folder, [(sync, None) for sync in syncs]), lines


def test_a_change_of_method_is_named(tmp_path: Path) -> None:
    before = DiLoCo(every=8, fragments=2)
    after = ["allreduce", "local_sgd(4)", DiLoCo(every=4, fragments=2)]
    launch(trained, (str(tmp_path), [(before, 6)] * 3), 2)
    (found, lines), (others, _) = launch(changed, (str(tmp_path), after), 2)
    assert found == others
    assert [begin for _, begin in found] == [5, 5, 5]
    assert sum("taken with sync=DiLoCo(every=8, fragments=2)" in line for line in lines) == 3


def test_a_checkpoint_of_another_method_is_taken_up(tmp_path: Path) -> None:
    launch(trained, (str(tmp_path), [(AllReduce(wire="int8", hierarchical=False), 7)]), 2)
    found, other = launch(trained, (str(tmp_path), [("powersgd(2)", None)]), 2)
    assert found == other and found[0][1] == 6
