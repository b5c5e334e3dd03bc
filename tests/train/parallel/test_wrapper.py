"""What `run.setup` returns for a model is to a script what the model is, at any number of ranks."""

from __future__ import annotations

import collections
import dataclasses
import io
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

from tests.train.launching import launch  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import paceline  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.torch


class Net(torch.nn.Module):
    """With names that DistributedDataParallel has, too, and a module whose state has a version."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        self.module = torch.nn.Linear(4, 1)
        self.dim, self.temperature = 7, 1.0

    def forward(self, x: Any) -> Any:
        return self.module(self.body(x)) * self.temperature


def as_the_module() -> dict[str, Any]:
    seen: dict[str, Any] = {}
    with paceline.init() as run:
        inner = Net()
        model = run.setup(inner)
        seen["unwrapped"] = model.module is inner and run.unwrap(model) is inner and run.unwrap(inner) is inner
        seen["unwrapped when compiled"] = run.unwrap(torch.compile(model)) is inner
        seen["names"] = [name for name, _ in model.named_parameters()] == [name for name, _ in inner.named_parameters()]
        seen["attributes"] = model.dim == 7 and "temperature" in dir(model)
        model.temperature = 0.0
        seen["set on the module"] = inner.temperature == 0 and model(torch.ones(2, 3)).abs().sum().item() == 0
        model.eval()
        seen["mode"] = not inner.training and not inner.body.training and not model.training
        with model.no_sync():
            pass
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        seen["pickled"] = type(torch.load(file, weights_only=False)) is Net
        file.seek(0)
        with torch.serialization.safe_globals([Net, torch.nn.Sequential, torch.nn.Linear, torch.nn.BatchNorm1d]):
            seen["read under the script's safe globals"] = type(torch.load(file)) is Net
        seen["of the class"] = isinstance(model, Net)
        text = io.StringIO()
        run.print("a", "b", sep="-", end="!", file=text, flush=False)
        seen["printed"] = text.getvalue() == ("a-b!" if run.is_main else "")
        average = torch.optim.swa_utils.AveragedModel(model)
        average.update_parameters(model)
        seen["copied"] = type(average.module) is Net
        both = torch.nn.ModuleDict({"net": model})
        names = {f"net.{name}" for name in inner.state_dict()}
        seen["names within another"] = (
            both.state_dict().keys() == names == {*dict(both.named_parameters()), *dict(both.named_buffers())}
        )
        saved = {name: value + 1 for name, value in both.state_dict().items()}
        saved = type(both.state_dict())(saved)
        both.load_state_dict(saved)
        seen["loaded within another"] = all(
            torch.equal(both.state_dict()[name], value) for name, value in saved.items()
        )
        seen["missing within another"] = both.load_state_dict({}, strict=False).missing_keys[0] == "net.body.0.weight"
    return seen


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_model_is_what_it_was(nproc: int) -> None:
    for seen in launch(as_the_module, nproc=nproc):
        assert all(seen.values()), [what for what, good in seen.items() if not good]


def compiled(folder: Path, how: str) -> tuple[bool, float]:
    """A step of a model that is compiled, or not, from the checkpoint of the one before."""
    with paceline.init(seed=0, checkpoint_dir=folder, progress=False) as run:
        model: Any = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        if how == "part":
            model.body = torch.compile(model.body, backend="eager")
        model = torch.compile(model, backend="eager") if how == "before" else model
        model, optimizer = run.setup(model, optimizer)
        model = torch.compile(model, backend="eager") if how == "after" else model
        resumed = run.resume()
        run.backward(model(torch.arange(6.0).reshape(2, 3)).sum())
        optimizer.step()
        run.save(block=True)
        return resumed, sum(float(p.detach().sum()) for p in model.parameters())


def test_checkpoints_of_compiled_models_have_their_own_names(tmp_path: Path) -> None:
    """So each resumes from the checkpoint of the others, and trains as if nothing were compiled."""
    nproc = 2
    plain = [launch(compiled, (tmp_path / "plain", "not"), nproc) for _ in range(4)]
    for number, how in enumerate(["before", "after", "part", "not"]):
        seen = launch(compiled, (tmp_path / "compiled", how), nproc)
        assert [resumed for resumed, _ in seen] == [number > 0] * nproc
        assert [total for _, total in seen] == pytest.approx([total for _, total in plain[number]])
        saved = torch.load(tmp_path / "compiled" / f"step-{number + 1:06}" / "model.pt", weights_only=True)
        assert saved.keys() == Net().state_dict().keys()
        assert saved._metadata.keys() == Net().state_dict()._metadata.keys()


def averaged(folder: Path, more: int) -> tuple[bool, list[float], list[float]]:
    with paceline.init(checkpoint_dir=folder) as run:
        torch.manual_seed(3)
        model = run.setup(Net())
        average = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda old, new, _: old * 0.5 + new * 0.5)
        parts = torch.nn.ModuleDict({"net": model})
        run.register(average=average, parts=parts)
        resumed = run.resume()
        for _ in range(more):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1.0)
            average.update_parameters(model)
        run.save(block=True)
        mean = [value for p in average.parameters() for value in p.flatten().tolist()]
        return resumed, mean, [value for p in model.parameters() for value in p.flatten().tolist()]


def test_an_average_of_weights_goes_on_with_any_number_of_ranks(tmp_path: Path) -> None:
    (whole,) = launch(averaged, (tmp_path / "whole", 3))
    for nproc, more in ((2, 1), (1, 1), (2, 1)):
        seen = launch(averaged, (tmp_path / "parts", more), nproc)
    assert seen == [(True, *whole[1:])] * 2


def test_what_others_have_made_parallel_is_refused() -> None:
    with paceline.init() as run:
        linear = torch.nn.Linear(2, 2)
        model, optimizer = run.setup(linear, torch.optim.SGD(linear.parameters(), 0.1))
        for again in (model, linear, torch.nn.ModuleList([model])):
            with pytest.raises(ValueError, match="this Linear was set up before"):
                run.setup(again)
        with pytest.raises(ValueError, match="this SGD was set up before"):
            run.setup(optimizer)
        with pytest.raises(TypeError, match=r"DataParallel.* pass it the model inside, model\.module"):
            run.setup(torch.nn.DataParallel(torch.nn.Linear(2, 2)))
        with pytest.raises(TypeError, match="unwrap takes a model, not dict"):
            run.unwrap({})


def made_by_hand() -> str:
    with paceline.init() as run, pytest.raises(TypeError) as caught:
        run.setup(torch.nn.ModuleList([DistributedDataParallel(torch.nn.Linear(2, 2))]))
    return str(caught.value)


def test_a_model_in_ddp_is_refused() -> None:
    for why in launch(made_by_hand, nproc=2):
        assert why.startswith("the model is wrapped in DistributedDataParallel")


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    logits: Any
    more: Any = None


@dataclasses.dataclass
class Output(collections.OrderedDict):  # type: ignore[type-arg]
    """As transformers makes a ModelOutput: a dataclass that is a dict, and keeps both alike."""

    loss: Any = None
    hidden: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self) -> Any:
        made = super().__reduce__()
        return (made[0], tuple(getattr(self, field.name) for field in dataclasses.fields(self)), *made[2:])


class Many(torch.nn.Module):
    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer, self.make = torch.nn.Linear(2, 2), make

    def forward(self, x: Any) -> Any:
        return self.make(self.layer(x))


KEPT = object()
RESULTS: list[tuple[Callable[[Any], Any], Callable[[Any], Any]]] = [
    (lambda y: Output(loss=y.mean(), hidden=(y, KEPT)), lambda o: [o.loss, o["loss"], o.hidden[0]]),
    (lambda y: Pair(y, [y, None]), lambda o: [o.first, o.second[0]]),
    (lambda y: Frozen(y, {"deep": Pair(y, KEPT)}), lambda o: [o.logits, o.more["deep"].first]),
    (lambda y: collections.defaultdict(list, a=y), lambda o: [o["a"]]),
    (lambda y: torch.max(y, 1), lambda o: [o.values]),
    (
        lambda y: torch.nn.utils.rnn.pack_padded_sequence(y[:, None], torch.ones(3), batch_first=True),
        lambda o: [o.data],
    ),
]


@pytest.mark.parametrize("number", range(len(RESULTS)))
def test_results_of_half_precision_keep_their_types(number: int) -> None:
    make, tensors = RESULTS[number]
    with paceline.init() as run:
        model = run.setup(Many(make), strategy=paceline.Strategy(precision="bf16"))
        out = model(torch.randn(3, 2))
        assert type(out) is type(make(torch.randn(3, 2)))
        assert {tensor.dtype for tensor in tensors(out)} == {torch.float32}
        run.backward(tensors(out)[0].sum())
        model.make = None  # a lambda, which no file can hold
        file = io.BytesIO()
        torch.save(model, file)
        assert b"paceline" not in file.getvalue(), "read where there is no paceline"
    if number == 0:
        assert out.hidden[1] is KEPT


def test_a_result_without_half_precision_is_not_copied() -> None:
    kept = {"a": [torch.ones(1)], "b": Frozen(1)}
    with paceline.init() as run:
        model = run.setup(Many(lambda y: kept), strategy=paceline.Strategy(precision="bf16"))
        assert model(torch.randn(1, 2)) is kept
