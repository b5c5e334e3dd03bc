"""DistributedOptimizer with all its arguments and models, and all optimizers of torch."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest

from tests.late import hvd, torch
from tests.train.launching import launch

from .ranks import started
from .test_optimizer import batch, check, net


def mean_of(ranks: list[int], steps: int, passes: int = 1, clip: float | None = None) -> list[torch.Tensor]:
    """The parameters after some steps with the mean of the gradients of some ranks."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for part, rank in itertools.product(range(passes), ranks):
            (model(batch(rank, step * passes + part)).square().sum() / len(ranks)).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def wrapped(model: torch.nn.Module, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **options)


def every_argument() -> None:
    rank, size = started()
    everyone = list(range(size))
    pairs = [hvd.add_process_set([0, 1]), hvd.add_process_set([2, 3])]
    mine, other = pairs if rank < 2 else reversed(pairs)
    assert mine.included()
    assert not other.included()
    ours = mean_of(list(mine.ranks or ()), 3)
    all_ = mean_of(everyone, 3)
    for where, passes, groups, predivide, compression in itertools.product(
        (hvd.global_process_set, mine), (1, 2), (None, 1, 3, 100, "lists"), (1.0, 4.0), ("none", "fp16")
    ):
        if (passes, groups, predivide, compression) != (1, None, 1.0, "none") and sum(
            [passes == 2, groups is not None, predivide != 1.0, compression == "fp16"]
        ) not in (1, 4):
            continue  # each alone, and all together
        model = net()
        lists = [[model[0].weight, model[2].bias], [model[0].bias]]
        optimizer = wrapped(
            model, process_set=where, backward_passes_per_step=passes, groups=lists if groups == "lists" else groups,
            gradient_predivide_factor=predivide, compression=getattr(hvd.Compression, compression),
        )  # fmt: skip
        for step in range(3):
            for _ in range(passes):
                (model(batch(rank, step)).square().sum() / passes).backward()
            optimizer.step()
            optimizer.zero_grad()
        check(model, all_ if where is hvd.global_process_set else ours, 1e-2 if compression == "fp16" else 1e-5)
    # Sum in a process set; clipping between synchronize and step; set_backward_passes_per_step.
    model = net()
    optimizer = wrapped(model, op=hvd.Sum, process_set=mine)
    for step in range(3):
        (model(batch(rank, step)).square().sum() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    check(model, ours, 1e-5)
    model = net()
    optimizer = wrapped(model, backward_passes_per_step=4)
    optimizer.set_backward_passes_per_step(2)
    for step in range(3):
        for part in range(2):
            model(batch(rank, 2 * step + part)).square().sum().backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        with optimizer.skip_synchronize(), warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()
        optimizer.zero_grad()
    check(model, mean_of(everyone, 3, passes=2, clip=0.3), 1e-5)
    model = net()
    optimizer = wrapped(model, process_set=other)  # a rank that is not in it steps on its own
    model(batch(rank, 0)).square().sum().backward()
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    check(model, mean_of([rank], 1))
    with pytest.raises(NotImplementedError, match="Adasum"):
        wrapped(net(), process_set=mine, op=hvd.Adasum)
    with pytest.raises(ValueError, match="not registered"):
        wrapped(net(), process_set=hvd.ProcessSet([0, 1, 2]))
    for wrong, text in (
        (2.5, "groups"),
        ("two", "groups"),
        ([1, 2], "groups"),
        ([[1]], "groups must consist"),
        (-1, "groups"),
    ):
        with pytest.raises(ValueError, match=text):
            wrapped(net(), groups=wrong)
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="backward_passes_per_step"):
            wrapped(net(), backward_passes_per_step=wrong)
    with pytest.raises(ValueError, match="gradient_predivide_factor"):
        wrapped(net(), op=hvd.Sum, gradient_predivide_factor=2.0)
    for op in (hvd.Min, hvd.Max, hvd.Product, 9):
        with pytest.raises(ValueError, match="op"):
            wrapped(net(), op=op)
    with pytest.warns(DeprecationWarning, match="num_groups"):
        wrapped(net(), num_groups=2)


def test_every_argument_of_the_optimizer() -> None:
    launch(every_argument, nproc=4)


