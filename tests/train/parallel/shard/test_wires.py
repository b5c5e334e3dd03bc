"""How the ranks of a shard group gather parameters and sum gradients."""

from __future__ import annotations

import contextlib
import itertools
import logging
import mmap
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from tests.train.launching import launch, say  # noqa: E402

import paceline  # noqa: E402
from paceline.train.parallel.shard import wires as module  # noqa: E402
from paceline.train.parallel.shard.wires import Wires  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.torch
OPS = [dist.ReduceOp.SUM, dist.ReduceOp.AVG]
TYPES = [torch.float32, torch.float64, torch.bfloat16]
SIZES = [0, 1, 2, 300, 700]  # of a chunk; a piece has 128 to 512 numbers
CASES = list(itertools.product(OPS, TYPES, SIZES))
PIECE = 1024


def refuse(*_: object) -> Any:
    raise OSError(28, "No space left on device")


def numbers(rank: int, size: int, dtype: Any) -> Any:
    return torch.randn(size, generator=torch.Generator().manual_seed(1000 * rank + size)).to(dtype)


def scattered(wires: Wires, process_group: Any, op: Any, dtype: Any, size: int) -> Any:
    """What this rank gets of a sum."""
    count = dist.get_world_size(process_group)
    source = wires.reduce_scatter.allocate((count * size,), dtype=dtype, device=torch.device("cpu"))
    source.copy_(numbers(dist.get_rank(), count * size, dtype))
    target = wires.reduce_scatter.allocate((size,), dtype=dtype, device=torch.device("cpu"))
    wires.reduce_scatter(output_tensor=target, input_tensor=source, group=process_group, op=op)
    return target


def by_hand(order: Sequence[int], rank: int, op: Any, dtype: Any, size: int, *, rounded: bool) -> Any:
    """The sum of the chunk of a rank in an order of ranks, rounded after each addition or at the end."""
    position = sorted(order).index(rank)
    parts = [numbers(each, len(order) * size, dtype).view(len(order), size)[position] for each in order]
    wide = torch.float32 if dtype is torch.bfloat16 else dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = (total.to(dtype) if rounded else total).to(wide) + part
    return (total / len(order) if op == dist.ReduceOp.AVG else total).to(dtype)


def gathers(wires: Wires, process_group: Any, ranks: Sequence[int], size: int) -> bool:
    """Whether bytes get to all ranks, from memory of their own, and from where they are gathered."""
    parts = [torch.arange(size).add(7 * each).to(torch.uint8) for each in ranks]
    position = ranks.index(dist.get_rank())
    target, in_place = torch.zeros(2, len(ranks) * size, dtype=torch.uint8)
    wires.all_gather(output_tensor=target, input_tensor=parts[position], group=process_group)
    own = in_place[position * size : (position + 1) * size].copy_(parts[position])
    wires.all_gather(output_tensor=in_place, input_tensor=own, group=process_group)
    return bool(torch.equal(target, torch.cat(parts)) and torch.equal(in_place, target))


# -- three ranks -------------------------------------------------------------------------------------------------------


def by_each_way() -> tuple[list[str], list[str], int]:
    """What goes wrong, what is logged, and the bytes that are sent without shared memory."""
    wrong: list[str] = []
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("paceline").addHandler(handler)
    with paceline.init() as run:
        rank, group = run.rank, run._group
        alone, pair, everyone = [dist.new_group(ranks) for ranks in ([1], [0, 2], [0, 1, 2])]

        mine, own = ([1], alone) if rank == 1 else ([0, 2], pair)
        near = Wires(group, mine, own)
        for case in CASES:
            if not torch.equal(scattered(near, own, *case), by_hand(mine, rank, *case, rounded=False)):
                wrong.append(f"memory of {mine}: {case}")
        wrong += [f"memory of {mine}: {size} bytes" for size in SIZES if not gathers(near, own, mine, size)]
        if near.sent:
            wrong.append(f"{near.sent} bytes sent through memory")
        near.close()

        if rank == 2:
            mmap.mmap = refuse  # type: ignore[assignment,misc]
        module._PIECE = PIECE
        group.guard = contextlib.nullcontext()  # else errors wait for what the other ranks say of them
        far = Wires(group, [0, 1, 2], everyone)
        order = [(rank + 1) % 3, (rank + 2) % 3, rank]
        for case in CASES:
            for _ in range(2):
                if not torch.equal(scattered(far, everyone, *case), by_hand(order, rank, *case, rounded=True)):
                    wrong.append(f"ring: {case}")
        wrong += [f"ring: {size} bytes" for size in SIZES if not gathers(far, everyone, [0, 1, 2], size)]

        sent = far.sent

        def fails(do: Any, expected: str) -> None:
            try:
                do()
            except (RuntimeError, ValueError) as error:
                if expected not in str(error):
                    wrong.append(f"{error!r}, not {expected}")
            else:
                wrong.append(f"no error, not {expected}")

        different = "exchange different tensors"
        fails(lambda: scattered(far, everyone, dist.ReduceOp.SUM, torch.float32, 10 + rank), different)
        fails(lambda: gathers(far, everyone, [0, 1, 2], 10 + rank), different)
        fails(lambda: scattered(far, everyone, dist.ReduceOp.MAX, torch.float32, 10), "summed or averaged")
    return wrong, lines, sent


