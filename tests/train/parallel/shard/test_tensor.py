"""Layers that ranks compute together train as whole ones do, also where the model is sharded over other ranks too."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

torch = pytest.importorskip("torch")

from tests.train.launching import launch, launch_each  # noqa: E402
from tests.train.parallel.shard.test_shard import whole  # noqa: E402
from torch.nn import functional  # noqa: E402

import paceline  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.torch
Options = dict[str, Any]
WIDTH, CLASSES, SIZE = 16, 12, 14
PLAN = {
    "blocks.*.query": "colwise", "blocks.*.key": "colwise", "blocks.*.value": "colwise", "blocks.*.out": "rowwise",
    "blocks.*.up": "colwise", "blocks.*.down": "rowwise", "head": "colwise_gather_output",
}  # fmt: skip
KINDS: dict[str, tuple[int, Options]] = {
    "together": (2, {"tensor": 2}),
    "and copies": (4, {"tensor": 2}),
    "and sharded": (4, {"tensor": 2, "shard": True, "recompute": True}),
    "accumulated": (4, {"tensor": 2, "shard": True, "accumulate": 2}),
    "four": (4, {"tensor": 4, "shard": True}),
    "by the script": (2, {"by_script": (2, False)}),
    "by the script, and copies": (4, {"by_script": (2, False)}),
    "by the script, and sharded": (4, {"by_script": (2, False), "shard": True, "accumulate": 2}),
    "by the script, both": (4, {"by_script": (2, True)}),
}


class Block(torch.nn.Module):
    """Attention with as many heads as this rank has of the query, and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.query, self.key = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.value, self.out = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = torch.nn.Dropout(0.1)

    def forward(self, x: Any) -> Any:
        y = self.first(x)
        heads = (layer(y).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        seen = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.dropout(self.out(seen.transpose(1, 2).flatten(2)))
        return x + self.down(functional.gelu(self.up(self.second(x))))


class Net(torch.nn.Module):
    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(classes, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.head = torch.nn.Linear(WIDTH, classes)

    def forward(self, x: Any) -> Any:
        y = self.embedding(x)
        for block in self.blocks:
            y = block(y)
        return self.head(y)[:, -1]


class Planned(Net):
    _tp_plan: ClassVar = {
        name: {"colwise_gather_output": "colwise_rep"}.get(style, style) for name, style in PLAN.items()
    }


def samples() -> list[tuple[Any, int]]:
    drawn = torch.randint(CLASSES, (SIZE, 5), generator=torch.Generator().manual_seed(2))
    return [(x, int(y)) for x, y in zip(drawn, drawn[:, 0], strict=True)]


def divide(model: Net, size: int, shards: bool) -> None:
    """Divide a model as a script for torch does, over a mesh of groups of ranks that have the same data."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    for parameter in model.parameters():  # as if ranks had drawn their own, where they do not have parts of the same
        parameter.data += 0.01 * (rank % size if shards else rank)
    mesh = torch.distributed.init_device_mesh("cpu", (ranks // size, size), mesh_dim_names=("data", "layers"))
    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel, "colwise_gather_output": gathers}
    parallelize_module(model, mesh["layers"], {name: styles[style]() for name, style in PLAN.items()})
    if shards:
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh["data"])


def gathers() -> Any:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel

    return ColwiseParallel(output_layouts=Replicate())


def trained(
    options: Options, folder: Path | None = None, epochs: int = 2, dropout: bool = False, scales: bool = False
) -> Any:
    """Train; returns the whole states at the start and the end, and losses and norms."""
    options = dict(options)
    by_script = options.pop("by_script", None)
    with paceline.init(seed=4, checkpoint_dir=folder, checkpoint_every=None if folder is None else 3) as run:
        with run.build() if by_script is None else contextlib.nullcontext():
            model: Any = (Planned if options.pop("own", False) else Net)()
        if by_script is not None:
            divide(model, *by_script)
        plan = PLAN if options.get("tensor", 1) > 1 and not isinstance(model, Planned) else None
        optimizer: Any = torch.optim.AdamW(model.parameters(), 0.01)
        model = run.setup(model, strategy=paceline.Strategy(**options, plan=plan))
        own = paceline.Strategy(accumulate=options.get("accumulate", 1), lr_scaling="linear") if scales else None
        optimizer = run.setup(optimizer, strategy=own)
        loader = run.dataloader(samples(), global_batch_size=4, shuffle=True)
        test = run.dataloader(samples()[:5], batch_size=2, evaluation=True)
        first, seen = None, []
        for _ in run.epochs(epochs):
            if first is None:
                first = whole(model.state_dict()), whole(optimizer.state_dict()["state"])
            model.train(dropout)
            for x, y in loader:
                run.backward(functional.cross_entropy(model(x), y))
                norm = run.clip_grad_norm(0.5)
                if not run.accumulating:
                    seen.append(float(norm))
                optimizer.step()
                optimizer.zero_grad()
            model.eval()
            right = sum(float(functional.cross_entropy(model(x), y, reduction="sum").detach()) for x, y in test)
            seen.append(run.mean(right, sum(len(y) for _, y in test)))
        return first, (whole(model.state_dict()), whole(optimizer.state_dict()["state"])), seen


def test_layers_that_ranks_compute_together_train_as_whole_ones_do() -> None:
    expected = {every: trained({"accumulate": every}) for every in (1, 2)}
    for nproc in (2, 4):
        cases = {kind: options for kind, (ranks, options) in KINDS.items() if ranks == nproc}
        for kind, ranks in zip(cases, launch_each(trained, [(each,) for each in cases.values()], nproc), strict=True):
            _, (state, _), losses = expected[cases[kind].get("accumulate", 1)]
            for _, (model, _), seen in ranks:
                assert seen == pytest.approx(losses, rel=2e-5), kind
                torch.testing.assert_close(dict(model), dict(state), rtol=0, atol=5e-5, msg=kind)


def test_an_optimizer_has_a_strategy_of_its_own() -> None:
    _, _, expected = trained({})
    for _, _, seen in launch(trained, ({"tensor": 2}, None, 2, False, True), 2):
        assert seen == pytest.approx(expected, rel=2e-5), "the rank of the data is one, so rates are not scaled"


def test_the_plan_of_the_model_is_taken_and_random_numbers_are_the_same() -> None:
    _, _, expected = trained({}, dropout=True)
    for _, _, seen in launch(trained, ({"tensor": 2, "own": True}, None, 2, True), 2):
        assert seen == pytest.approx(expected, rel=2e-5)


def test_a_checkpoint_is_equal_to_the_bit_however_layers_are_divided(tmp_path: Path) -> None:
    starts: list[tuple[int, Options]] = [
        (4, {"tensor": 2, "shard": True}), (1, {}), (2, {"tensor": 2}), (2, {"shard": True}), (4, {"tensor": 4}),
        (4, {"by_script": (2, True)}), (2, {"by_script": (2, False)}),
    ]  # fmt: skip
    last = None
    for epochs, (nproc, options) in enumerate(starts, 1):
        for first, end, _ in launch(trained, (options, tmp_path, epochs), nproc):
            if last is not None:
                torch.testing.assert_close(first, last, rtol=0, atol=0)
            now = end
        last = now


# -- what cannot be done -----------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Options, str]] = {
    "none": ({"tensor": 2}, "Net has no plan of its own, so tensor=2 needs one, as in plan="),
    "name": (
        {"tensor": 2, "plan": {"blocks.*.side": "colwise"}},
        "plan: Net has no layer 'blocks.*.side'; its modules",
    ),
    "style": (
        {"tensor": 2, "plan": {"head": "diagonal"}},
        "plan: head has the style 'diagonal', which is none of colw",
    ),
    "kind": (
        {"tensor": 2, "plan": {"blocks.0.first": "rowwise"}},
        "plan: blocks.0.first is a LayerNorm, and only Line",
    ),
    "ranks": ({"tensor": 3, "plan": PLAN}, "tensor=3: 2 ranks cannot be divided into groups of 3"),
    "late": (
        {"tensor": 2, "plan": PLAN},
        "tensor=2: ranks that compute a model together need the same data and random",
    ),
    "again": ({"tensor": 2, "plan": PLAN}, "Net is divided by the script already, and Strategy(tensor=2) divides"),
    "optimizer": ({"shard": "optimizer"}, "tensor=2 divides layers among ranks, and goes together with shard=False"),
    "no names": ({}, "head.weight of Net is divided over a mesh without names: give it one, as in init_device_mesh("),
    "backwards": ({}, "layers of Net are divided over ranks 1, 0, and sharded over 1 such groups, of 2 ranks; let all"),
    "two": ({}, "head.weight of Net is divided over a mesh of 1 x 2 of 2 ranks as (Replicate(), Shard(dim=0)); run.s"),
    "built": ({}, "head.weight of Net was divided among ranks before the model has its numbers; use Strategy(shard=…,"),
    "lost": ({}, "this parameter is from before run.setup, which has made another one of it: pass the optimizer"),
}
BY_SCRIPT = {"again", "optimizer", "no names", "backwards", "two", "built", "lost"}


def refused(case: str) -> str:
    with paceline.init() as run:
        with run.build() if case == "built" else contextlib.nullcontext():
            model = Net() if case != "built" else Net(64)
        if case == "late":
            run.dataloader(samples(), batch_size=2)
        try:
            former = head_by_script(model, case) if case in BY_SCRIPT else []
            run.setup(model, strategy=paceline.Strategy(**REFUSED[case][0]))
            if case == "lost":
                torch.optim.SGD(former, 0.1).step()
        except (ValueError, RuntimeError) as error:
            assert case in BY_SCRIPT or all(type(p) is torch.nn.Parameter for p in model.parameters())
            return f"{error}"
    return ""


def head_by_script(model: Net, case: str) -> Any:
    """Divide the last layer over the two ranks; returns its parameters."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = DeviceMesh("cpu", [1, 0] if case == "backwards" else [0, 1], mesh_dim_names=("layers",))
    if case == "no names":
        mesh = torch.distributed.init_device_mesh("cpu", (2,))
    if case == "two":
        both = torch.distributed.init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "layers"))
        model.head.weight = torch.nn.Parameter(distribute_tensor(model.head.weight, both, [Replicate(), Shard(0)]))
    else:
        parallelize_module(model.head, mesh, gathers())
    return [*model.head.parameters()]


