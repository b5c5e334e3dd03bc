"""`Strategy(shard="auto")` takes the fastest way that fits, trains as any other does, and says before what it takes."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import pickle
import random
import re
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from tests.train.launching import launch, launch_each  # noqa: E402
from tests.train.parallel.shard.test_shard import build, samples, trained, whole  # noqa: E402
from torch.nn import functional  # noqa: E402

import paceline  # noqa: E402
from paceline.contract.memory import MEMORY, amount  # noqa: E402
from paceline.train.parallel.shard import undecided  # noqa: E402
from paceline.train.parallel.shard.choice import (  # noqa: E402
    Choice,
    Limits,
    Passes,
    Sizes,
    Tensor,
    choose,
    in_words,
    ways,
)
from paceline.train.parallel.shard.measure import Twin  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.torch
WAYS = {
    "a copy on each rank": None, 'shard="optimizer"': None, "shard=True, reshard=False": None, "shard=True": None,
    "shard=True, recompute=True": None,
}  # fmt: skip

sizes = st.builds(
    Sizes,
    st.lists(st.builds(Tensor, st.integers(1, 5000), st.integers(1, 20000), st.booleans(), st.integers(-1, 5))),
    st.integers(0, 10**6),
    st.floats(0, 4),
    st.floats(0, 1),
    st.one_of(
        st.none(),
        st.lists(st.integers(0, 10**9), min_size=4, max_size=4).map(lambda it: Passes(*sorted(it, reverse=True))),
    ),
)
limits = st.builds(
    Limits,
    st.integers(1, 64),
    on_gpu=st.booleans(),
    is_half=st.booleans(),
    accumulates=st.booleans(),
    options=st.dictionaries(st.sampled_from(["recompute", "offload"]), st.just(True)),
    rows=st.booleans(),
    parts=st.booleans(),
)


# -- the choice --------------------------------------------------------------------------------------------------------


@given(sizes, limits, st.integers(1, 10**11))
def test_the_first_way_that_fits_is_taken(sizes: Sizes, limits: Limits, memory: int) -> None:
    chosen = choose(sizes, limits, memory)
    found = ways(sizes, limits)
    assert chosen.way in found
    assert chosen.fits == any(way.total <= chosen.usable for way in found)
    if chosen.fits:
        before = found[: found.index(chosen.way)]
        assert chosen.way.total <= chosen.usable < memory
        assert all(way.total > chosen.usable for way in before)
    else:
        assert chosen.way.total == min(way.total for way in found)
    assert chosen.way.name in chosen.why()
    assert "\n" not in chosen.why()


@given(sizes, limits, st.integers(1, 10**11), st.integers(0, 10**11))
def test_more_memory_never_leads_to_a_slower_way(sizes: Sizes, limits: Limits, memory: int, more: int) -> None:
    found = ways(sizes, limits)
    less, plenty = choose(sizes, limits, memory), choose(sizes, limits, memory + more)
    if less.fits:
        assert found.index(plenty.way) <= found.index(less.way)


@given(sizes, limits)
def test_what_the_ways_take_is_ordered(sizes: Sizes, limits: Limits) -> None:
    found = {way.name: way for way in ways(sizes, limits)}
    assert next(iter(found)).startswith("a copy on each rank")
    assert all(size >= 0 for way in found.values() for size in way.parts.values())
    for faster, smaller in (
        ("shard=True, reshard=False", "shard=True"), ("shard=True", "shard=True, recompute=True")
    ):  # fmt: skip
        if faster in found and smaller in found and not limits.on_gpu:
            assert found[smaller].total <= found[faster].total
    assert limits.ranks > 1 or not any("shard" in name for name in found)


@pytest.mark.parametrize(("text", "size"), [("24G", 24 << 30), ("512m", 512 << 20), ("1.5GiB", 3 << 29), ("7", 7)])
def test_amounts(text: str, size: int) -> None:
    assert amount(text, MEMORY) == size


@pytest.mark.parametrize("text", ["", "0", "-1G", "much", "1X", "1 G B"])
def test_what_is_no_amount_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=rf"^{MEMORY}={text}: it is not an amount of memory such as 24G"):
        amount(text, MEMORY)


def test_sizes_are_said_in_words() -> None:
    assert [in_words(size) for size in (0, 999, 1000, 12_345_678, 5e12)] == [
        "0 B",
        "999 B",
        "1 kB",
        "12.3 MB",
        "5e+03 GB",
    ]


# -- what a pass takes -------------------------------------------------------------------------------------------------


def test_a_pass_is_measured_without_memory_and_without_a_trace() -> None:
    """Of layers that keep their input, of 4 kB, and the result of a function, and give 4 kB of gradients."""
    layers = [[torch.nn.Linear(100, 100, bias=False), torch.nn.Tanh()] for _ in range(20)]
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(*one, *two) for one, two in zip(*[iter(layers)] * 2, strict=True))
    )
    model.calls = 0

    def count(module: Any, _: Any) -> None:
        module.calls += 1

    model.register_forward_pre_hook(count)
    state = torch.get_rng_state()
    found = Twin(model, torch.device("cpu")).passes(((torch.ones(10, 100),), {}), [f"{n}" for n in range(10)], None)
    kept = 20 * 4000  # what each Tanh returns, which the next layer keeps too
    softmax = 3 * 4000  # of what stands for the loss, with its gradient
    assert kept <= found.whole <= kept + softmax + 2 * 4000 + 40_000  # and the gradient of one layer's weights
    assert found.whole_again < found.whole == found.sharded
    assert model.calls == 0
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None and not p.isnan().any() for p in model.parameters())


@pytest.mark.parametrize(("kind", "states"), [("SGD", 0), ("Adam", 2), ("AdamW", 2), ("RMSprop", 1), ("Adagrad", 1)])
def test_the_state_of_an_optimizer_is_measured(kind: str, states: int) -> None:
    model = torch.nn.Linear(100, 100, bias=False)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
    before = {name: value for kept in optimizer.state.values() for name, value in kept.items()}
    found = Twin(model, torch.device("cpu")).optimizer(optimizer)
    assert found is not None
    assert found[0] == pytest.approx(states * 40_000, abs=100)
    assert before == {name: value for kept in optimizer.state.values() for name, value in kept.items()}


# -- training ----------------------------------------------------------------------------------------------------------


def takes(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let the ranks choose this way."""

    def chosen(sizes: Sizes, limits: Limits, memory: int) -> Choice:
        return Choice(next(way for way in ways(sizes, limits) if way.name == name), True, memory, 0.9)

    monkeypatch.setattr(undecided, "choose", chosen)


