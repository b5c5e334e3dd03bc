"""`sync="auto"`: what it forecasts from measurements, what it chooses, and that a resume goes on with it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from tests.train.launching import launch  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

import paceline  # noqa: E402
from paceline import AllReduce, PowerSGD  # noqa: E402
from paceline.train.parallel.sync import build as builder  # noqa: E402
from paceline.train.parallel.sync import route  # noqa: E402
from paceline.train.parallel.sync.forecast import (  # noqa: E402
    Bucket,
    Gradient,
    Link,
    Profile,
    choose,
    forecast,
    sent_bytes,
    sentence,
    step_seconds,
)
from paceline.train.parallel.sync.methods import auto  # noqa: E402
from paceline.train.parallel.sync.options import name_of, parse  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.torch
METHODS = [
    AllReduce(), AllReduce(wire="fp16"), AllReduce(wire="int8"), PowerSGD(rank=4, warmup=0), PowerSGD(rank=2, warmup=0)
]  # fmt: skip

# -- the forecast ------------------------------------------------------------------------------------------------------

seconds = st.floats(0, 10)
shapes = st.lists(st.integers(1, 2000), min_size=1, max_size=3).map(tuple)
buckets = st.lists(
    st.builds(Bucket, seconds, st.lists(shapes.map(Gradient), min_size=1, max_size=4).map(tuple)),
    min_size=1,
    max_size=5,
).map(lambda all_: tuple(sorted(all_, key=lambda each: each.ready)))
profiles = buckets.map(lambda all_: Profile(all_[-1].ready + 0.01, all_))
links = st.builds(Link, st.integers(2, 9), st.floats(1e-6, 1), st.floats(1e3, 1e11))
costs = st.lists(st.floats(0, 1e-6), min_size=len(METHODS), max_size=len(METHODS)).map(
    lambda all_: dict(zip(METHODS, all_, strict=True))
)


@given(profile=profiles, link=links, each=costs, shares=st.booleans())
def test_a_step_takes_at_least_its_computation_and_at_most_everything_in_turn(
    profile: Profile, link: Link, each: Any, shares: bool
) -> None:
    for method, taken in forecast(profile, link, each, shares_cores=shares).items():
        in_turn = profile.compute + sum(
            2 * link.latency
            + sent_bytes(method, bucket.gradients, link.ranks) / link.bandwidth
            + 2 * each[method] * bucket.bytes
            for bucket in profile.buckets
        )
        assert profile.compute <= taken <= in_turn * (1 + 1e-9)


@given(profile=profiles, link=links, each=costs, factor=st.floats(1, 100), shares=st.booleans())
def test_a_better_network_makes_no_step_longer(
    profile: Profile, link: Link, each: Any, factor: float, shares: bool
) -> None:
    before = forecast(profile, link, each, shares_cores=shares)
    faster = forecast(
        profile, Link(link.ranks, link.latency / factor, link.bandwidth * factor), each, shares_cores=shares
    )
    assert all(faster[method] <= before[method] * (1 + 1e-9) for method in METHODS)


@given(profile=profiles, link=links)
def test_what_costs_nothing_and_sends_less_takes_no_longer(profile: Profile, link: Link) -> None:
    taken = forecast(profile, link, dict.fromkeys(METHODS, 0.0), shares_cores=True)
    rounded = 4 * link.ranks * len(profile.buckets) / link.bandwidth  # shares are rounded up to numbers of 2 bytes
    assert taken[AllReduce(wire="fp16")] <= taken[AllReduce()] * (1 + 1e-9) + rounded
    assert taken[METHODS[4]] <= taken[METHODS[3]] * (1 + 1e-9)


@given(profile=profiles)
def test_without_an_exchange_a_step_is_its_computation(profile: Profile) -> None:
    nothing = [0.0] * len(profile.buckets)
    assert step_seconds(profile, nothing, nothing) == profile.compute


@given(taken=st.lists(st.floats(0.001, 100), min_size=len(METHODS), max_size=len(METHODS)))
@example(taken=[10.0, 10.0, 10.0, 9.0, 8.0])  # the fourth saves too little of the first to stand in the fifth's way
def test_the_choice_saves_enough_against_that_of_more_exact_methods_and_no_other_would(taken: list[float]) -> None:
    steps = dict(zip(METHODS, taken, strict=True))
    chosen = choose(steps)
    least = {method: 0.8 if isinstance(method, PowerSGD) else 0.9 for method in METHODS}
    place = METHODS.index(chosen)
    if place:
        before = choose({each: steps[each] for each in METHODS[:place]})
        assert steps[chosen] <= steps[before] * least[chosen]
    assert all(steps[each] > steps[chosen] * least[each] for each in METHODS[place + 1 :])


def test_overlap_of_two_buckets() -> None:
    gradients = (Gradient((10,)),)
    profile = Profile(10.0, (Bucket(0.0, gradients), Bucket(4.0, gradients)))
    assert step_seconds(profile, [1.0, 1.0], [0.0, 0.0]) == 11.0  # the first is exchanged while the second is computed
    assert step_seconds(profile, [6.0, 1.0], [0.0, 0.0]) == 13.0  # the second waits for the first
    assert step_seconds(profile, [6.0, 1.0], [6.0, 1.0]) == 17.0  # and is computed after it


def test_what_it_says() -> None:
    layers = tuple(Gradient((512, 512)) for _ in range(20))
    profile = Profile(0.043, (Bucket(0.0, layers),))
    costs = {method: 0.0 if method == AllReduce() else 1e-10 for method in METHODS}
    slow = Link(2, 0.001, 12.5e6)
    steps = forecast(profile, slow, costs, shares_cores=True)
    assert sentence(profile, slow, steps) == (
        "43 ms compute, 1.7 s exchange of 21 MB at 100 Mbit/s between nodes: powersgd(4) saves 97 %"
    )
    fast = Link(2, 0.0001, 12.5e9)
    steps = forecast(profile, fast, costs, shares_cores=True)
    assert sentence(profile, fast, steps) == (
        "43 ms compute, 1.8 ms exchange of 21 MB at 100 Gbit/s between nodes: allreduce; no other saves enough"
    )
    middle = Link(2, 0.0001, 125e6)
    costly = {AllReduce(): 0.0, AllReduce(wire="fp16"): 1e-9}
    said = sentence(profile, middle, forecast(profile, middle, costly, shares_cores=True))
    assert sentence(profile, Link(2, 0.01, 1.25e6), {AllReduce(): 16.9}).endswith(
        "allreduce; no other saves enough; diloco(64), which is another optimisation, would save 99 %"
    )
    assert "fp16 saves 30 %; local_sgd(8), which is another optimisation, would save" in said


@pytest.mark.parametrize(
    "name", ["allreduce", "fp16", "bf16", "int8", "powersgd(3)", "topk(0.5)", "local_sgd(4)", "diloco(64)"]
)
def test_names_of_methods(name: str) -> None:
    assert name_of(parse(name)) == name


# -- real ranks --------------------------------------------------------------------------------------------------------


def on_machines(ranks_each: int) -> None:
    """Let this rank believe that the ranks are on several machines."""
    name = f"machine {int(os.environ['RANK']) // ranks_each}"
    builder.machine_id = route.machine_id = lambda: name  # type: ignore[assignment]


def build() -> Any:
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(9, 300), torch.nn.Tanh(), torch.nn.Linear(300, 64, bias=False))


def loss_of(model: Any, x: Any) -> Any:
    return (model(x)[:, :4] - x[:, :4].sin()).square().mean()


def batch(rank: int, step: int) -> Any:
    return torch.randn(6, 9, generator=torch.Generator().manual_seed(1000 * rank + step))


def bytes_of_methods(methods: Any) -> list[tuple[int, int]]:
    """For each method what a rank has sent in a step, and what the formula says."""
    found = []
    for method in methods:
        with paceline.init() as run:
            model = build()
            wrapped = run.setup(model, strategy=paceline.Strategy(sync=method))
            run.backward(loss_of(wrapped, batch(run.rank, 0)))
            gradients = [Gradient(tuple(p.shape)) for p in model.parameters()]
            found.append((run._prepared.sent(), sent_bytes(method, gradients, run.world_size)))
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_bytes_are_those_that_are_sent(ranks: int) -> None:
    methods = [
        AllReduce(hierarchical=False), AllReduce(wire="fp16", hierarchical=False),
        AllReduce(wire="int8", hierarchical=False), PowerSGD(rank=2, warmup=0, hierarchical=False),
    ]  # fmt: skip
    for found in launch(bytes_of_methods, (methods,), ranks):
        for method, (sent, formula) in zip(methods, found, strict=True):
            assert sent == formula, method


def favour(name: str) -> None:
    """Let the network be measured as one for which this method is best, or as it is."""
    bandwidth = {"allreduce": 1e12, "powersgd(2)": 1e3}[name]
    measure = auto.measure_link

    def measured(group: Any, device: Any) -> Link:
        link = measure(group, device)
        assert link.bandwidth > 0
        assert link.latency > 0
        return Link(link.ranks, 0.0, bandwidth)

    auto.measure_link = measured


def chosen(name: str) -> tuple[list[str], list[bool], list[float]]:
    """The method after each step, whether ranks have the same parameters after it, and the parameters."""
    on_machines(2)
    favour(name)
    with paceline.init() as run:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        wrapped, optimizer = run.setup(model, optimizer, strategy=paceline.Strategy(sync=paceline.AutoSync(warmup=5)))
        methods, same = [], []
        for step in range(9):
            optimizer.zero_grad()
            run.backward(loss_of(wrapped, batch(run.rank, step)))
            optimizer.step()
            methods.append(run._prepared._models[0].synchroniser.method)
            values = torch.cat([p.detach().flatten() for p in model.parameters()])
            same.append(all(torch.equal(values, each) for each in run.all_gather(values)))
        return methods, same, values.tolist()


@pytest.mark.parametrize("name", ["allreduce", "powersgd(2)"])
def test_all_ranks_choose_the_same_after_exact_steps(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    results = launch(chosen, (name,), 4)
    for methods, same, values in results:
        assert methods == ["auto"] * 5 + [name] * 4
        assert all(same)
        assert values == results[0][2]
    said = [line for line in capfd.readouterr().err.splitlines() if "sync=auto" in line]
    assert len(said) == 1
    assert f"between nodes: {name}" in said[0]


def test_on_one_machine_it_is_all_reduce(capfd: pytest.CaptureFixture[str]) -> None:
    for found in launch(on_one_machine, (), 2):
        assert found == "allreduce"
    assert "sync=auto: allreduce, since all ranks are on one machine" in capfd.readouterr().err


def on_one_machine() -> str:
    with paceline.init() as run:
        wrapped = run.setup(build(), strategy=paceline.Strategy(sync="auto"))
        run.backward(loss_of(wrapped, batch(run.rank, 0)))
        return str(run._prepared._models[0].synchroniser.method)


def resumable(folder: str, name: str, stop_at: int | None) -> tuple[list[float], list[str]]:
    on_machines(1)
    favour(name)
    with paceline.init(seed=5, checkpoint_dir=folder, checkpoint_every=4, progress=False) as run:
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        strategy = paceline.Strategy(sync=paceline.AutoSync(warmup=5), bucket_mb=1)
        wrapped, optimizer = run.setup(model, optimizer, strategy=strategy)
        data = TensorDataset(torch.randn(96, 9, generator=torch.Generator().manual_seed(2)))
        train = run.dataloader(data, batch_size=4, shuffle=True)
        methods = []
        for _ in run.epochs(2):
            for (x,) in train:
                optimizer.zero_grad()
                run.backward(loss_of(wrapped, x))
                optimizer.step()
                methods.append(run._prepared._models[0].synchroniser.method)
                if run.step + 1 == stop_at:
                    return [], methods
        return [value for p in model.parameters() for value in p.flatten().tolist()], methods


def test_a_resume_goes_on_with_the_choice_to_the_bit(tmp_path: Path) -> None:
    undisturbed = launch(resumable, (str(tmp_path / "one"), "powersgd(2)", None), 2)
    launch(resumable, (str(tmp_path / "two"), "powersgd(2)", 14), 2)
    resumed = launch(resumable, (str(tmp_path / "two"), "allreduce", None), 2)  # now it would choose otherwise
    for (expected, _), (values, methods) in zip(undisturbed, resumed, strict=True):
        assert set(methods) == {"powersgd(2)"}
        assert values == expected


def test_with_other_ranks_it_measures_anew(tmp_path: Path) -> None:
    launch(resumable, (str(tmp_path), "powersgd(2)", 10), 2)
    for _, methods in launch(resumable, (str(tmp_path), "allreduce", None), 3):
        assert methods[:5] == ["auto"] * 5
        assert set(methods[5:]) == {"allreduce"}


def test_too_few_steps_to_measure() -> None:
    with pytest.raises(ValueError, match="warmup=2 is less than 3"):
        paceline.AutoSync(warmup=2)
