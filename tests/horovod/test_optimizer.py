"""DistributedOptimizer, and what gives all ranks the same parameters and states."""

from __future__ import annotations

import warnings

import pytest

from tests.late import hvd, torch
from tests.train.launching import launch

from .ranks import started


def net() -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def by_hand(steps: int, size: int, passes: int = 1) -> list[torch.Tensor]:
    """The parameters after some steps with the mean of the gradients of all ranks."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(passes):
            for rank in range(size):
                (model(batch(rank, step * passes + part)).square().sum() / size).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def check(model: torch.nn.Module, expected: list[torch.Tensor], tolerance: float = 1e-6) -> None:
    for own, other in zip(model.parameters(), expected, strict=True):
        assert torch.allclose(own, other, atol=tolerance), (own, other)


def train_in_all_ways() -> None:
    rank, size = started()
    expected = by_hand(4, size)
    ways = [
        {},
        {"compression": hvd.Compression.fp16},
        {"gradient_predivide_factor": 2.0},
        {"groups": 2},
        {"groups": "lists"},
        {"op": hvd.Sum},
    ]
    for way in ways:
        model = net()
        options = dict(way)
        if way.get("groups") == "lists":
            options["groups"] = [list(model[0].parameters())]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **options)
        assert isinstance(optimizer, torch.optim.SGD)
        for step in range(4):
            optimizer.zero_grad()
            loss = model(batch(rank, step)).square().sum()
            (loss / size if way.get("op") == hvd.Sum else loss).backward()
            with pytest.raises(AssertionError, match="zero_grad"):
                optimizer.zero_grad()
            optimizer.step()
        check(model, expected, 5e-3 if "compression" in way else 1e-5)

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=2
    )
    for step in range(3):
        optimizer.zero_grad()
        for part in range(2):
            model(batch(rank, step * 2 + part)).square().sum().backward()
        optimizer.step()
    check(model, by_hand(3, size, 2), 1e-5)
    with pytest.raises(AssertionError, match="more than backward_passes_per_step"):
        for _ in range(3):
            model(batch(rank, 0)).square().sum().backward()
    optimizer.synchronize()

    # Clipped between synchronize and step; two optimizers with a model of two parts.
    model = net()
    halves = [
        hvd.DistributedOptimizer(
            torch.optim.Adam(part.parameters(), lr=0.1),
            named_parameters=[(f"part{number}.{name}", p) for name, p in part.named_parameters()],
        )
        for number, part in enumerate((model[0], model[2]))
    ]
    model(batch(rank, 0)).square().sum().backward()
    for half in halves:
        half.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    norms = hvd.allgather_object([float(p.grad.norm()) for p in model.parameters()])
    assert norms[0] == norms[-1]
    for half in halves:
        with half.skip_synchronize(), warnings.catch_warnings():
            warnings.simplefilter("error")
            half.step()
    weights = hvd.allgather_object([p.tolist() for p in model.parameters()])
    assert weights[0] == weights[-1]
    halves[0].zero_grad()
    model(batch(rank, 0)).square().sum().backward()
    for half in halves:
        half.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        for half in halves:
            half.step()

    # A rank whose batch does not use a parameter.
    left, right = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([left, right], lr=1.0), [("left", left), ("right", right)])
    ((left if rank == 0 else right) * 2).sum().backward()
    optimizer.step()
    assert (left.tolist(), right.tolist()) == ([1 - 2 / size] * 2, [1 - 2 * (size - 1) / size] * 2)

    # Sparse gradients.
    for as_dense in (False, True):
        embedding = torch.nn.Embedding(4, 2, sparse=True)
        torch.nn.init.ones_(embedding.weight)
        plain = torch.optim.SGD(embedding.parameters(), lr=1.0)
        optimizer = hvd.DistributedOptimizer(plain, embedding.named_parameters(), sparse_as_dense=as_dense)
        embedding(torch.tensor([rank, 3])).sum().backward()
        optimizer.step()
        lost = [1 / size if row < size else 1.0 if row == 3 else 0.0 for row in range(4)]
        assert torch.allclose(embedding.weight, (1 - torch.tensor(lost)).unsqueeze(1).expand(4, 2))

    # Adasum: parallel steps are averaged.
    weight = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.5), [("weight", weight)], op=hvd.Adasum)
    (weight * torch.tensor([1.0, 2.0])).sum().backward()
    optimizer.step()
    assert weight.tolist() == [0.5, 0.0]


def test_training_is_that_with_the_mean_gradients_in_all_ways() -> None:
    launch(train_in_all_ways, nproc=2)


def names_are_checked() -> None:
    started()
    model = net()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    named = list(model.named_parameters())
    for wrong, text in (
        ([parameter for _, parameter in named], "sequence of tuples"),
        ([("same", parameter) for _, parameter in named], "must be unique. Found duplicates: same"),
        (named[:-1], "were not named"),
    ):
        with pytest.raises(ValueError, match=text):
            hvd.DistributedOptimizer(plain, named_parameters=wrong)
    with pytest.raises(ValueError, match="gradient_predivide_factor"):
        hvd.DistributedOptimizer(plain, named, gradient_predivide_factor=2.0, op=hvd.Sum)
    with pytest.raises(ValueError, match="groups"):
        hvd.DistributedOptimizer(plain, named, groups=-1)
    with pytest.raises(ValueError, match="only appear once"):
        hvd.DistributedOptimizer(plain, named, groups=[[named[0][1]], [named[0][1]]])


def test_names_and_groups_are_checked() -> None:
    launch(names_are_checked, nproc=2)


def states_are_given_to_all() -> None:
    rank, size = started()
    model = net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(rank)
    for params in (model.state_dict(), list(model.named_parameters()), list(model.parameters())):
        hvd.broadcast_parameters(params, root_rank=1)
        assert all(map(torch.equal, [p.data for p in model.parameters()], [p.data + 1 for p in net().parameters()]))
    with pytest.raises(ValueError, match="invalid params"):
        hvd.broadcast_parameters(3, root_rank=0)
    for kind, options in (
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (torch.optim.Adam, {"lr": 0.1, "betas": (0.5, 0.6)}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.Adagrad, {}),
        (torch.optim.RMSprop, {"centered": True}),
        (torch.optim.Rprop, {}),
        (torch.optim.LBFGS, {}),
    ):
        for has_state in (False, True):
            optimizer = kind(model.parameters(), **options)
            if has_state and rank == 0:
                model(batch(0, 0)).square().sum().backward()
                optimizer.step(lambda model=model: model(batch(0, 0)).square().sum())
            optimizer.param_groups[0]["lr"] = 0.01 * (rank + 1)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            assert optimizer.param_groups[0]["lr"] == 0.01
            states = hvd.allgather_object(repr(optimizer.state_dict()))
            assert states[0] == states[-1]
            if options.get("betas"):
                assert optimizer.param_groups[0]["betas"] == (0.5, 0.6)
    narrow = torch.nn.Linear(2, 2).bfloat16()
    optimizer = torch.optim.SGD(narrow.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)  # it has the groups of this optimizer
    distributed = hvd.DistributedOptimizer(optimizer, named_parameters=narrow.named_parameters())
    if rank == 0:
        distributed.state[narrow.weight]["wide"] = torch.full((2, 2), 1.001)
    hvd.broadcast_optimizer_state(distributed, root_rank=0)
    assert torch.equal(distributed.state[narrow.weight]["wide"], torch.full((2, 2), 1.001))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no step before the scheduler's
        scheduler.step()
    assert distributed.param_groups[0]["lr"] == 0.05
    assert hvd.broadcast_object({"rank": rank}, root_rank=1) == {"rank": 1}
    assert hvd.allgather_object("x" * rank) == ["x" * other for other in range(size)]


def test_parameters_states_and_objects_are_given_to_all() -> None:
    launch(states_are_given_to_all, nproc=2)


def batch_norm() -> None:
    rank, size = started()
    sizes = [3 + other for other in range(size)]
    torch.manual_seed(0)
    data = torch.randn(sum(sizes), 4, 2)
    whole, own = torch.nn.BatchNorm1d(4), hvd.SyncBatchNorm(4)
    everything = data.clone().requires_grad_()
    whole(everything).pow(3).sum().backward()
    part = data.split(sizes)[rank].clone().requires_grad_()
    own(part).pow(3).sum().backward()
    assert part.grad is not None
    assert everything.grad is not None
    assert torch.allclose(part.grad, everything.grad.split(sizes)[rank], atol=1e-4)
    assert torch.allclose(own.running_mean, whole.running_mean, atol=1e-6)
    assert torch.allclose(own.running_var, whole.running_var, atol=1e-6)
    own.eval()
    whole.eval()
    assert torch.allclose(own(data), whole(data), atol=1e-5)
    assert own.train()(data.bfloat16()).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="at least 2D"):
        own(torch.ones(3))


def test_batches_are_normalised_over_all_ranks() -> None:
    launch(batch_norm, nproc=2)


def elastic() -> None:
    rank, size = started()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = hvd.elastic.ElasticSampler(range(10), shuffle=False)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, batch=0, epoch=rank)
    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])
    calls: list[int] = []

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> str:
        calls.append(state.batch)
        if len(calls) == 1:
            assert state.epoch == 0  # rank 0's
            state.batch = 5
            state.sampler.record_batch(0, 2)
            state.commit()
            state.batch = 7
            with torch.no_grad():
                model[0].weight.zero_()
            hvd.allreduce(torch.ones(1 + rank), name="fails")
        assert model[0].weight.abs().sum() > 0
        assert len(state.sampler) == (10 - 2 * size) / size
        if len(calls) == 2:
            state.batch = 6
            if rank == 0:
                state.on_hosts_updated(1.0, 1)
            state.commit()
        return "done"

    assert train(state) == "done"
    assert calls == [0, 5, 6]
    assert resets == [size, size]


def test_a_failure_goes_back_to_the_last_commit_and_an_interrupt_does_not() -> None:
    launch(elastic, nproc=2)