@pytest.fixture(scope="module")
def alone() -> Any:
    return trained({})


@pytest.mark.parametrize("way", WAYS)
def test_each_way_trains_as_one_process_does(way: str, alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    takes(monkeypatch, way)
    cases = [({"shard": "auto"}, None, 2, order) for order in ("before", "first", "after")]
    for ranks in launch_each(trained, cases, 3):
        for _, (model, optimizer), seen, _ in ranks:
            assert seen == pytest.approx(alone[2], abs=2e-5)
            torch.testing.assert_close((dict(model), optimizer), (dict(alone[1][0]), alone[1][1]), msg=way)


def test_a_resumed_run_keeps_the_model_alike_and_another_number_of_ranks_chooses_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ends = []
    for epochs, (ranks, way) in enumerate([(2, "shard=True"), (2, "-"), (3, 'shard="optimizer"'), (1, "-")], 1):
        with monkeypatch.context() as patched:
            takes(patched, "a copy on each rank" if way == "-" else way)
            more = {"recompute": True} if epochs == 2 else {}  # what the script says holds
            found = launch(trained, ({"shard": "auto", **more}, tmp_path, epochs), ranks)
        if ends:
            torch.testing.assert_close(found[0][0], ends[-1], rtol=0, atol=0)
        ends.append(found[0][1])
        said = capfd.readouterr().err
        assert ("as when the checkpoint was taken, Net: shard=True" in said) == (epochs == 2)
        assert (f"Net: {way}: " in said) == (way != "-")


def memory_decides(memory: str) -> list[str]:
    """What the parameters are before and after the first pass, with so much memory."""
    with pytest.MonkeyPatch.context() as patched, paceline.init() as run:
        patched.setenv(MEMORY, memory)
        with run.build():
            model: Any = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(20)))
        model = run.setup(model, strategy=paceline.Strategy(shard="auto"))
        kinds = [type(model[0].weight).__name__]
        run.backward(model(torch.ones(2, 300)).sum())
        return [*kinds, type(model[0].weight).__name__]


