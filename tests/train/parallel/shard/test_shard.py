"""Sharded models train as whole ones do, and their checkpoints are equal to the bit on any number of ranks."""

from __future__ import annotations

import contextlib
import copy
import pickle
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from tests.train.launching import launch, launch_each  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn import functional  # noqa: E402

import paceline  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.torch
Options = dict[str, Any]
CLASSES, WIDTH, SIZE = 7, 6, 26
# How models are sharded, with how many batches a step has, and more options.
KINDS: dict[str, Options] = {
    "all": {"shard": True},
    "all, accumulated": {"shard": True, "accumulate": 3},
    "pairs": {"shard": 2},
    "machine": {"shard": "node", "recompute": True},
    "compiled": {"shard": True, "compile": "eager", "find_unused_parameters": True},
    "optimizer": {"shard": "optimizer"},
    "optimizer, accumulated": {"shard": "optimizer", "accumulate": 3},
    "recomputed": {"recompute": True},
    "whole, accumulated": {"accumulate": 3},
}


class Net(torch.nn.Module):
    """Tied weights, blocks with fewer rows than there are ranks, buffers, a frozen part, and a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(CLASSES, WIDTH)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(WIDTH, 3), torch.nn.Tanh(), torch.nn.Linear(3, WIDTH)) for _ in range(2)
        )
        self.norm = torch.nn.BatchNorm1d(WIDTH, affine=False)
        self.frozen = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = torch.nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = torch.nn.Parameter(torch.tensor(2.0))

    @torch.no_grad()
    def generate(self, x: Any) -> Any:
        return [self(x) for _ in x]

    def forward(self, x: Any) -> Any:
        y = self.embedding(x)
        for block in self.blocks:
            y = y + block(y)
        return self.head(self.norm(self.frozen(y))) * self.scale


def build() -> Net:
    torch.manual_seed(5)
    model = Net()
    model.norm.eval()  # its statistics are of each rank's batch, so training mode has other numbers
    return model


def samples() -> list[tuple[Any, int]]:
    generator = torch.Generator().manual_seed(2)
    drawn = torch.randint(CLASSES, (SIZE, 2), generator=generator)
    return [(x, int(y)) for x, y in drawn]


def whole(value: Any) -> Any:
    """A state with whole tensors in place of parts."""
    if isinstance(value, dict):
        return {key: whole(each) for key, each in value.items()}
    if isinstance(value, list):
        return [whole(each) for each in value]
    if isinstance(value, torch.Tensor):
        full: Any = value.full_tensor() if hasattr(value, "full_tensor") else value
        return full.detach().clone()
    return value


def trained(options: Options, folder: Path | None = None, epochs: int = 2, order: str = "before") -> Any:
    """Train; returns what there was at the start of the first epoch, the whole states at the end, and what was seen."""
    with paceline.init(checkpoint_dir=folder, checkpoint_every=None if folder is None else 3) as run:
        model: Any = build()
        model.head.weight.is_head = True
        strategy = paceline.Strategy(**options)
        optimizer: Any = torch.optim.AdamW(model.parameters(), 0.05)
        if order == "before":
            model, optimizer = run.setup(model, optimizer, strategy=strategy)
        elif order == "first":
            optimizer, model = run.setup(optimizer, model, strategy=strategy)
        else:
            model = run.setup(model, strategy=strategy)
            optimizer = run.setup(torch.optim.AdamW(model.parameters(), 0.05, foreach=True))
        assert model.head.weight.is_head
        loader = run.dataloader(samples(), global_batch_size=4, shuffle=True)
        test = run.dataloader(samples()[:5], batch_size=2, evaluation=True)
        first, seen, begun = None, [], -1
        for epoch in run.epochs(epochs):
            if first is None:
                begun = epoch
                first = whole(model.state_dict()), whole(optimizer.state_dict()["state"])
            for x, y in loader:
                # The weights of an accumulation are known at its end only: gradients so far are corrected then.
                weight = loader.samples if "accumulate" in options else None
                run.backward(functional.cross_entropy(model(x), y), weight)
                norm = run.clip_grad_norm(0.5)
                if not run.accumulating:
                    seen.append(float(norm))
                optimizer.step()
                optimizer.zero_grad()
            right = sum(float(functional.cross_entropy(model(x), y, reduction="sum")) for x, y in test)
            seen.append(run.mean(right, 5.0 if run.rank == 0 else 0.0))
            for x, _ in test:
                model.generate(x)
        return first, (whole(model.state_dict()), whole(optimizer.state_dict()["state"])), seen, begun


@pytest.fixture(scope="module")
def alone() -> dict[int, Any]:
    """What one process computes, by the number of batches of a step."""
    return {every: trained({"accumulate": every}) for every in (1, 3)}


def test_sharded_models_train_as_whole_ones_do(alone: dict[int, Any]) -> None:
    """With three and four ranks, uneven last batches, and one rank that has no batch in an evaluation."""
    for nproc, left_out in ((3, "pairs"), (4, "")):
        kinds = [kind for kind in KINDS if kind != left_out and (nproc == 3 or "optimizer" not in kind)]
        for kind, ranks in zip(kinds, launch_each(trained, [(KINDS[kind],) for kind in kinds], nproc), strict=True):
            for _, (model, optimizer), seen, _ in ranks:
                _, expected, losses, _ = alone[KINDS[kind].get("accumulate", 1)]
                assert seen == pytest.approx(losses, abs=2e-5), kind
                torch.testing.assert_close((dict(model), optimizer), (dict(expected[0]), expected[1]), msg=kind)


def half(shard: bool) -> Any:
    """The losses of some steps in half precision, and how many bytes the graph of a pass keeps in it."""
    kept: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        if tensor.dtype == torch.bfloat16:
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with paceline.init(seed=1) as run:
        block = [torch.nn.LayerNorm(64), torch.nn.Linear(64, 64), torch.nn.Tanh()]
        model: Any = torch.nn.Sequential(*(copy.deepcopy(torch.nn.Sequential(*block)) for _ in range(8)))
        optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
        strategy = paceline.Strategy(shard=shard, precision="bf16")
        model, optimizer = run.setup(model, optimizer, strategy=strategy)
        x = torch.randn(3, 64, generator=torch.Generator().manual_seed(run.rank))
        losses = []
        for _ in range(4):
            kept.clear()
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                loss = model(x).square().mean()
            size = sum(storage.nbytes() for storage in kept.values())  # what was given back has none
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses, whole(model.state_dict()), size


def test_half_precision_has_the_numbers_of_copies_and_keeps_no_parameters() -> None:
    copies, sharded = launch_each(half, [(False,), (True,)], 2)
    for (losses, state, kept), (others, other, fewer) in zip(copies, sharded, strict=True):
        assert losses == pytest.approx(others, abs=1e-6)
        torch.testing.assert_close(dict(state), dict(other), rtol=0, atol=1e-6)
        matrices = 8 * 64 * 64 * 2
        assert kept >= matrices > fewer


def test_an_optimizer_may_be_made_and_set_up_before_its_model_or_after(alone: dict[int, Any]) -> None:
    cases = [({"shard": True}, None, 2, order) for order in ("first", "after")]
    for ranks in launch_each(trained, cases, 2):
        for _, _, seen, _ in ranks:
            assert seen == pytest.approx(alone[1][2], abs=2e-5)


def test_a_checkpoint_is_equal_to_the_bit_on_any_number_of_ranks(tmp_path: Path) -> None:
    """Sharded, whole and in part, in any order; the last state is what the next start begins with."""
    starts: list[tuple[int, Options]] = [
        (4, {"shard": True}), (3, {"shard": "optimizer"}), (1, {}), (4, {"shard": 2}), (2, {}), (2, {"shard": True}),
        (1, {"shard": True}),
    ]  # fmt: skip
    last = None
    for epochs, (nproc, options) in enumerate(starts, 1):
        for first, end, _, begun in launch(trained, (options, tmp_path, epochs), nproc):
            assert begun == epochs - 1
            if last is not None:
                torch.testing.assert_close(first, last, rtol=0, atol=0)
            now = end
        last = now


def test_a_run_that_is_resumed_has_the_same_bits(tmp_path: Path) -> None:
    at_once = launch(trained, ({"shard": True}, tmp_path / "at once", 3), 3)
    launch(trained, ({"shard": True}, tmp_path / "parts", 1), 3)
    for again, once in zip(launch(trained, ({"shard": True}, tmp_path / "parts", 3), 3), at_once, strict=True):
        torch.testing.assert_close(again[1], once[1], rtol=0, atol=0)


@pytest.mark.parametrize("damage", ["lost", "changed"])
def test_a_lost_or_changed_piece_is_found_and_the_checkpoint_before_is_used(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    launch(trained, ({"shard": True}, tmp_path, 2), 2)
    newest = max(tmp_path.glob("step-*"))
    piece = newest / "shard-00001.pt"
    if damage == "lost":
        piece.unlink()
    else:
        content = bytearray(piece.read_bytes())
        content[len(content) // 2] ^= 1
        piece.write_bytes(content)
    _, _, _, begun = trained({}, tmp_path, 3)
    assert begun == 1
    (warning,) = [record.message for record in caplog.records if "is damaged" in record.message]
    assert f"{newest} is damaged and not used: shard-00001.pt" in warning


def on_two_machines(folder: Path, epochs: int) -> Any:
    """Each rank has a folder of its own, as on machines that share none."""
    with paceline.init() as run:
        rank = run.rank
    return trained({"shard": True}, folder / f"{rank}", epochs)


def test_no_folder_must_be_shared(tmp_path: Path) -> None:
    ends = launch(on_two_machines, (tmp_path, 1), 2)
    assert (tmp_path / "0").is_dir() and (tmp_path / "1").is_dir()
    for rank in range(2):  # each folder has a whole checkpoint
        first, *_ = trained({}, tmp_path / f"{rank}", 2)
        torch.testing.assert_close(first, ends[0][1], rtol=0, atol=0)


# -- what a script may do ----------------------------------------------------------------------------------------------


def begun(shard: bool) -> Any:
    """Step once before `setup`, and once behind it."""
    with paceline.init() as run:
        model: Any = build()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        x = torch.arange(CLASSES)
        for backward in (torch.Tensor.backward, run.backward):
            if backward is not torch.Tensor.backward:
                model, optimizer = run.setup(model, optimizer, strategy=paceline.Strategy(shard=shard))
            backward(functional.cross_entropy(model(x), x))
            optimizer.step()
            optimizer.zero_grad()
        return whole(model.state_dict())


def test_an_optimizer_may_have_a_state_before_it_is_set_up() -> None:
    for state in launch(begun, (True,), 2):
        torch.testing.assert_close(state, begun(shard=False))


def sparse(shard: Any) -> list[float]:
    """Train an embedding with sparse gradients, with an optimizer that has a state from the start."""
    with paceline.init(seed=1, progress=False) as run:
        model: Any = torch.nn.Sequential(torch.nn.Embedding(7, 4, sparse=True), torch.nn.Linear(4, 1))
        optimizer = torch.optim.Adagrad(model.parameters(), 0.1)
        model, optimizer = run.setup(model, optimizer, strategy=paceline.Strategy(shard=shard))
        for _ in run.epochs(2):
            for words in run.dataloader(torch.arange(12) % 7, global_batch_size=4):
                run.backward(model(words).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        return [float(each.detach().double().sum()) for each in model.parameters()]


def test_embeddings_with_sparse_gradients_keep_a_whole_state() -> None:
    (copied, _), (sharded, _) = launch_each(sparse, [(False,), ("optimizer",)], 2)
    assert sharded == pytest.approx(copied, abs=1e-6)


def by_hand(folder: Path, has_whole: bool) -> None:
    with paceline.init(checkpoint_dir=folder, checkpoint_every=1, keep=9) as run:
        model: Any = build()
        model.scale.requires_grad_(has_whole)  # it is not divided
        model = run.setup(model, strategy=paceline.Strategy(shard=True))
        optimizer = run.setup(torch.optim.SGD(model.parameters(), 0.1))
        x = torch.arange(CLASSES)
        for number in run.steps(range(4)):
            with model.no_sync() if number % 2 == 0 else contextlib.nullcontext():
                run.backward(functional.cross_entropy(model(x), x))
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()


def test_a_checkpoint_waits_for_gradients_that_are_accumulated_by_hand(tmp_path: Path) -> None:
    folders = [tmp_path / "divided", tmp_path / "whole too"]
    launch_each(by_hand, [(folder, folder is folders[1]) for folder in folders], 2)
    for folder in folders:
        assert sorted(each.name for each in folder.glob("step-*")) == ["step-000002", "step-000004"]


def may_do(_: None) -> list[str]:
    """What a script may do with a sharded model, one after the other; returns what was wrong."""
    wrong = []
    with paceline.init() as run:
        model: Any = run.setup(build(), strategy=paceline.Strategy(shard=True))
        optimizer = run.setup(torch.optim.SGD(model.parameters(), 0.1))
        state = whole(model.state_dict())
        expected = build()
        x, y = torch.arange(CLASSES), torch.arange(CLASSES)

        def same(what: str) -> None:
            for name, each in whole(model.state_dict()).items():
                if not torch.allclose(each, expected.state_dict()[name], atol=1e-6):
                    wrong.append(f"{what}: {name}")

        def step(model: Any, optimizer: Any, backward: Callable[[Any], Any]) -> None:
            backward(functional.cross_entropy(model(x), y) + model(x).square().mean())  # two passes, one backward
            optimizer.step()
            optimizer.zero_grad()

        same("at the start")
        other = torch.optim.SGD(expected.parameters(), 0.1)
        step(model, optimizer, run.backward)
        step(expected, other, torch.Tensor.backward)
        same("two passes before a backward")
        for each in (model, expected):
            each.frozen.requires_grad_(True)
        run.setup(optimizer_of_frozen := torch.optim.SGD(model.frozen.parameters(), 0.1))
        frozen = torch.optim.SGD(expected.frozen.parameters(), 0.1)
        for optimizers, trained_model, backward in (
            ((optimizer, optimizer_of_frozen), model, run.backward), ((other, frozen), expected, torch.Tensor.backward)
        ):  # fmt: skip
            backward(functional.cross_entropy(trained_model(x), y))
            for each in optimizers:
                each.step()
                each.zero_grad()
        same("trained later")
        with pytest.raises(IndexError):
            model(x + CLASSES)
        model.load_state_dict(state)
        expected.load_state_dict(state)
        step(model, optimizer, run.backward)
        step(expected, other, torch.Tensor.backward)
        same("after an error in a pass, and whole tensors were loaded")
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
        run.backward(scaler.scale(functional.cross_entropy(model(x), y) * 1e9))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        same("a step that overflows")
        run.setup(torch.nn.Linear(2, 2))
        return wrong


def test_a_script_may_do_what_it_does_with_a_whole_model() -> None:
    assert launch(may_do, (None,), 2) == [[], []]


def refused(case: str) -> str:
    """The error of something that cannot be done with a sharded model."""
    with paceline.init() as run:
        strategy = paceline.Strategy(shard="optimizer" if case == "rows" else True)
        model: Any = build()
        former = list(model.parameters())
        try:
            if case == "units":
                run.setup(torch.nn.Bilinear(2, 2, 2), strategy=strategy)
            elif case == "names":
                run.setup(model, strategy=paceline.Strategy(shard=True, units=("blocks.0", "blocks.7")))
            elif case == "tied":
                run.setup(model, strategy=paceline.Strategy(shard=True, units=("head", "blocks.0")))
            elif case == "divided":
                run.setup(model, strategy=paceline.Strategy(shard=3))
            elif case == "shared":
                run.setup(model, strategy=strategy)
                run.setup(torch.nn.Sequential(torch.nn.Linear(1, 1), model.embedding))
            elif case in ("twice", "part"):
                two = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
                fully_shard(two if case == "twice" else two[0], mesh=dist.init_device_mesh("cpu", (2,)))
                run.setup(two, strategy=strategy if case == "twice" else None)
            elif case == "types":
                model.blocks[1][0].double()
                run.setup(model, strategy=strategy)
            elif case == "sparse":
                model.embedding.sparse = True
                run.setup(model, strategy=strategy)
            elif case == "hooks":
                model.blocks[0][0].bias.register_hook(print)
                run.setup(model, strategy=strategy)
            elif case == "rows":
                run.setup(model, Odd(model.parameters(), 0.1), strategy=strategy)
            elif case == "whole":
                run.setup(model, torch.optim.LBFGS(model.parameters()), strategy=strategy)
            else:
                model = run.setup(model, strategy=strategy)
                if case == "copy":
                    copy.deepcopy(model)
                elif case == "pickle":
                    pickle.dumps(model)
                elif case == "former":
                    torch.nn.utils.clip_grad_norm_(former, 1.0)
                elif case == "mixed":
                    model.blocks[0].forward = lambda y: functional.linear(y, model.blocks[1][0].weight)
                    model(torch.arange(3))
        except (RuntimeError, ValueError, TypeError) as error:
            run.barrier()
            return f"{type(error).__name__}: {error}"
    return ""


class Odd(torch.optim.SGD):
    """An optimizer that may do anything."""


REFUSED = {
    "units": "ValueError: Bilinear has no repeated blocks, so it is not known what its units are: ",
    "names": "ValueError: units=('blocks.0', 'blocks.7'): Net has no module 'blocks.7'; its modules are ",
    "tied": "ValueError: embedding.weight and head.weight are one parameter, and belong to different units; ",
    "divided": "ValueError: shard=3: 2 ranks cannot be divided into groups of 3; ",
    "shared": "ValueError: 1.weight of Sequential is also a parameter of Net, and one of them is divided",
    "twice": "ValueError: Sequential is divided by the script already, and Strategy(shard=True) divides models ",
    "part": "ValueError: only parts of Sequential are sharded by fully_shard: ",
    "rows": 'TypeError: Odd may look at whole parameters, and with shard="optimizer" it gets rows of them; ',
    "whole": "TypeError: LBFGS looks at whole parameters, and ranks have parts of them; ",
    "types": "ValueError: blocks.1.0.weight is torch.float64, and blocks.1.2.weight, which is sharded together with ",
    "sparse": "ValueError: embedding has sparse gradients, which cannot be sharded; ",
    "hooks": "ValueError: blocks.0.0.bias has hooks, which a sharded parameter loses: ",
    "former": "RuntimeError: this parameter is from before run.setup, which has made another one of it: ",
    "copy": "TypeError: Net is divided among the ranks, so it has no copy",
    "pickle": "TypeError: Net is divided among the ranks, so it has no copy",
    "mixed": "UnitsMixed: a module of Net uses parameters of another unit, which are not gathered then ",
}


def test_what_cannot_be_done_is_refused_in_one_line_on_all_ranks() -> None:
    for case, ranks in zip(REFUSED, launch_each(refused, [(case,) for case in REFUSED], 2), strict=True):
        for error in ranks:
            assert error.startswith(REFUSED[case]), (case, error)
            assert "\n" not in error


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"shard": "both"}, "shard 'both' is neither True nor False, nor 'auto', 'node' or 'optimizer', nor a"),
        ({"shard": 1}, "shard 1 is neither"),
        ({"shard": True, "sync": "powersgd"}, "with shard=True no rank has them"),
        ({"shard": "optimizer", "sync": "local_sgd"}, "lets each rank step alone"),
        ({"offload": True}, "has an effect on sharded parameters only"),
        ({"shard": True, "units": "a"}, "is one name; write units="),
    ],
)
def test_options_that_exclude_each_other_are_refused(options: Options, why: str) -> None:
    with pytest.raises((ValueError, TypeError), match=why):
        paceline.Strategy(**options)
