"""Models that are made without memory get the numbers that they would have with it."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from tests.train.launching import launch  # noqa: E402
from torch import nn  # noqa: E402

import paceline  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.torch
WIDTH = 64


class Net(nn.Module):
    """What models do when they are made: other initialisation, views, tied weights, buffers that are not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(200, WIDTH)
        self.register_buffer("angles", 1 / 10000 ** (torch.arange(0, WIDTH, 2) / WIDTH), persistent=False)
        self.register_buffer("mask", torch.tril(torch.ones(WIDTH, WIDTH)).bool(), persistent=False)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True, dropout=0.0) for _ in range(2)
        )
        self.memory = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 200, bias=False)
        self.head.weight = self.embedding.weight
        for name, parameter in self.blocks.named_parameters():
            if parameter.dim() > 1 and "0" in name:
                nn.init.trunc_normal_(parameter, std=0.02)
        nn.init.orthogonal_(self.blocks[1].linear1.weight)
        nn.init.orthogonal_(self.blocks[1].linear2.weight)
        self.blocks[0].linear2.weight.data.mul_(0.5)
        self.blocks[0].linear1.weight.data = torch.randn(2 * WIDTH, WIDTH) / 10
        with torch.no_grad():
            self.embedding.weight[3].zero_()
            self.blocks[1].linear2.weight += torch.eye(WIDTH, 2 * WIDTH)
            self.memory.weight_hh_l0 /= self.memory.weight_hh_l0.norm()
            self.memory.bias_hh_l0[:2] = self.embedding.weight[1, :2]

    def forward(self, x: Any) -> Any:
        y = self.embedding(x)
        for block in self.blocks:
            y = block(y)
        return self.head(self.memory(y)[0])


def numbers(module: nn.Module) -> dict[str, Any]:
    every: dict[str, Any] = dict((*module.named_parameters(remove_duplicate=False), *module.named_buffers()))
    whole = {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in every.items()}
    return {name: each.detach().clone() for name, each in whole.items()}


def built(options: dict[str, Any], weights: Path | None = None) -> tuple[dict[str, Any], bool, Any, int]:
    """Build a model, and train it for a step; returns its numbers before, whether weights are tied, and the rest."""
    with paceline.init(seed=3) as run:
        with run.build(weights):
            model: Any = Net()
        drawn = torch.rand(2)
        kept = sum(each.untyped_storage().nbytes() for each in model.parameters() if type(each) is nn.Parameter)
        optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
        optimizer, model = run.setup(optimizer, model, strategy=paceline.Strategy(**options))
        found = numbers(model)
        is_tied = model.head.weight is model.embedding.weight
        before = model.head.weight.detach().clone()
        run.backward(model(torch.arange(6).view(2, 3)).square().mean())
        optimizer.step()
        assert not torch.equal(
            numbers(model)["head.weight"], before.full_tensor() if options.get("shard") is True else before
        )
        if options.get("shard") == "optimizer":
            assert len(run._prepared._parts) == 1
        return found, is_tied, drawn, kept


def test_an_optimizer_that_is_set_up_first_keeps_its_rows_once() -> None:
    launch(built, ({"shard": "optimizer"},), 2)


@pytest.mark.parametrize("nproc", [1, 3])
def test_a_model_has_the_numbers_that_it_would_have_in_one_process(nproc: int) -> None:
    torch.manual_seed(3)
    expected, drawn = numbers(Net()), torch.rand(2)
    options = {"shard": True, "units": ("blocks.0", "blocks.1", "memory")} if nproc > 1 else {}
    for found, is_tied, after, kept in launch(built, (options,), nproc):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        torch.testing.assert_close(after, drawn, rtol=0, atol=0)
        assert is_tied
        assert kept < 20_000  # bytes; the model has 700,000


@pytest.mark.parametrize("kind", ["pt", "safetensors"])
def test_a_model_is_filled_from_files(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(9)
    state = {name: each for name, each in Net().state_dict().items() if not name.startswith("memory")}
    del state["head.weight"]  # as others save tied weights
    file = tmp_path / f"model.{kind}"
    if kind == "pt":
        torch.save(state, file)
    else:
        write_safetensors(file, state)
    torch.manual_seed(3)
    made = numbers(Net())
    for found, is_tied, _, _ in launch(built, ({"shard": True}, file), 2):
        assert is_tied
        for name, each in found.items():
            given = state.get("embedding.weight" if name == "head.weight" else name)
            torch.testing.assert_close(each, made[name] if given is None else given, rtol=0, atol=0)


def write_safetensors(file: Path, state: dict[str, Any]) -> None:
    head, parts, place = {}, [], 0
    for name, each in state.items():
        parts.append(each.numpy().tobytes())
        end = place + len(parts[-1])
        head[name] = {"dtype": "F32", "shape": list(each.shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))


def test_what_cannot_be_filled_is_refused(tmp_path: Path) -> None:
    with paceline.init() as run:
        with torch.device("meta"):
            model = nn.Linear(2, 2)
        with pytest.raises(paceline.NotBuilt, match=r"weight of Linear is on the meta device, and so"):
            run.setup(model)
        for name in ("a.safetensors", "a.pt"):
            (tmp_path / name).write_bytes(b"\x10" * 30)
            with pytest.raises(ValueError, match=rf"{name} is (not a file of safetensors|neither)"):
                run.build(tmp_path / name)
        with pytest.raises(FileNotFoundError):
            run.build(tmp_path / "no.safetensors")
        torch.save({"weight": torch.zeros(3, 3)}, tmp_path / "b.pt")
        with run.build(tmp_path / "b.pt"):
            large = nn.Linear(40, 40)
        with pytest.raises(ValueError, match=r"the weights have weight as \[3, 3\], and the model as \[40, 40\]"):
            run.setup(large)