def test_the_memory_that_there_is_decides(capfd: pytest.CaptureFixture[str]) -> None:
    cases = {"1G": ["Parameter", "Parameter"], "44M": ["Unfilled", "DTensor"], "9M": ["Unfilled", "DTensor"]}
    for kinds, ranks in zip(cases.values(), launch_each(memory_decides, [(each,) for each in cases], 2), strict=True):
        assert ranks == [kinds] * 2
    much, some, little = [line for line in capfd.readouterr().err.splitlines() if "per rank" in line]
    assert re.fullmatch(
        "paceline: Sequential: a copy on each rank: 5.* MB per rank, and there are 1.07 GB: parameters 7.22 MB, "
        "gradients 7.22 MB, optimizer 14.4 MB, activations .* kB, exchange 25.2 MB",
        much,
    )
    assert re.search(
        r"Sequential: shard=True: 4.* MB per rank, and there are 46.1 MB: .*; shard=True, reshard=False would", some
    )
    assert little.endswith("; no way fits, and this one takes the least")


def evaluates_first(mode: Any) -> list[float]:
    """An evaluation before the training, in which a rank has no batch, and a pass of the module itself."""
    with pytest.MonkeyPatch.context() as patched, paceline.init() as run:
        patched.setenv(MEMORY, "1M")
        with run.build():
            model: Any = build()
        model, other = run.setup(model, build(), strategy=paceline.Strategy(shard="auto"))
        optimizer = run.setup(torch.optim.SGD(model.parameters(), 0.1))
        test = run.dataloader(samples()[:2], batch_size=1, evaluation=True)
        model.eval()
        with mode():
            losses = [float(functional.cross_entropy(each(x), y)) for x, y in test for each in (other, model)]
            assert len(losses) == (0 if run.rank == 2 else 2)
            found = float(functional.cross_entropy(run.unwrap(model)(torch.arange(7)), torch.arange(7)))
        run.backward(model(torch.arange(7)).sum())
        optimizer.step()
        return [found]


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.inference_mode])
def test_the_first_pass_may_be_one_of_an_evaluation_where_ranks_have_no_batches(mode: Any) -> None:
    with torch.no_grad():
        expected = float(functional.cross_entropy(build().eval()(torch.arange(7)), torch.arange(7)))
    for found in launch(evaluates_first, (mode,), 3):
        assert found == pytest.approx([expected], abs=1e-6)


@functools.lru_cache
def angles(size: int) -> Any:
    return torch.arange(size) / size


class Caching(torch.nn.Module):
    """Draws numbers, keeps what it has computed once, and uses a parameter from elsewhere."""

    def __init__(self, other: Any) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(40, 40) for _ in range(3))
        self.other = [other]

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = torch.tanh(layer(x + angles(40) + outside)) + random.random()
        return x


outside, seen = torch.nn.Parameter(torch.ones(40)), []


def note(_: Any, given: Any, result: Any) -> None:
    seen.append(result)


def before_the_first_pass(memory: str) -> Any:
    """What a script may do between run.setup and the first pass, and whether the measurement leaves traces."""
    with pytest.MonkeyPatch.context() as patched, paceline.init(seed=0) as run:
        patched.setenv(MEMORY, memory)
        outside.data.fill_(1)
        outside.grad = None
        angles.cache_clear()
        seen.clear()
        model: Any = Caching(None)
        model.register_forward_hook(note)
        optimizer = torch.optim.SGD([*model.parameters(), outside], 0.1)
        model, optimizer = run.setup(model, optimizer, strategy=paceline.Strategy(shard="auto"))
        module = run.unwrap(model)
        with torch.no_grad():
            model.layers[0].weight[0] = 0.5
        copies = [copy.deepcopy(model), copy.deepcopy(module), pickle.loads(pickle.dumps(model))]
        x = torch.ones(2, 40, requires_grad=True)
        random.seed(1)
        with torch.inference_mode():
            first = module(x).clone()
        passes = len(seen)
        alike = [torch.equal(model_of(x), first) for model_of in map(again, copies)]
        for _ in range(2):
            run.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return whole(model.state_dict()), alike, passes, float(outside.detach().sum()), angles.cache_info().misses


def again(module: Any) -> Any:
    """The pass of a copy, with the random numbers of the first pass."""

    def passed(x: Any) -> Any:
        random.seed(1)
        with torch.no_grad():
            return module(x)

    return passed