def models() -> None:

    class Branches(torch.nn.Module):
        """Ranks may go different ways through it."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.ways = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(3))
            self.frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)

        def forward(self, x: torch.Tensor, way: int) -> torch.Tensor:
            return self.ways[way](x) * self.frozen  # type: ignore[no-any-return]

    rank, size = started()
    x = torch.ones(3, 2)

    def same_everywhere(model: torch.nn.Module) -> None:
        everywhere = hvd.allgather_object([p.detach().tolist() for p in model.parameters()])
        assert all(one == everywhere[0] for one in everywhere)

    # Parameters that get no gradient on some ranks, or on any; with groups and without.
    for groups in (None, 2, "lists"):
        model = Branches()
        lists = [list(model.ways[0].parameters()), list(model.ways[1].parameters()), [model.frozen]]
        optimizer = wrapped(model, groups=lists if groups == "lists" else groups)
        before = model.ways[2].weight.detach().clone()
        for _ in range(2):
            optimizer.zero_grad()
            model(x, rank).sum().backward()
            optimizer.step()
        same_everywhere(model)
        assert torch.equal(model.ways[2].weight, before)
        assert not torch.equal(model.ways[1].weight, Branches().ways[1].weight)
        assert model.frozen.grad is None
    # requires_grad that changes: two networks that are trained in turn.
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    for part in (first, second):
        hvd.broadcast_parameters(part.state_dict(), root_rank=0)
    optimizers = [wrapped(part) for part in (first, second)]
    for step in range(4):
        for number, part in enumerate((first, second)):
            part.requires_grad_(step % 2 == number)
        for optimizer in optimizers:
            optimizer.zero_grad()
        kept = [p.detach().clone() for p in (first, second)[1 - step % 2].parameters()]
        second(first(x * (rank + 1))).sum().backward()
        optimizers[step % 2].step()
        assert all(map(torch.equal, kept, (first, second)[1 - step % 2].parameters()))
        same_everywhere(first)
        same_everywhere(second)
    # A group of parameters that is added after wrapping; it is named by its place.
    model = net()
    later = torch.nn.Parameter(torch.zeros(2))
    optimizer = wrapped(model)
    optimizer.add_param_group({"params": [later], "lr": 1.0})
    (model(batch(rank, 0)).sum() + (later * rank).sum()).backward()
    optimizer.step()
    assert later.tolist() == [-sum(range(size)) / size] * 2
    # Shared parameters, several backward passes through one optimizer, closures, schedulers, scalers.
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight = model[0].weight
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = wrapped(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model(x * rank).sum().backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    same_everywhere(model)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x * rank).square().sum()
        loss.backward()
        return loss

    model(x).sum().backward()
    assert optimizer.step(lambda: torch.tensor(5.0)).item() == 5.0
    same_everywhere(model)
    # Gradients that are there before the optimizer is wrapped belong to no step of it.
    model = net()
    model(batch(rank, 7)).sum().backward()
    optimizer = wrapped(model)
    optimizer.zero_grad()
    model(batch(rank, 0)).square().sum().backward()
    optimizer.step()
    check(model, mean_of(list(range(size)), 1), 1e-5)
    # Gradients are zero from the beginning, where there are any.
    model = Branches()
    optimizer = wrapped(model)
    for parameter in model.parameters():
        assert (parameter.grad is not None) == parameter.requires_grad
    assert hvd.allreduce(model.ways[0].weight.grad, op=hvd.Max).abs().sum() == 0
    # A step without backward, and a state that is loaded in the middle.
    model = net()
    optimizer = wrapped(model)
    optimizer.step()
    check(model, [p.detach() for p in net().parameters()])
    model(batch(rank, 0)).sum().backward()
    optimizer.synchronize()
    optimizer.load_state_dict(optimizer.state_dict())
    model(batch(rank, 0)).sum().backward()
    optimizer.step()
    same_everywhere(model)
    # The class, its state and its representation are those of the optimizer.
    plain = torch.optim.AdamW(model.parameters(), lr=0.3)
    optimizer = hvd.DistributedOptimizer(plain)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert type(optimizer).__name__ == "AdamW"
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.3
    assert repr(optimizer) == repr(plain)
    # Without names, several optimizers are told apart.
    left, right = torch.nn.Linear(2, 1), torch.nn.Linear(3, 1)
    for part in (left, right):
        hvd.broadcast_parameters(part.state_dict(), root_rank=0)
    pair = [hvd.DistributedOptimizer(torch.optim.SGD(part.parameters(), lr=0.1)) for part in (left, right)]
    (left(torch.ones(1, 2) * rank).sum() + right(torch.ones(1, 3) * rank).sum()).backward()
    for optimizer in pair:
        optimizer.step()
    same_everywhere(left)
    same_everywhere(right)
    # Sparse gradients: with one optimizer for them, as dense ones, in a process set, accumulated.
    mine = hvd.add_process_set([1])
    for options in (
        {}, {"sparse_as_dense": True}, {"op": hvd.Sum}, {"groups": 1}, {"backward_passes_per_step": 2},
        {"compression": hvd.Compression.fp16},
    ):  # fmt: skip
        embedding = torch.nn.Embedding(5, 2, sparse=True)
        torch.nn.init.ones_(embedding.weight)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(embedding.parameters(), lr=1.0), embedding.named_parameters(), **options
        )
        optimizer.zero_grad()
        for _ in range(options.get("backward_passes_per_step", 1)):
            embedding(torch.tensor([rank, 4, 4])).sum().backward()
        optimizer.step()
        factor = options.get("backward_passes_per_step", 1) * (size if options.get("op") == hvd.Sum else 1)
        lost = torch.tensor([1 / size, 1 / size, 0.0, 0.0, 2.0]) * factor
        torch.testing.assert_close(embedding.weight.detach()[:, 0], 1 - lost)
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    hvd.broadcast_parameters(embedding.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SparseAdam(embedding.parameters()), embedding.named_parameters())
    for _ in range(2):
        optimizer.zero_grad()
        embedding(torch.tensor([rank, 4])).sum().backward()
        optimizer.step()
    same_everywhere(embedding)
    if mine.included():
        model = net()
        optimizer = wrapped(model, process_set=mine)
        model(batch(rank, 0)).square().sum().backward()
        optimizer.step()
        check(model, mean_of([1], 1), 1e-6)


def test_models_and_gradients_of_all_kinds() -> None:
    launch(models, nproc=2)


def all_optimizers() -> None:
    rank, _ = started()
    kinds = [
        kind for name, kind in sorted(vars(torch.optim).items())
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    ]  # fmt: skip
    assert len(kinds) >= 12
    for kind, has_state, is_distributed in itertools.product(kinds, (False, True), (False, True)):
        torch.manual_seed(rank)
        is_sparse = kind is torch.optim.SparseAdam
        if kind.__name__ == "Muon":  # for matrices alone
            model: torch.nn.Module = torch.nn.Linear(3, 2, bias=False)
        else:
            model = torch.nn.Embedding(4, 2, sparse=True) if is_sparse else torch.nn.Linear(3, 2)
        inputs = torch.tensor([0, 1, 2, 3]) if is_sparse else torch.ones(2, 3)

        def loss(model: torch.nn.Module = model, inputs: torch.Tensor = inputs) -> torch.Tensor:
            return model(inputs).square().sum()  # type: ignore[no-any-return]

        optimizer = kind(model.parameters(), lr=0.01 * (rank + 1))
        if has_state and rank == 0:
            loss().backward()
            optimizer.step(loss)
            optimizer.zero_grad()
        if is_distributed and kind is not torch.optim.LBFGS:
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        states = hvd.allgather_object(repr(optimizer.state_dict()))
        assert states[0] == states[1], kind
        assert optimizer.param_groups[0]["lr"] == 0.01, kind
        optimizer.zero_grad()
        if kind is torch.optim.LBFGS:
            continue
        loss().backward()
        optimizer.step()
        weights = hvd.allgather_object([p.tolist() for p in model.parameters()])
        assert weights[0] == weights[1], kind
    # Another root, and options of any type.
    optimizer = torch.optim.AdamW(
        [torch.nn.Parameter(torch.ones(1))], lr=torch.tensor(0.1 + rank), betas=(0.1, 0.2 + rank / 2)
    )
    optimizer.param_groups[0]["note"] = {"rank": rank, "none": None}
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    group = optimizer.param_groups[0]
    assert (group["betas"], group["note"]) == ((0.1, 0.7), {"rank": 1, "none": None})
    assert float(group["lr"]) == pytest.approx(1.1)


def test_the_state_of_all_optimizers_is_broadcast() -> None:
    launch(all_optimizers, nproc=2)
