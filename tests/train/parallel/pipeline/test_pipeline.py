"""A model whose blocks are on different ranks trains as a whole one does, with any number of microbatches."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

from tests.train.launching import launch, launch_each  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import paceline  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.torch
Options = dict[str, Any]
WIDTH, CLASSES, SIZE = 16, 12, 14
KINDS: dict[str, tuple[int, Options]] = {
    "one microbatch": (2, {"pipeline": 2, "microbatches": 1}),
    "uneven microbatches": (2, {"pipeline": 2, "microbatches": 3, "recompute": True}),
    "all forward passes first": (2, {"pipeline": 2, "schedule": "gpipe"}),
    "accumulated": (2, {"pipeline": 2, "accumulate": 2}),
    "and copies": (4, {"pipeline": 2, "accumulate": 2, "bucket_mb": 1}),
    "four stages": (4, {"pipeline": 4}),
}


class Block(torch.nn.Module):
    """Returns a tuple, as those of some libraries do, and counts its passes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = torch.nn.Dropout(0.2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, hidden: Any, mask: Any) -> Any:
        self.seen += int(self.training)
        return hidden + mask * self.down(self.dropout(functional.gelu(self.up(self.norm(hidden))))), None


class Net(torch.nn.Module):
    """Has a head that is tied to its embedding, and masks that its blocks get from the input."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(CLASSES, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(5))
        self.norm, self.head = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("runs", torch.zeros(()))
        self.saves = False  # memory, by computing blocks again

    def forward(self, words: Any, labels: Any = None) -> Any:
        y = self.embedding(words)
        mask = (words != 3).float().unsqueeze(-1)
        for block in self.blocks:
            y, _ = checkpoint(block, y, mask, use_reentrant=False) if self.saves else block(hidden=y, mask=mask)
        self.runs += float(self.training)  # behind the blocks, so on the last stage only
        result = self.head(self.norm(y))[:, -1]
        return result if labels is None else {"loss": functional.cross_entropy(result, labels), "result": result}


def samples() -> list[tuple[Any, int]]:
    drawn = torch.randint(CLASSES, (SIZE, 5), generator=torch.Generator().manual_seed(2))
    return [(x, int(y)) for x, y in zip(drawn, drawn[:, 0], strict=True)]


def trained(options: Options, folder: Path | None = None, epochs: int = 2, how: str = "") -> Any:
    """Train; returns the whole states at the start and the end, and losses and norms."""
    with paceline.init(seed=4, checkpoint_dir=folder, checkpoint_every=None if folder is None else 3) as run:
        with run.build():
            model: Any = Net()
        if how == "frozen":
            model.embedding.requires_grad_(False)
            model.blocks[0].requires_grad_(False)
        model.saves = how == "saves"
        heat = torch.nn.Parameter(torch.ones(()))  # of the loss
        kind: Any = torch.optim.Adafactor if how == "factored" else torch.optim.AdamW
        optimizer = kind([*model.parameters(), *([heat] if how == "heated" else [])], 0.01)
        model, optimizer = run.setup(model, optimizer, strategy=paceline.Strategy(**options))
        scaler = torch.amp.GradScaler("cpu", enabled=how == "scaled", init_scale=8.0)
        loader = run.dataloader(samples(), global_batch_size=4, shuffle=True)
        test = run.dataloader(samples()[:5], batch_size=2, evaluation=True)
        first, seen = None, []
        for _ in run.epochs(epochs):
            if first is None:
                first = held(model.state_dict()), held(optimizer.state_dict()["state"])
            model.train()
            for part in model.blocks:
                part.dropout.p = 0.2 if how == "dropout" else 0.0
            for x, y in loader:
                if how == "late":
                    model.blocks[0].requires_grad_(run.step > 5)
                for _ in range(2 if how == "twice" else 1):
                    loss = stepped(run, x, y, how, scaler, heat)
                scaler.unscale_(optimizer)
                norm = run.clip_grad_norm(0.5)
                if not run.accumulating:
                    seen += [float(norm), run.mean(float(loss) * len(y), len(y))]
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                wrong = sum(float(functional.cross_entropy(model(x), y, reduction="sum")) for x, y in test)
            seen.append(run.mean(wrong, sum(len(y) for _, y in test)))
        seen.append(float(torch.rand(())) if how == "dropout" else float(heat.detach()))
        return first, (held(model.state_dict()), held(optimizer.state_dict()["state"])), seen


class Labels(NamedTuple):
    labels: Any
    weights: Any


def mean_of(result: Any, given: Labels) -> Any:
    losses = functional.cross_entropy(result, given.labels, reduction="none") * given.weights
    return losses.sum() / given.weights.sum()


def stepped(run: paceline.Run, x: Any, y: Any, how: str, scaler: Any, heat: Any) -> Any:
    if how == "own loss":
        return run.pipeline_step({"words": x, "labels": y})
    if how == "weighted":
        weights = (y - 1.0).clamp(min=0)  # none in some microbatches
        return run.pipeline_step(((x,), Labels(y, weights)), mean_of, weight=lambda given: given.weights.sum())
    if how == "heated":
        return run.pipeline_step((x, y), lambda r, y: functional.cross_entropy(r * heat, y))
    if how == "summed":
        return run.pipeline_step((x, y), lambda r, y: functional.cross_entropy(r, y, reduction="sum"), reduction="sum")
    return run.pipeline_step((x, y), lambda r, y: scaler.scale(functional.cross_entropy(r, y)))


def held(state: Any) -> Any:
    """What this rank has of a state."""
    if isinstance(state, dict):
        found = {key: held(each) for key, each in state.items()}
        return {key: each for key, each in found.items() if each is not None}
    if hasattr(state, "device_mesh"):
        return None if state.device_mesh.get_coordinate() is None else held(state.to_local())
    return state.detach().clone() if isinstance(state, torch.Tensor) else state


def merged(states: list[Any]) -> Any:
    """What ranks have together; of what several have, all have the same."""
    together: dict[Any, Any] = {}
    for state in states:
        for key, value in state.items():
            if isinstance(value, dict):
                together[key] = merged([together.get(key, {}), value])
            else:
                torch.testing.assert_close(value, together.setdefault(key, value), rtol=0, atol=0, msg=f"{key}")
    return together


HOW: dict[str, Options] = {
    "own loss": {}, "weighted": {"accumulate": 2}, "summed": {}, "scaled": {}, "frozen": {}, "twice": {},
    "heated": {}, "saves": {},
    "late": {"accumulate": 2},
}  # fmt: skip


def test_a_model_in_stages_trains_as_a_whole_one_does() -> None:
    expected = {every: trained({"accumulate": every}) for every in (1, 2)}
    for nproc in (2, 4):
        cases = {kind: options for kind, (ranks, options) in KINDS.items() if ranks == nproc}
        for kind, ranks in zip(cases, launch_each(trained, [(each,) for each in cases.values()], nproc), strict=True):
            _, (model, optimizer), losses = expected[cases[kind].get("accumulate", 1)]
            for *_, seen in ranks:
                assert seen == pytest.approx(losses, rel=2e-5), kind
            together = [merged([end[part] for _, end, _ in ranks]) for part in range(2)]
            assert together[0].keys() == model.keys()
            several = cases[kind].get("microbatches") != 1
            counts = {name for name in model if several and name.endswith(("seen", "runs"))}  # of microbatches
            floats = [
                {name: value for name, value in each.items() if name not in counts} for each in (together[0], model)
            ]
            torch.testing.assert_close(*floats, rtol=0, atol=2e-5, msg=kind)
            torch.testing.assert_close(together[1], optimizer, rtol=0, atol=2e-5, msg=kind)


def accumulated() -> list[bool]:
    with paceline.init(seed=1) as run:
        model: Any = run.setup(Net(), strategy=paceline.Strategy(pipeline=2))
        for together in (model.no_sync(), contextlib.nullcontext()):
            with together:
                run.pipeline_step(
                    (torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)), functional.cross_entropy
                )
        return [p.grad is not None for p in model.parameters() if not p.is_meta]


def test_stages_accumulate_by_hand() -> None:
    assert all(map(all, launch(accumulated, (), 2)))


def test_losses_are_weighted_as_for_a_whole_batch() -> None:
    cases = [({**HOW[how], "pipeline": 2, "microbatches": 3}, None, 2, how) for how in HOW]
    for how, ranks in zip(HOW, launch_each(trained, cases, 2), strict=True):
        _, _, losses = trained(HOW[how], how=how)
        for _, _, seen in ranks:
            assert seen == pytest.approx(losses, rel=5e-5), how


def test_random_numbers_of_stages_differ_and_those_of_the_script_do_not() -> None:
    first, second = (launch(trained, ({"pipeline": 2}, None, 2, "dropout"), 2) for _ in range(2))
    assert first[0][2] == first[1][2] == second[0][2]  # the losses, and a number drawn at the end
    assert first[0][2] != pytest.approx(trained({})[2], rel=1e-3)
    for share in launch(dropped, (), 2):
        assert 0.2 < share < 0.3  # of what two layers drop half of; if they drop the same, it is half


class Dropped(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: Any) -> Any:
        return functional.dropout(x * self.scale)


def dropped() -> float:
    with paceline.init() as run:
        model = run.setup(torch.nn.Sequential(Dropped(), Dropped()), strategy=paceline.Strategy(pipeline=2))
        model.train()
        return float(run.pipeline_step((torch.ones(1, 4000), None), lambda r, _: (r != 0).float().mean() + 0 * r.sum()))


class Centred(torch.nn.Linear):
    """Assigns its buffer anew in each pass."""

    def __init__(self, start: float) -> None:
        super().__init__(4, 4)
        self.register_buffer("centre", torch.full((4,), start))

    def forward(self, x: Any) -> Any:
        self.centre = self.centre + 1
        return super().forward(x)


def centres() -> list[float]:
    with paceline.init(seed=1) as run:
        model: Any = torch.nn.Sequential(Centred(10.0), Centred(20.0))
        run.setup(model, strategy=paceline.Strategy(pipeline=2, microbatches=1))
        for x in run.dataloader([torch.ones(4)] * 2, global_batch_size=2):
            run.pipeline_step((x, None), lambda result, _: result.mean())
        return [float(block.centre[0]) for block in model if not block.centre.is_meta]


def test_a_buffer_that_a_block_assigns_anew_stays_its_own() -> None:
    assert launch(centres, (), 2) == [[11.0], [21.0]]


STARTS: dict[str, list[tuple[int, Options]]] = {
    "": [
        (4, {"pipeline": 2}), (1, {}), (3, {"pipeline": 3}), (2, {"shard": True}), (2, {"pipeline": 2}), (2, {}),
        (4, {"pipeline": 4}),
    ],
    "factored": [(2, {"pipeline": 2}), (1, {}), (3, {"pipeline": 3})],  # its state has other shapes than its parameters
}  # fmt: skip


@pytest.mark.parametrize("how", STARTS)
def test_a_checkpoint_is_equal_to_the_bit_whatever_the_stages(tmp_path: Path, how: str) -> None:
    last = None
    for epochs, (nproc, options) in enumerate(STARTS[how], 1):
        ranks = launch(trained, (options, tmp_path, epochs, how), nproc)
        if "shard" not in options:
            for part in range(2):
                first = merged([begin[part] for begin, _, _ in ranks])
                if last is not None:
                    torch.testing.assert_close(first, last[part], rtol=0, atol=0)
            last = [merged([end[part] for _, end, _ in ranks]) for part in range(2)]
        else:
            last = None


def grown(folder: Path) -> dict[str, Any]:
    with paceline.init(seed=1, checkpoint_dir=folder, checkpoint_every=1) as run:
        model: Any = run.setup(Net(), strategy=paceline.Strategy(pipeline=2))
        optimizer = run.setup(torch.optim.SGD([model.norm.weight], 0.1, momentum=0.9))
        optimizer.add_param_group({"params": [*model.blocks.parameters()]})
        loader = run.dataloader(samples()[:4], global_batch_size=4)
        for _ in run.epochs(1):
            for batch in loader:
                run.pipeline_step(batch, functional.cross_entropy)
                optimizer.step()
                optimizer.zero_grad()
        names = {p: name for name, p in model.named_parameters()}
        return {names[p]: kept["momentum_buffer"] for p, kept in optimizer.state.items()}


def test_the_state_of_blocks_that_an_optimizer_gets_later_is_in_checkpoints(tmp_path: Path) -> None:
    trained_once, resumed = launch(grown, (tmp_path,), 2), launch(grown, (tmp_path,), 2)
    assert {name.split(".")[1] for name in merged(trained_once) if "blocks" in name} == {*"01234"}
    torch.testing.assert_close(resumed, trained_once, rtol=0, atol=0)


def begun(options: Options) -> Any:
    """Step once before `setup`, and once behind it, by a scaler; one of the optimizers has blocks of one stage only."""
    with paceline.init(seed=1) as run:
        model: Any = Net().eval()
        last = [*model.blocks[4].parameters()]
        rest = [p for p in model.parameters() if all(p is not each for each in last)]
        optimizers: list[Any] = [torch.optim.SGD(each, 0.1, momentum=0.9) for each in (last, rest)]
        words = torch.arange(20).reshape(4, 5) % CLASSES
        functional.cross_entropy(model(words), words[:, 0]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        run.setup(model, *optimizers, strategy=paceline.Strategy(**options))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        run.pipeline_step((words, words[:, 0]), lambda r, y: scaler.scale(functional.cross_entropy(r, y)))
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        return held(model.state_dict())


def test_optimizers_of_one_stage_alone_and_those_that_have_a_state_already() -> None:
    torch.testing.assert_close(merged(launch(begun, ({"pipeline": 2},), 2)), dict(begun({})), rtol=0, atol=2e-5)


# -- what cannot be done -----------------------------------------------------------------------------------------------


class Odd(Net):
    """Uses its blocks in another way than one after the other."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, words: Any) -> Any:
        y, mask, seen = self.embedding(words), torch.ones(()), []
        for number, block in enumerate(reversed(self.blocks) if self.how == "reversed" else self.blocks):
            if self.how == "skipped" and number == 3:
                continue
            y = block(y + 1 if self.how == "between" and number == 2 else y, mask)[0]
            if self.how == "in place":
                y += 1
            seen.append(y)
            if self.how == "early" and number == 3:
                break
        return self.head(torch.stack(seen).mean(0) if self.how == "history" else y)[:, -1]