def test_a_script_may_use_its_model_before_the_first_pass_and_the_measurement_leaves_no_trace() -> None:
    ((expected, alike, passes, other, misses),) = launch(before_the_first_pass, ("4G",))
    assert (alike, passes, misses) == ([True] * 3, 1, 1)
    for state, *found in launch(before_the_first_pass, ("4G",), 2):
        assert found == [[True] * 3, 1, pytest.approx(other), 1]
        torch.testing.assert_close(dict(state), dict(expected))


def changed_without_numbers(_: None) -> str:
    with pytest.MonkeyPatch.context() as patched, paceline.init() as run:
        patched.setenv(MEMORY, "1M")
        with run.build():
            model: Any = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(2)))
        model = run.setup(model, strategy=paceline.Strategy(shard="auto"))
        model.load_state_dict({name: torch.ones(each.shape) for name, each in model.state_dict().items()})
        try:
            model(torch.ones(2, 300))
        except paceline.NotBuilt as error:
            return f"{error}"
    return ""


def test_a_change_that_would_be_lost_is_refused() -> None:
    for error in launch(changed_without_numbers, (None,), 2):
        assert error.startswith("0.weight of Sequential was changed between run.setup and the first pass, which gives")


def two_models(memory: str) -> list[float]:
    """An adversarial training: the second model is first called after the optimizer of the first one has stepped."""
    with pytest.MonkeyPatch.context() as patched, paceline.init(seed=0) as run:
        patched.setenv(MEMORY, memory)
        models: list[Any] = []
        for _ in range(2):
            model: Any = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(3)))
            optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
            models.append(run.setup(model, optimizer, strategy=paceline.Strategy(shard="auto")))
        x, losses = torch.ones(2, 6), []
        for _ in range(4):
            y = x
            for model, optimizer in models:
                y = model(y.detach())
                run.backward(y.square().mean())
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(y.detach().sum()))
        return losses


def test_models_that_are_first_called_at_different_times_train_together() -> None:
    (expected,) = launch(two_models, ("4G",))
    for ranks in launch_each(two_models, [("4G",), ("1k",)], 2):
        assert ranks == [pytest.approx(expected)] * 2


# -- `paceline plan` ---------------------------------------------------------------------------------------------------

SCRIPT = """
    import torch, paceline
    with paceline.init(checkpoint_dir="checkpoints", checkpoint_every=1) as run:
        with run.build():
            blocks = [torch.nn.Sequential(torch.nn.Linear(1000, 1000), torch.nn.ReLU()) for _ in range(20)]
            model = torch.nn.Sequential(*blocks)
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = run.setup(model, optimizer)
        print("set up")
        run.backward(model(torch.ones(4, 1000)).sum())
        print("trained")
"""


def plan(folder: Path, script: str, *flags: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(textwrap.dedent(script))
    command = [sys.executable, "-m", "paceline", "plan", *flags, "train.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)


def test_a_plan_says_what_each_number_of_ranks_takes_and_trains_nothing(tmp_path: Path) -> None:
    done = plan(tmp_path, SCRIPT, "--memory", "250M", "-o", "json")
    assert (done.returncode, "set up" in done.stderr, "trained" in done.stderr) == (0, True, False)
    rows = json.loads(done.stdout)
    assert [row["ranks"] for row in rows] == [1, 2, 4, 8]
    megabytes = 20 * (1000 * 1000 + 1000) * 4
    assert rows[0]["parts"]["parameters"] == rows[0]["parts"]["gradients"] == megabytes
    assert rows[0]["parts"]["optimizer"] == pytest.approx(2 * megabytes, rel=1e-4)
    assert [row["way"] for row in rows][-1].startswith("shard=True")
    assert [row["fits"] for row in rows] == [False, True, True, True]
    assert not (tmp_path / "checkpoints").exists()


def test_a_plan_of_a_script_that_sets_nothing_up_is_refused(tmp_path: Path) -> None:
    done = plan(tmp_path, "print(1)")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        "paceline: the script ended before the first forward pass of a model"
    )
    done = plan(tmp_path, "print(1)", "--memory", "much")
    assert (done.returncode, done.stderr) == (
        2,
        "paceline: --memory=much: it is not an amount of memory such as 24G or 512M\n",
    )
