"""Groups of machines by the measured speeds of their links, and sums within groups that span machines."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from tests.train.launching import launch  # noqa: E402

import paceline  # noqa: E402
from paceline import AllReduce, LocalSGD  # noqa: E402
from paceline.train.parallel.sync import fast_groups as measuring  # noqa: E402
from paceline.train.parallel.sync import route  # noqa: E402
from paceline.train.parallel.sync.fast_groups import GAP, fast_groups, rounds  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.torch

# -- groups from speeds ------------------------------------------------------------------------------------------------


def pairs(count: int) -> list[tuple[int, int]]:
    return list(itertools.combinations(range(count), 2))


def sites(names: Sequence[int]) -> list[list[int]]:
    return [[machine for machine, name in enumerate(names) if name == each] for each in dict.fromkeys(names)]


@given(names=st.lists(st.integers(0, 3), min_size=3, max_size=9), data=st.data())
def test_machines_of_a_site_are_a_group(names: list[int], data: st.DataObject) -> None:
    varying = st.floats(1.0, GAP * 0.99)
    speeds = {
        (one, other): data.draw(varying) * (1e9 if names[one] == names[other] else 1e7)
        for one, other in pairs(len(names))
    }
    has_both = len(set(names)) > 1 and any(len(site) > 1 for site in sites(names))
    expected = sites(names) if has_both else [[machine] for machine in range(len(names))]
    assert fast_groups(len(names), speeds) == expected


@given(count=st.integers(1, 8), data=st.data())
def test_every_link_of_a_group_is_clearly_faster_than_the_slowest_one(count: int, data: st.DataObject) -> None:
    speeds = {pair: data.draw(st.floats(1e-3, 1e12)) for pair in pairs(count)}
    groups = fast_groups(count, speeds)
    assert sorted(machine for each in groups for machine in each) == list(range(count))
    assert groups == sorted(sorted(each) for each in groups)
    inside = [speeds[pair] for each in groups for pair in itertools.combinations(each, 2)]
    assert all(speed >= GAP * min(speeds.values()) for speed in inside)
    ordered = sorted(speeds.values())
    if any(fast >= GAP * slow for slow, fast in itertools.pairwise(ordered)):
        assert inside


def test_the_largest_gap_counts_and_of_equal_ones_that_of_the_slowest_links() -> None:
    kinds = {(0, 1): 1e9, (0, 2): 1e8, (0, 3): 1e7, (1, 2): 1e8, (1, 3): 1e7, (2, 3): 1e7}
    assert fast_groups(4, kinds) == [[0, 1, 2], [3]]
    assert fast_groups(4, {**kinds, (0, 1): 2e9}) == [[0, 1], [2], [3]]


def test_a_machine_joins_only_those_to_all_of_which_it_has_fast_links() -> None:
    assert fast_groups(3, {(0, 1): 1e9, (0, 2): 1e7, (1, 2): 1e9}) == [[0, 1], [2]]


@given(st.integers(1, 20))
def test_in_rounds_all_pairs_meet_once_and_nobody_twice_in_a_round(count: int) -> None:
    met = []
    for each in rounds(count):
        playing = [player for pair in each for player in pair]
        assert len(playing) == len(set(playing))
        met += each
    assert sorted(met) == pairs(count)


# -- real ranks --------------------------------------------------------------------------------------------------------


def on_machines(ranks_each: int) -> None:
    """Let this rank believe that the ranks are on several machines."""
    name = f"machine {int(os.environ['RANK']) // ranks_each}"
    route.machine_id = lambda: name  # type: ignore[assignment]


def slow_between(sites: Sequence[Sequence[int]]) -> None:
    """Let links between ranks of different sites be measured as slow, and others as fast."""
    measure, mine = measuring._speed, next(site for site in sites if int(os.environ["RANK"]) in site)

    def measured(other: int, device: Any, *, first: bool) -> float:
        assert measure(other, device, first=first) > 0
        return 1e9 if other in mine else 1e7

    measuring._speed = measured  # type: ignore[assignment]


def build() -> Any:
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(9, 300), torch.nn.Tanh(), torch.nn.Linear(300, 4))


def step_of(model: Any, rank: int, step: int) -> Any:
    x = torch.randn(6, 9, generator=torch.Generator().manual_seed(1000 * rank + step))
    return (model(x) - x[:, :4].sin()).square().mean()


def trained(ranks_each: int, sync: Any, sites: Any) -> tuple[list[float], list[bool], int]:
    """The parameters, which ranks have the same ones, and the bytes sent."""
    on_machines(ranks_each)
    slow_between(sites)
    with paceline.init() as run:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), 0.2)
        wrapped, optimizer = run.setup(model, optimizer, strategy=paceline.Strategy(sync=sync))
        for step in run.steps(range(6)):
            optimizer.zero_grad()
            run.backward(step_of(wrapped, run.rank, step))
            optimizer.step()
        values = torch.cat([p.detach().flatten() for p in model.parameters()])
        same = [bool(torch.equal(values, each)) for each in run.all_gather(values)]
        return values.tolist(), same, run._prepared.sent()


def by_hand(ranks: int) -> list[float]:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    for step in range(6):
        optimizer.zero_grad()
        torch.stack([step_of(model, rank, step) for rank in range(ranks)]).mean().backward()
        optimizer.step()
    return [value for p in model.parameters() for value in p.flatten().tolist()]


def test_machines_with_fast_links_sum_first(capfd: pytest.CaptureFixture[str]) -> None:
    gradients = 4204 * 4
    results = launch(trained, (1, AllReduce(hierarchical="measured"), [[0, 2], [1, 3]]), 4)
    for rank, (values, same, sent) in enumerate(results):
        assert values == pytest.approx(by_hand(4), rel=1e-4, abs=1e-6)
        assert all(same)
        assert sent == 6 * gradients * (1 if rank > 1 else 2)  # to the rank of its site; the first ones to each other
    (said,) = [line for line in capfd.readouterr().err.splitlines() if "hierarchical=" in line]
    assert said == (
        "paceline: hierarchical=measured: groups [0, 2] [1, 3]: 8.0 Gbit/s or more within groups, 80 Mbit/s or less "
        "between them"
    )


@pytest.mark.parametrize("groups", [((0, 1, 2), (3,)), ((0, 2), (1, 3)), ((3, 0, 1, 2),)])
def test_groups_that_span_machines_sum_on_each_machine_first(groups: Any, caplog: pytest.LogCaptureFixture) -> None:
    for values, same, _ in launch(trained, (2, AllReduce(hierarchical=groups), [[0, 1, 2, 3]]), 4):
        assert values == pytest.approx(by_hand(4), rel=1e-4, abs=1e-6)
        assert all(same)


def test_with_local_sgd_the_machines_of_a_group_train_together(capfd: pytest.CaptureFixture[str]) -> None:
    sync = LocalSGD(every=2, warmup=0, hierarchical="measured")
    for _, same, _ in launch(trained, (1, sync, [[0, 1], [2]]), 3):
        assert all(same)
    assert "groups [0, 1] [2]: 8.0 Gbit/s" in capfd.readouterr().err


def test_two_machines_are_two_groups(capfd: pytest.CaptureFixture[str]) -> None:
    launch(trained, (1, AllReduce(hierarchical="measured"), [[0, 1]]), 2)
    assert (
        "hierarchical=measured: groups [0] [1], the ranks of each machine: there are no three machines"
        in capfd.readouterr().err
    )