class Pair(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = torch.nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.own(x), x


MISUSED = {
    "reversed": "blocks.4 was called where blocks.0 comes next: with pipeline=",
    "skipped": "blocks.4 was called where blocks.3 comes next",
    "between": "the result of a block is used by something other than the next block, or is changed in place",
    "in place": "the result of a block is used by something other than the next block, or is changed in place",
    "history": "the result of a block is used by something other than the next block, or is changed in place",
    "hooks": "blocks.1 has hooks, and with pipeline= it is not called on all ranks",
    "batches": "ranks 0, 1 compute a model together, and were given different batches",
    "in hook": "SGD steps within run.pipeline_step, where gradients are not exchanged yet",
    "critic": "Linear is called within run.pipeline_step, where not all ranks compute the loss",
    "init": "normal_ draws numbers for a parameter that another rank has",
    "file": "this state has tensors that other ranks have, so a file of it would lack them",
    "early": "the forward pass has ended before blocks.4 was called",
    "pair": "0 returns a tuple of Tensor, Tensor, and pipeline= passes on one tensor from block to block",
    "forward": "Net is divided by pipeline=, so no rank can compute its gradients alone: call run.pipeline_step(",
    "block": "is on another rank; with pipeline=, call the model, and not its blocks",
    "copy": "Net is divided among the ranks, so it has no copy",
    "clip": "torch.nn.utils.clip_grad_norm_ has the gradients of this rank's blocks only; use run.clip_grad_norm",
    "vector": "the loss of run.pipeline_step must return a tensor with one element, not a tensor of shape [",
    "no loss": "the model returns a Tensor, which has no loss: pass a function",
    "reduction": "reduction='max': it must be 'mean' or 'sum', and only 'mean' takes weight=",
    "later": "Net got the parameter extra after run.setup, which has divided it; add it before run.setup",
}


FOUND_BY_ONE = (
    "in place", "history", "in hook", "critic", "hooks", "reversed", "skipped", "between", "early", "pair", "vector",
    "no loss",
)  # fmt: skip
LOSSES: Any = {"vector": functools.partial(functional.cross_entropy, reduction="none"), "no loss": None}


def misused(how: str) -> str:
    """What a rank says of the misuse, where all ranks find it."""
    with paceline.init(seed=1) as run:
        odd = ("reversed", "skipped", "between", "early", "in place", "history")
        model: Any = Odd(how) if how in odd else Net()
        if how == "pair":
            model = torch.nn.Sequential(Pair(), Pair())
        model = run.setup(model, strategy=paceline.Strategy(pipeline=2, microbatches=1))
        critic = run.setup(torch.nn.Linear(CLASSES, 1))
        x = torch.randn(4, 4) if how == "pair" else torch.randint(CLASSES, (4, 5))
        try:
            if how in ("forward", "block"):
                model(x) if how == "forward" else [block(torch.zeros(1, WIDTH), 1.0) for block in model.blocks]
            elif how == "copy":
                copy.deepcopy(model)
            else:
                if how == "later":
                    model.extra = torch.nn.Parameter(torch.zeros(1))
                    run.setup(torch.optim.SGD(model.parameters(), 0.1))
                if how == "hooks":
                    model.blocks[1].register_forward_hook(lambda *_: None)
                if how == "batches" and run.rank:
                    x = x + 1
                if how == "init":
                    [torch.nn.init.normal_(parameter) for parameter in model.parameters()]
                if how == "file":
                    torch.save(model.state_dict(), io.BytesIO())
                if how == "in hook":
                    optimizer = run.setup(torch.optim.SGD(model.parameters(), 0.1))
                    model.norm.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
                loss = (lambda r, _: critic(r).sum()) if how == "critic" else LOSSES.get(how, functional.cross_entropy)
                reduction: Any = "max" if how == "reduction" else "mean"
                run.pipeline_step((x, x[:, 0]), loss, reduction=reduction)
                if how == "clip":
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        except (RuntimeError, TypeError, ValueError) as error:
            if how in FOUND_BY_ONE:
                raise
            return str(error)
    return ""


def test_a_misuse_that_all_ranks_find_is_said_in_one_line() -> None:
    cases = [how for how in MISUSED if how not in FOUND_BY_ONE]
    for how, ranks in zip(cases, launch_each(misused, [(how,) for how in cases], 2), strict=True):
        said = [each for each in ranks if MISUSED[how] in each]
        assert said, (how, ranks)
        assert "\n" not in said[0]


@pytest.mark.parametrize("how", FOUND_BY_ONE)
def test_a_misuse_that_one_rank_finds_ends_all(how: str) -> None:
    with pytest.raises((RuntimeError, TypeError, ValueError), match=re.escape(MISUSED[how])) as error:
        launch(misused, (how,), 2)
    assert "\n" not in str(error.value)


REFUSED: dict[str, tuple[Options, str]] = {
    "blocks": ({"pipeline": 2, "units": ("blocks.0",)}, "Net has 1 blocks (blocks.0), and pipeline=2 needs one for"),
    "ranks": ({"pipeline": 3}, "pipeline=3: 2 ranks cannot be divided into groups of 3"),
    "late": ({"pipeline": 2}, "pipeline=2: ranks that compute a model together need the same data and random numbers"),
    "together": ({"pipeline": 2}, "LBFGS may look at several parameters at a time, and with pipeline= each rank has"),
    "sparse": ({"pipeline": 2}, "embedding has sparse gradients, which pipeline= does not take; use sparse=False"),
    "script": (
        {"pipeline": 2},
        "RecursiveScriptModule is compiled by TorchScript, and pipeline= changes how blocks are called",
    ),
}


def refused(case: str) -> str:
    with paceline.init() as run:
        model: Any = Net()
        if case == "sparse":
            model.embedding.sparse = True
        if case == "script":
            model = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
        if case == "late":
            run.dataloader(samples(), batch_size=2)
        things = [model, *([torch.optim.LBFGS(model.parameters())] if case == "together" else [])]
        try:
            run.setup(*things, strategy=paceline.Strategy(**REFUSED[case][0]))
        except (ValueError, TypeError) as error:
            return f"{error}"
    return ""


def test_what_cannot_be_divided_is_refused_in_one_line_on_all_ranks() -> None:
    for case, ranks in zip(REFUSED, launch_each(refused, [(case,) for case in REFUSED], 2), strict=True):
        for error in ranks:
            assert error.startswith(REFUSED[case][1]), (case, error)
            assert "\n" not in error


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"pipeline": 0}, "pipeline 0 is less than 1"),
        ({"pipeline": 2, "microbatches": 0}, "microbatches 0 is less than 1"),
        ({"pipeline": 2, "schedule": "2f1b"}, "schedule '2f1b' is neither '1f1b' nor 'gpipe'"),
        ({"pipeline": 2, "shard": True}, "does not go together with shard=True; leave out one of them"),
        ({"pipeline": 2, "tensor": 2}, "does not go together with tensor=2"),
        ({"pipeline": 2, "sync": "powersgd"}, "does not go together with sync='powersgd'"),
        ({"pipeline": 2, "offload": True}, "offload=True has an effect on sharded parameters only"),
        ({"microbatches": 2}, "microbatches= has an effect with pipeline= only"),
    ],
)
def test_options_that_exclude_each_other_are_refused(options: Options, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        paceline.Strategy(**options)