def test_what_cannot_be_done_is_refused_in_one_line_on_all_ranks() -> None:
    for case, ranks in zip(REFUSED, launch_each(refused, [(case,) for case in REFUSED], 2), strict=True):
        for error in ranks:
            assert error.startswith(REFUSED[case][1]), (case, error)
            assert "\n" not in error


def stepped(case: str) -> tuple[str, list[str]]:
    """Train a step; returns the error, and what was warned of."""
    said: list[str] = []
    with paceline.init(seed=1) as run:
        model: Any = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1) if case in ("old", "changed") else None
        if case == "changed":
            model.head = torch.nn.Linear(WIDTH, CLASSES)
        elif case != "batches":
            divide(model, 2, shards=False)
        strategy = paceline.Strategy(tensor=2, plan=PLAN) if case == "batches" else None
        model, optimizer = run.setup(
            model, optimizer or torch.optim.SGD(model.parameters(), 0.1), strategy=strategy or paceline.Strategy()
        )
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("paceline").addHandler(handler)
        try:
            for step in range(4):
                own = run.rank if case in ("batches", "own batches") else 0
                x = torch.full((2, 5), (own + step) % CLASSES)
                run.backward(functional.cross_entropy(model(x), x[:, 0]))
                optimizer.step()
        except RuntimeError as error:
            return f"{error}", said
        finally:
            logging.getLogger("paceline").removeHandler(handler)
    return "", said


