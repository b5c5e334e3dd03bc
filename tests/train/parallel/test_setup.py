"""What `Run.setup` makes of models and optimizers trains as one process would."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.train.launching import launch, launch_each  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

import paceline  # noqa: E402

pytestmark = pytest.mark.torch


def build() -> Any:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))


def data(size: int) -> Any:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(size, 3, generator=generator), torch.randn(size, 1, generator=generator))


def by_hand(size: int, batch: int, accumulate: int, epochs: int, clip: float) -> list[float]:
    """One process without the library: a step for the mean over the samples of `accumulate` batches."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = data(size).tensors
    for _ in range(epochs):
        for first in range(0, size, batch * accumulate):
            window = slice(first, first + batch * accumulate)
            (model(x[window]) - y[window]).pow(2).mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return [value for p in model.parameters() for value in p.flatten().tolist()]


def with_the_library(size: int, batch: int, accumulate: int, epochs: int, clip: float) -> tuple[list[float], int]:
    with paceline.init() as run:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer = run.setup(model, optimizer, strategy=paceline.Strategy(accumulate=accumulate))
        train = run.dataloader(data(size), global_batch_size=batch)
        steps = 0
        for _ in run.epochs(epochs):
            for x, y in train:
                run.backward((model(x) - y).pow(2).mean())
                run.clip_grad_norm(clip)
                steps += not run.accumulating
                optimizer.step()
                optimizer.zero_grad()
        return [value for p in model.parameters() for value in p.flatten().tolist()], steps