def test_sums_and_gathers_by_each_way() -> None:
    results = launch(by_each_way, (), 3)
    assert [wrong for wrong, _, _ in results] == [[], [], []]
    assert sum("No space left on device" in line for _, lines, _ in results for line in lines) == 1
    # Each sends to one other rank two thirds of what it has, twice.
    bytes_each = sum(2 * 2 * size * dtype.itemsize for _, dtype, size in CASES) + sum(2 * 2 * size for size in SIZES)
    assert [sent for _, _, sent in results] == [bytes_each] * 3


def left_alone(folder: str) -> None:
    """Rank 1 is killed, and rank 0 says how it learns of that."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # else it might be ended before
    with paceline.init() as run:
        module.machine_id = lambda: str(run.rank)
        wires = Wires(run._group, [0, 1], dist.group.WORLD)
        for step in range(2):
            if (run.rank, step) == (1, 1):
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                scattered(wires, dist.group.WORLD, dist.ReduceOp.SUM, torch.float32, 10_000)
            except RuntimeError as error:
                say(Path(folder, "said"), f"{step} {type(error).__name__}: {error}")
                raise


def test_a_rank_that_is_killed_ends_the_sums_of_the_others(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="rank 1"):
        launch(left_alone, (str(tmp_path),), 2)
    text = (tmp_path / "said").read_text()
    assert text.startswith("1 PeerLost: ") and "rank 1" in text


# -- FSDP2 -------------------------------------------------------------------------------------------------------------


def trained() -> list[Any]:
    """The parameters by FSDP2's own collectives, by shared memory, and by a ring; and the bytes that these sent."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    results = []
    with paceline.init() as run:
        mesh = init_device_mesh("cpu", (run.world_size,))
        for way, dtype in itertools.product(("own", "memory", "ring"), (None, torch.bfloat16)):
            torch.manual_seed(7)
            model = torch.nn.Sequential(torch.nn.Linear(9, 31), torch.nn.Tanh(), torch.nn.Linear(31, 5))
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
            for part in (model[0], model[2], model):
                fully_shard(part, mesh=mesh, mp_policy=policy)
            if way != "own":
                module.machine_id = (lambda: str(run.rank)) if way == "ring" else (lambda: "here")
                wires = Wires(run._group, [0, 1], mesh.get_group())
                for part in (model[0], model[2], model):
                    part.set_custom_all_gather(wires.all_gather)
                    part.set_custom_reduce_scatter(wires.reduce_scatter)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for step in range(3):
                x = torch.randn(4, 9, generator=torch.Generator().manual_seed(10 * run.rank + step))
                model(x).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            values = torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()]).tolist()
            results.append((values, 0 if way == "own" else wires.sent))
            if way != "own":
                wires.close()
            if way == "memory":
                with pytest.raises(ConnectionError, match="this rank has left"):
                    gathers(wires, mesh.get_group(), [0, 1], 3)
    return results


def test_fsdp_trains_by_each_way() -> None:
    import torch.distributed.fsdp  # noqa: F401 - takes a while, and the ranks are copies of this process

    for own, own_half, memory, memory_half, ring, ring_half in launch(trained, (), 2):
        for one, other, tolerance in [(own, memory, 1e-6), (own, ring, 1e-6), (own_half, memory_half, 1e-2)]:
            assert one[0] == pytest.approx(other[0], rel=tolerance, abs=tolerance)
        assert memory[0] == ring[0]
        assert memory_half[0] == ring_half[0], "of two numbers, all orders are the same"
        assert (memory[1], memory_half[1]) == (0, 0)
        assert ring[1] == 2 * ring_half[1] > 0