def test_what_would_train_wrongly_without_a_word_is_said() -> None:
    cases = ["old", "changed", "batches", "own batches", "right"]
    found = dict(zip(cases, launch_each(stepped, [(case,) for case in cases], 2), strict=True))
    lost = "and head.weight of Net has a gradient and no optimizer: make the optimizer after the script has divided"
    alike = "ranks 0, 1 compute a model together, and were given different batches"
    for (error, _), words in ((found["old"][0], "has a gradient and no optimizer"), (found["changed"][1], lost)):
        assert words in error
    for error, _ in found["batches"]:
        assert error.startswith(alike)
    for error, said in found["own batches"]:
        assert error == "" and [line for line in said if line.startswith(alike)] == said[-1:] != []
    for error, said in found["right"]:
        assert (error, [line for line in said if "batches" in line]) == ("", [])


def odd_size() -> str:
    with paceline.init() as run:
        try:
            model = torch.nn.Sequential(torch.nn.Linear(4, 7), torch.nn.Linear(7, 4))
            run.setup(model, strategy=paceline.Strategy(tensor=2, plan={"0": "colwise", "1": "rowwise"}))
        except ValueError as error:
            return f"{error}"
    return ""


def test_sizes_that_cannot_be_divided_are_refused() -> None:
    assert launch(odd_size, (), 2) == ["plan: the weight of 0 has 7 rows, and tensor=2 does not divide them"] * 2


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"tensor": 0}, "tensor 0 is less than 1"),
        ({"plan": PLAN}, "plan= has an effect with tensor= only"),
        ({"tensor": 2, "shard": "auto"}, "goes together with shard=False, True"),
        ({"tensor": 2, "shard": "optimizer"}, "goes together with shard=False, True"),
        ({"tensor": 2, "sync": "powersgd"}, "without sync="),
    ],
)
def test_options_that_exclude_each_other_are_refused(options: Options, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        paceline.Strategy(**options)