@pytest.mark.parametrize(
    ("nproc", "size", "batch", "accumulate"), [(1, 17, 4, 3), (2, 17, 4, 1), (3, 17, 4, 3), (3, 9, 8, 2), (2, 24, 4, 4)]
)
def test_gradients_are_the_mean_over_samples(nproc: int, size: int, batch: int, accumulate: int) -> None:
    """Whatever is left over: ranks without a sample, an epoch that ends within an accumulation."""
    expected = by_hand(size, batch, accumulate, 2, 0.5)
    for weights, steps in launch(with_the_library, (size, batch, accumulate, 2, 0.5), nproc):
        assert weights == pytest.approx(expected, abs=1e-6)
        assert steps == 2 * -(-size // (batch * accumulate))


class Endless(torch.utils.data.IterableDataset[Any]):
    """The samples of `data`, of unknown length."""

    def __init__(self, size: int) -> None:
        self.data = data(size)

    def __iter__(self) -> Any:
        return iter(self.data)


BATCHES = [3, 1, 4, 1, 5, 2, 6]  # sizes of a user's own batches


def batch_indices() -> list[list[int]]:
    ends = [sum(BATCHES[: i + 1]) for i in range(len(BATCHES))]
    return [list(range(end - size, end)) for end, size in zip(ends, BATCHES, strict=True)]


class OwnBatches:
    """A batch sampler without a length."""

    def __iter__(self) -> Any:
        return iter(batch_indices())


def of_unknown_length(kind: str, accumulate: int, workers: int, folder: str | None = None) -> tuple[list[float], int]:
    with paceline.init(checkpoint_dir=folder, checkpoint_every=2 if folder else None) as run:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer = run.setup(model, optimizer, strategy=paceline.Strategy(accumulate=accumulate))
        if kind == "batches":
            train = run.dataloader(data(sum(BATCHES)), batch_sampler=OwnBatches(), num_workers=workers)
        else:
            options = {"global_batch_size": 4, "drop_last": kind == "drop_last", "num_workers": workers}
            train = run.dataloader(Endless(sum(BATCHES)), **options)
        steps = 0
        for _ in run.epochs(2):
            for x, y in train:
                run.backward((model(x) - y).pow(2).mean())
                steps += not run.accumulating
                optimizer.step()
                optimizer.zero_grad()
        return [value for p in model.parameters() for value in p.flatten().tolist()], steps


@pytest.mark.parametrize(
    ("kind", "accumulate", "nproc", "workers"),
    [("stream", 4, 1, 0), ("stream", 3, 3, 0), ("drop_last", 2, 2, 2), ("batches", 2, 2, 2), ("batches", 3, 3, 0)],
)
def test_accumulation_over_an_epoch_of_unknown_length(
    kind: str, accumulate: int, nproc: int, workers: int, tmp_path: Path
) -> None:
    """Every window is a step for the mean over its samples, the last, partial one too, and the last state is saved."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = data(sum(BATCHES)).tensors
    sizes = [4] * 5 + ([2] if kind == "stream" else [])
    if kind == "batches":
        sizes = BATCHES
    for _ in range(2):
        for first in range(0, len(sizes), accumulate):
            start = sum(sizes[:first])
            window = slice(start, start + sum(sizes[first : first + accumulate]))
            (model(x[window]) - y[window]).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    expected = [value for p in model.parameters() for value in p.flatten().tolist()]
    args = (kind, accumulate, workers, str(tmp_path))
    for weights, steps in launch(of_unknown_length, args, nproc):
        assert weights == pytest.approx(expected, abs=1e-6)
        assert steps == 2 * -(-len(sizes) // accumulate)
    for weights, steps in launch(of_unknown_length, args, nproc):
        assert (weights, steps) == (pytest.approx(expected, abs=1e-6), 0), "resumed after the last step"


def accumulated_by_hand(accumulate: int) -> list[float]:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    samples = data(16)
    for first in range(0, 16, 4):
        x, y = (tensor[first : first + 4] for tensor in samples.tensors)
        ((model(x) - y).pow(2).mean() * (1 / accumulate)).backward()
        if (first // 4 + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return [value for p in model.parameters() for value in p.flatten().tolist()]


def accumulated(stream: bool) -> list[float]:
    with paceline.init() as run:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer = run.setup(model, optimizer, strategy=paceline.Strategy(accumulate=2))
        for x, y in run.dataloader(Endless(16) if stream else data(16), batch_size=4):
            run.backward((model(x) - y).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
        return [value for p in model.parameters() for value in p.flatten().tolist()]


def test_accumulation_over_equal_batches_is_that_by_hand_to_the_bit() -> None:
    assert launch_each(accumulated, [(True,), (False,)]) == [[accumulated_by_hand(2)]] * 2


def with_common_parameters() -> None:
    """Two models have one trunk, and their optimizers one scale that is in no model."""

    def build_both() -> tuple[Any, Any]:
        trunk = build()
        models = [torch.nn.Sequential(trunk, torch.nn.Linear(1, 1)) for _ in range(2)]
        return models, torch.nn.Parameter(torch.tensor(2.0))

    def loss_of(models: Any, scale: Any, x: Any, y: Any) -> Any:
        return sum((scale * model(x) - y).pow(2).mean() for model in models)

    def gradients(models: Any, scale: Any) -> Any:
        every = dict.fromkeys([*models[0].parameters(), *models[1].parameters(), scale])
        return torch.cat([p.grad.flatten() for p in every])

    mine, my_scale = build_both()
    with paceline.init() as run:
        models, scale = build_both()
        optimizers = [torch.optim.SGD([*model.parameters(), scale], 0.1) for model in models]
        options = {"strategy": paceline.Strategy(accumulate=2)}
        *wrapped, _, _ = run.setup(*models, *optimizers, **options)
        for number, (x, y) in enumerate(run.dataloader(data(8), batch_size=4)):
            weight = 1 + 2 * number
            (loss_of(mine, my_scale, x, y) * weight / 4).backward()
            run.backward(loss_of(wrapped, scale, x, y), weight=weight)
        torch.testing.assert_close(gradients(models, scale), gradients(mine, my_scale))
        every = dict.fromkeys([*mine[0].parameters(), *mine[1].parameters(), my_scale])
        norm = torch.nn.utils.clip_grad_norm_(every, 0.1)
        torch.testing.assert_close(run.clip_grad_norm(0.1), norm)
        torch.testing.assert_close(gradients(models, scale), gradients(mine, my_scale))


def test_parameters_that_models_share_are_scaled_once() -> None:
    launch(with_common_parameters)


def scheduled(when: str, lr_scaling: str) -> tuple[list[float], list[float]]:
    with paceline.init() as run:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        make = functools.partial(torch.optim.lr_scheduler.StepLR, optimizer, step_size=1, gamma=0.5)
        scheduler = make() if when == "before" else None
        strategy = paceline.Strategy(accumulate=2, lr_scaling=lr_scaling)  # type: ignore[arg-type]
        model, optimizer = run.setup(model, optimizer, strategy=strategy)
        scheduler = scheduler or make()
        rates = []
        for _ in run.epochs(2):
            for x, y in run.dataloader(data(12), global_batch_size=4):
                run.backward((model(x) - y).pow(2).mean())
                optimizer.step()
                optimizer.zero_grad()
            rates.append(scheduler.get_last_lr()[0])
            scheduler.step()
        return [value for p in model.parameters() for value in p.flatten().tolist()], rates


@pytest.mark.filterwarnings("error:Detected call of `lr_scheduler.step")
def test_schedulers_with_accumulation() -> None:
    cases = [("before", "none"), ("after", "none"), ("after", "linear")]
    for (_, lr_scaling), ranks in zip(cases, launch_each(scheduled, cases, 2), strict=True):
        factor = 2 if lr_scaling == "linear" else 1
        expected = scheduled_by_hand(factor)
        for weights, rates in ranks:
            assert weights == pytest.approx(expected, abs=1e-6)
            assert rates == [0.1 * factor, 0.05 * factor]


def scheduled_by_hand(factor: int) -> list[float]:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), 0.1 * factor)
    x, y = data(12).tensors
    for _ in range(2):
        for window in (slice(0, 8), slice(8, 12)):
            (model(x[window]) - y[window]).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] *= 0.5
    return [value for p in model.parameters() for value in p.flatten().tolist()]


def state_of_rank_zero() -> tuple[list[float], list[float], float]:
    with paceline.init() as run:
        torch.manual_seed(run.rank)
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        model[1].running_mean += run.rank
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        model(torch.randn(4, 2)).sum().backward()
        optimizer.step()  # fills the momentum, on every rank differently
        model, optimizer = run.setup(model, optimizer)
        momentum = [v for state in optimizer.state.values() for v in state["momentum_buffer"].flatten().tolist()]
        return (
            [v for p in model.parameters() for v in p.flatten().tolist()],
            momentum,
            float(model.module[1].running_mean[0]),
        )


def test_all_start_with_what_rank_zero_has() -> None:
    first, *others = launch(state_of_rank_zero, nproc=3)
    assert others == [first, first]


def uneven_evaluation(training: bool, gradients: bool, compile: bool | str) -> tuple[float, int, int]:
    with paceline.init(timeout=60) as run:
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        model = run.setup(model, strategy=paceline.Strategy(compile=compile))
        train = run.dataloader(data(16), global_batch_size=8)
        test = run.dataloader(data(16), global_batch_size=4, evaluation=True)
        count = batches = steps = 0
        for _ in run.epochs(2):
            for x, y in train:
                run.backward((model(x) - y).pow(2).mean())
                steps += 1
                if steps == 3:  # within a step, too
                    next(iter(test))
            model.train(training)
            with torch.set_grad_enabled(gradients):
                for number, (x, _) in enumerate(test):
                    if number == 3 and run.rank:
                        break  # a script may leave out what it likes
                    count += len(model(x))
                    batches += 1
            model.train()
        return run.all_reduce(count), batches, steps


def test_evaluation_with_buffers_may_be_uneven() -> None:
    cases: list[Any] = [
        (False, False, False), (False, True, False), (True, False, False), (True, True, False), (True, True, "eager"),
    ]  # fmt: skip
    for case, ranks in zip(cases, launch_each(uneven_evaluation, cases, 2), strict=True):
        (count, first, steps), (_, second, _) = ranks
        assert (count, first, second, steps) == (28, 8, 6, 4), case


class Named(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.context = 7

    def forward(self, x: Any) -> Any:
        return self.layer(x)

    def twice(self, x: Any) -> Any:
        return 2 * self(x)


def manners(compile: bool | str) -> tuple[list[str], int, list[int], bool]:
    with paceline.init() as run:
        model = run.setup(Named(), strategy=paceline.Strategy(compile=compile))
        names = sorted(model.state_dict())
        model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})
        loss = model(torch.ones(1, 2)).sum()
        run.backward(loss)
        return names, model.context, list(model.twice(torch.ones(1, 2)).shape), loss.item() == 6.0


@pytest.mark.parametrize(("nproc", "compile"), [(1, "eager"), (2, False), (2, "eager")])
def test_a_model_keeps_its_names_and_methods(nproc: int, compile: bool | str) -> None:
    for seen in launch(manners, (compile,), nproc):
        assert seen == (["layer.bias", "layer.weight"], 7, [1, 2], True)


def refused(thing: Any, options: dict[str, Any]) -> str:
    with paceline.init() as run, pytest.raises((TypeError, ValueError)) as caught:
        run.setup(thing, strategy=paceline.Strategy(**options))
    return str(caught.value)


SCRIPTED = torch.jit.script(torch.nn.Linear(2, 2))
BUFFER = torch.nn.LazyBatchNorm1d(affine=False)


def test_what_cannot_be_set_up() -> None:
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ({"lr": 1}, {}, "setup takes modules and optimizers, not dict"),
        (torch.nn.Sequential(torch.nn.LazyLinear(2)), {}, "0.weight has no shape yet, .*; call the model with a batch"),
        (torch.nn.Sequential(BUFFER), {}, "0.running_mean has no shape yet"),
        (SCRIPTED, {"precision": "bf16"}, "precision='bf16'.* cannot change a model of TorchScript; leave precision"),
        (SCRIPTED, {"compile": "eager"}, "compile='eager'.* cannot change a model of TorchScript"),
        (torch.nn.Sequential(SCRIPTED), {"sync_batchnorm": True}, "sync_batchnorm=True.* cannot change a model of"),
    ]
    for (*_, why), (found,) in zip(cases, launch_each(refused, [case[:2] for case in cases]), strict=True):
        assert re.match(f".*{why}", found)


def with_torchscript(how: str, sync: str) -> list[list[float]]:
    """The weights of a model of TorchScript, and of the same one without."""
    found = []
    for compiles in (True, False):
        model = torch.nn.Sequential(build(), torch.nn.BatchNorm1d(1))
        with paceline.init() as run:
            if compiles and how == "parts":
                model[0] = torch.jit.script(model[0])
            elif compiles:
                model = torch.jit.script(model) if how == "script" else torch.jit.trace(model, torch.zeros(2, 3))
            original = model
            model = run.setup(model, strategy=paceline.Strategy(sync=sync))
            assert run.unwrap(model) is original
            optimizer = run.setup(torch.optim.SGD(model.parameters(), 0.1))
            train = run.dataloader(data(20), global_batch_size=8, drop_last=True)
            for _ in run.epochs(2):
                for x, y in train:
                    run.backward((model.train()(x) - y).pow(2).mean())
                    optimizer.step()
                    optimizer.zero_grad()
            found.append([value for each in model.parameters() for value in each.flatten().tolist()])
    return found


def test_models_of_torchscript() -> None:
    for ranks in launch_each(with_torchscript, [("script", "fp16"), ("trace", "fp16"), ("parts", "fp16")], 2):
        for scripted, plain in ranks:
            assert scripted == pytest.approx(plain)


def half_precision(compile: bool | str) -> tuple[Any, Any, Any]:
    with paceline.init() as run:
        inner = {}
        module = build()
        module[2].register_forward_hook(lambda m, i, o: inner.update(dtype=o.dtype))
        model = run.setup(module, strategy=paceline.Strategy(precision="bf16", compile=compile))
        out = model(torch.randn(4, 3))
        run.backward(out.pow(2).mean())
        return inner["dtype"], out.dtype, next(model.parameters()).grad.dtype


@pytest.mark.parametrize("nproc", [1, 2])
def test_bf16_computes_in_half_precision_and_gives_floats(nproc: int) -> None:
    found = launch_each(half_precision, [(False,), ("eager",)], nproc)
    assert found == [[(torch.bfloat16, torch.float32, torch.float32)] * nproc] * 2


def copies(precision: str) -> list[float]:
    import copy

    with paceline.init() as run:
        model = run.setup(torch.nn.Linear(2, 1), strategy=paceline.Strategy(precision=precision))
        inner = model.module if run.world_size > 1 else model
        average = copy.deepcopy(inner)
        for parameter in average.parameters():
            parameter.data.zero_()
        return average(torch.ones(3, 2)).flatten().tolist()


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_copy_of_a_model_has_weights_of_its_own(nproc: int) -> None:
    assert launch_each(copies, [("bf16",), ("fp32",)], nproc) == [[[0.0, 0.0, 0.0]] * nproc] * 2


def recipe() -> list[float]:
    """Adversaries as most write them: what one has made is used for both losses."""
    with paceline.init() as run:
        torch.manual_seed(3)
        maker, judge = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
        optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (maker, judge)]
        maker, judge, make, judging = run.setup(maker, judge, *optimizers)
        noise = torch.randn(24, 2, generator=torch.Generator().manual_seed(4))
        for (x,) in run.dataloader(TensorDataset(noise), global_batch_size=6):
            made = maker(x)
            run.backward(judge(made.detach()).pow(2).mean())
            judging.step()
            run.backward((judge(made) - 1).pow(2).mean())
            make.step()
            make.zero_grad()
            judging.zero_grad()
        return [v for m in (maker, judge) for p in m.parameters() for v in p.flatten().tolist()]


def test_adversaries_as_most_write_them() -> None:
    (alone,) = launch(recipe)
    for weights in launch(recipe, nproc=2):
        assert weights == pytest.approx(alone, abs=1e-6)


def running_means() -> list[list[float]]:
    with paceline.init(seed=1) as run:
        model = run.setup(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)))
        for x, y in run.dataloader(data(24), global_batch_size=8):
            run.backward((model(x) - y).pow(2).mean())
        return run.gather_objects(model.state_dict()["1.running_mean"].tolist())


def test_after_an_epoch_all_ranks_evaluate_the_same_model() -> None:
    for first, second in launch(running_means, nproc=2):
        assert first == second
