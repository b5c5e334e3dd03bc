"""How ranks exchange gradients: by which way, in how many bits, and what a rank keeps for it."""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from tests.conftest import eventually  # noqa: E402
from tests.train.launching import launch, launch_each, say  # noqa: E402

import paceline  # noqa: E402
from paceline import AllReduce, PowerSGD, TopK  # noqa: E402
from paceline.train.group import neighbours, shared_memory  # noqa: E402
from paceline.train.group.shared_memory import SharedMemory, SharedMemoryError  # noqa: E402
from paceline.train.parallel.sync.options import EveryStep, Sync, name_of, parse  # noqa: E402
from paceline.train.parallel.sync.wires import wire  # noqa: E402
from paceline.train.parallel.sync.wires.wire import all_reduce  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.conftest import Paceline

pytestmark = pytest.mark.torch
PAIRS = ((0, 1), (2, 3))
LOSSY = [
    AllReduce(wire="fp16", hierarchical=False), AllReduce(wire="bf16", hierarchical=PAIRS),
    AllReduce(wire="int8", hierarchical=False), AllReduce(wire="int8", hierarchical=PAIRS),
    PowerSGD(rank=2, warmup=3, hierarchical=False), TopK(fraction=0.2, hierarchical=False),
    AllReduce(wire="fp16", hierarchical=False, communicators=2),
]  # fmt: skip


def build() -> Any:
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(9, 300), torch.nn.Tanh(), torch.nn.Linear(300, 4))


def batch(rank: int, step: int) -> Any:
    return torch.randn(6, 9, generator=torch.Generator().manual_seed(1000 * rank + step))


def loss_of(model: Any, x: Any) -> Any:
    return (model(x) - x[:, :4].sin()).square().mean()


Result = tuple[list[float], float, list[bool]]


def trained(syncs: Any, steps: int) -> list[Result]:
    """With each method: the parameters, the last loss, and which ranks have the same parameters."""
    return [_trained(sync, steps) for sync in syncs]


def _trained(sync: Any, steps: int) -> Result:
    with paceline.init() as run:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), 0.2)
        model, optimizer = run.setup(model, optimizer, strategy=paceline.Strategy(sync=sync, bucket_mb=1))
        loss = torch.tensor(0.0)
        for step in range(steps):
            optimizer.zero_grad()
            loss = loss_of(model, batch(run.rank, step))
            run.backward(loss)
            run.clip_grad_norm(10.0)
            optimizer.step()
        values = torch.cat([p.detach().flatten() for p in model.parameters()])
        same = [bool(torch.equal(values, each)) for each in run.all_gather(values)]
        return values.tolist(), run.mean(float(loss), 1), same


def by_hand(ranks: int, steps: int) -> list[float]:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    for step in range(steps):
        optimizer.zero_grad()
        torch.stack([loss_of(model, batch(rank, step)) for rank in range(ranks)]).mean().backward()
        optimizer.step()
    return [value for p in model.parameters() for value in p.flatten().tolist()]


def test_on_one_machine_two_ranks_get_the_bits_of_the_network() -> None:
    for here, network in launch(trained, ([AllReduce(), AllReduce(hierarchical=False)], 6), 2):
        assert here == network


# -- shared memory -----------------------------------------------------------------------------------------------------


class Telling:
    """Gathers texts from threads, as ranks do."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count, timeout=60)
        self._said = [""] * count

    def by(self, position: int) -> Any:
        def tell(text: str) -> list[str]:
            self._said[position] = text
            self._barrier.wait()
            said = list(self._said)
            self._barrier.wait()
            return said

        return tell


def in_threads(count: int, do: Any) -> list[Any]:
    results: list[Any] = [None] * count

    def run(position: int) -> None:
        try:
            results[position] = do(position)
        except BaseException as error:  # raised below
            results[position] = error

    threads = [threading.Thread(target=run, args=(position,)) for position in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]
SMALL = 64 << 10  # bytes of a rank in a region, so that tensors of many pieces are summed soon


@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(2, 5),
    sizes=st.lists(st.sampled_from([1, 2, 3, 7, 1000, 16_384, 16_385, 47_001]), min_size=1, max_size=3),
    dtype=st.sampled_from(TYPES),
    most=st.just(SMALL),
)
@example(count=3, sizes=[1_048_576, 1_048_577], dtype=torch.float32, most=shared_memory._MOST)
def test_shared_memory_sums_in_the_order_of_ranks(count: int, sizes: list[int], dtype: Any, most: int) -> None:
    telling = Telling(count)
    tensors = [
        [torch.randn(size, generator=torch.Generator().manual_seed(97 * position + size)).to(dtype) for size in sizes]
        for position in range(count)
    ]
    expected = []
    for each in zip(*tensors, strict=True):
        total = each[0].float() if dtype in (torch.float16, torch.bfloat16) else each[0].clone()
        for other in each[1:]:
            total += other
        expected.append((total / count).to(dtype))

    def reduce(position: int) -> list[Any]:
        memory = SharedMemory(position, count, telling.by(position), 60)
        try:
            own = [each.clone() for each in tensors[position]]
            for each in own:
                memory.all_reduce(each, count)
            first = tensors[position][0].clone()
            memory.reduce(first)
            memory.broadcast(first)
            return [*own, first / count]
        finally:
            memory.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "_MOST", most)
        summed = in_threads(count, reduce)
    for results in summed:
        assert all(torch.equal(one, other) for one, other in zip(results, expected, strict=False))
        assert torch.allclose(results[-1], expected[0], rtol=0.02, atol=1e-3)


FACTORS = [(1.0, 1.0, 1.0), (4.0, 3.0, 0.5), (1.0, 2.0, 1.0), (0.25, 1.0, 2.0)]


@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(2, 5),
    sizes=st.lists(st.sampled_from([0, 1, 5, 16, 700, 70_000]), min_size=1, max_size=6),
    factors=st.sampled_from(FACTORS),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    in_place=st.booleans(),
)
def test_shared_memory_sums_many_tensors(
    count: int, sizes: list[int], factors: Any, dtype: Any, in_place: bool
) -> None:
    telling = Telling(count)
    prescale, divisor, postscale = factors

    def given(position: int) -> list[Any]:
        return [(torch.arange(size) % 16 * (position + 1)).to(dtype) for size in sizes]

    def add(position: int) -> list[Any]:
        memory = SharedMemory(position, count, telling.by(position), 60)
        try:
            sources = given(position)
            targets = sources if in_place else [torch.empty_like(each) for each in sources]
            memory.sum(sources, targets, prescale=prescale, divisor=divisor, postscale=postscale)
            assert in_place or all(torch.equal(*each) for each in zip(sources, given(position), strict=True))
            return targets
        finally:
            memory.close()

    wide = torch.float64 if dtype is torch.float64 else torch.float32
    total = sum(range(1, count + 1)) * prescale
    expected = [((torch.arange(size) % 16).to(wide) * total / divisor * postscale).to(dtype) for size in sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "_MOST", SMALL)
        summed = in_threads(count, add)
    for results in summed:
        assert all(torch.equal(one, other) for one, other in zip(results, expected, strict=True))


@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(2, 4),
    sizes=st.lists(st.sampled_from([0, 1, 3, 16, 1000, 16_384, 47_001]), min_size=1, max_size=3),
    dtype=st.sampled_from([*TYPES, torch.int64]),
    divisor=st.sampled_from([1.0, 3.0]),
    most=st.just(SMALL),
)
@example(count=2, sizes=[524_288, 524_289], dtype=torch.float32, divisor=2.0, most=shared_memory._MOST)
def test_shared_memory_gives_each_rank_the_sum_of_its_chunk(
    count: int, sizes: list[int], dtype: Any, divisor: float, most: int
) -> None:
    telling = Telling(count)
    divisor = 1.0 if dtype is torch.int64 else divisor
    tensors = [
        [
            (100 * torch.randn(count * size, generator=torch.Generator().manual_seed(97 * position + size))).to(dtype)
            for size in sizes
        ]
        for position in range(count)
    ]

    def scatter(position: int) -> list[Any]:
        memory = SharedMemory(position, count, telling.by(position), 60)
        try:
            targets = [torch.empty(size, dtype=dtype) for size in sizes]
            for source, target in zip(tensors[position], targets, strict=True):
                memory.reduce_scatter(source, target, divisor)
                memory.all_reduce(torch.ones(9))  # regions are passed on from one method to the next
            return targets
        finally:
            memory.close()

    before = [torch.cat(own) for own in tensors]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "_MOST", most)
        scattered = in_threads(count, scatter)
    for number, each in enumerate(zip(*tensors, strict=True)):
        total = each[0].float() if dtype in (torch.float16, torch.bfloat16) else each[0].clone()
        for other in each[1:]:
            total += other
        expected = (total if divisor == 1.0 else total / divisor).to(dtype).view(count, sizes[number])
        assert all(torch.equal(scattered[position][number], expected[position]) for position in range(count))
    assert all(torch.equal(one, torch.cat(own)) for one, own in zip(before, tensors, strict=True))


@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(2, 4),
    sizes=st.lists(st.sampled_from([0, 1, 3, 1000, 65_536, 65_537, 200_001]), min_size=1, max_size=3),
    dtype=st.sampled_from([*TYPES, torch.uint8, torch.bool]),
    in_place=st.booleans(),
)
def test_shared_memory_gathers(count: int, sizes: list[int], dtype: Any, in_place: bool) -> None:
    telling = Telling(count)
    parts = [[(torch.arange(size) * (position + 3) % 251).to(dtype) for size in sizes] for position in range(count)]

    def gather(position: int) -> list[Any]:
        memory = SharedMemory(position, count, telling.by(position), 60)
        try:
            targets = []
            for source in parts[position]:
                target = torch.zeros(count * len(source), dtype=dtype)
                own = target.view(count, len(source))[position] if in_place else source
                memory.all_gather(own.copy_(source), target)
                targets.append(target)
            return targets
        finally:
            memory.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "_MOST", SMALL)
        gathered = in_threads(count, gather)
    expected = [torch.cat(each) for each in zip(*parts, strict=True)]
    for targets in gathered:
        assert all(torch.equal(one, other) for one, other in zip(targets, expected, strict=True))


def test_memory_goes_with_the_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(neighbours, "_FOLDER", str(tmp_path))  # in /dev/shm, other processes have files too

    def descriptors() -> set[str]:
        found = set()
        for each in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # that of this list
                found.add(f"{each} {os.readlink(f'/proc/self/fd/{each}')}")
        return found

    def add(position: int) -> None:
        memory = SharedMemory(position, 3, telling.by(position), 60)
        ones = torch.ones(1000)
        memory.all_reduce(ones)
        assert os.listdir(tmp_path) == [], "it never has a name"
        memory.close()
        assert float(ones.sum()) == 3000

    def forbidden(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    before = descriptors()
    for _ in range(2):
        telling = Telling(3)
        in_threads(3, add)
        assert os.listdir(tmp_path) == []
        assert descriptors() <= before  # what earlier tests have left may be collected meanwhile
        monkeypatch.setattr(os, "memfd_create", forbidden)  # then in that folder


def reduce_scatter(memory: SharedMemory, size: int = 12) -> None:
    memory.reduce_scatter(torch.ones(size), torch.empty(size // memory.count))


def all_gather(memory: SharedMemory, size: int = 12) -> None:
    memory.all_gather(torch.ones(size // memory.count), torch.empty(size))


@pytest.mark.parametrize("do", [lambda it: it.all_reduce(torch.ones(10)), reduce_scatter, all_gather])
def test_a_rank_that_leaves_wakes_those_that_wait(do: Any) -> None:
    telling = Telling(3)
    are_waiting = threading.Barrier(2, timeout=60)

    def wait(position: int) -> str:
        memory = SharedMemory(position, 3, telling.by(position), None)
        try:
            if position == 1:
                are_waiting.wait()
                return ""
            if position == 0:
                are_waiting.wait()
            with pytest.raises(ConnectionError) as error:
                do(memory)
            return str(error.value)
        finally:
            memory.close()

    assert in_threads(3, wait) == ["another rank of this machine is gone", "", "another rank of this machine is gone"]


DIFFERENT: list[tuple[Any, Any]] = [
    (lambda memory: memory.all_reduce(torch.ones(10)), lambda memory: memory.all_reduce(torch.ones(11))),
    (reduce_scatter, lambda memory: reduce_scatter(memory, 14)),
    (reduce_scatter, lambda memory: reduce_scatter(memory, 0)),
    (all_gather, lambda memory: all_gather(memory, 14)),
    (all_gather, lambda memory: all_gather(memory, 0)),
    (all_gather, reduce_scatter),
    (lambda memory: memory.all_reduce(torch.ones(12)), reduce_scatter),
]


@pytest.mark.parametrize("both", DIFFERENT)
def test_ranks_that_exchange_different_tensors_fail(both: Any) -> None:
    telling = Telling(2)

    def add(position: int) -> str:
        memory = SharedMemory(position, 2, telling.by(position), 60)
        try:
            both[position](memory)
        except (ConnectionError, RuntimeError) as error:
            return str(error)
        finally:
            memory.close()
        return "summed"

    assert "the ranks of this machine exchange different tensors" in in_threads(2, add)


def test_a_rank_that_does_not_come_is_not_waited_for_longer_than_the_timeout() -> None:
    telling = Telling(2)
    memories = in_threads(2, lambda position: SharedMemory(position, 2, telling.by(position), 0.25))
    with pytest.raises(RuntimeError, match=r"did not come within 0.25 s"):
        memories[0].all_reduce(torch.ones(10))
    for memory in memories:
        memory.close()


def test_all_ranks_know_if_one_cannot_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    telling = Telling(3)
    allocate = os.posix_fallocate

    def full(fd: int, offset: int, length: int) -> None:
        allocate(fd, offset, 4096)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)

    def fail(position: int) -> str:
        with pytest.raises(SharedMemoryError) as error:
            SharedMemory(position, 3, telling.by(position), 60)
        return str(error.value)

    assert set(in_threads(3, fail)) == {"local rank 0: No space left on device"}


def without_shared_memory() -> tuple[list[float], list[str]]:
    import logging

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("paceline").addHandler(handler)
    os.posix_fallocate = refuse  # type: ignore[assignment]
    return _trained(AllReduce(), 6)[0], lines


def refuse(*_: object) -> Any:
    raise OSError(28, "No space left on device")


def test_without_room_for_shared_memory_ranks_use_the_network() -> None:
    results = launch(without_shared_memory, (), 2)
    for values, _ in results:
        assert values == pytest.approx(by_hand(2, 6), rel=1e-4, abs=1e-6)
    assert sum("No space left on device" in line for _, lines in results for line in lines) == 1


@pytest.mark.parametrize("failing", [0, 3])
def test_other_groups_know_if_one_cannot_share_memory(failing: int) -> None:
    for values, _ in launch(of_two_groups, (failing,), 4):
        assert values == pytest.approx(by_hand(4, 6), rel=1e-4, abs=1e-6)


def of_two_groups(failing: int) -> tuple[list[float], list[str]]:
    with paceline.init() as run:
        is_failing = run.rank == failing
    if is_failing:
        if failing == 0:
            os.posix_fallocate = refuse  # type: ignore[assignment]
        else:
            mmap.mmap = refuse  # type: ignore[assignment,misc]
    return _trained(AllReduce(hierarchical=PAIRS), 6)[0], []


@pytest.mark.parametrize("how", ["os.kill(os.getpid(), signal.SIGKILL)", "raise ValueError('enough')"])
def test_a_rank_that_ends_ends_the_exchange_of_the_others(paceline: Paceline, how: str) -> None:
    paceline.script(f"""
        import itertools, os, signal, torch, paceline
        # The agent ends the others at once; rank 0 would be gone before it has told rank 2 of rank 1.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            with paceline.init() as run:
                model = torch.nn.Linear(9, 300)
                model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), 0.1))
                for step in itertools.count():
                    if run.rank == 1 and step == 3:
                        {how}
                    run.backward(model(torch.ones(6, 9)).square().mean())
        except RuntimeError as error:
            with open(f"new-{{run.rank}}", "w") as file:
                file.write(f"{{type(error).__name__}}: {{error}}")
            os.replace(file.name, f"said-{{run.rank}}")
            raise
    """)
    done = paceline.run("-n", "3", "script.py")
    assert done.returncode != 0
    assert "rank 1" in done.stderr.splitlines()[-1]
    texts = [path.read_text() for path in paceline.folder.glob("said-*")]
    assert all(text.startswith("PeerLost: ") and "rank 1" in text for text in texts), texts


def fails_at(step: int, folder: str) -> None:
    """Rank 1 fails within an exchange."""
    with paceline.init() as run:
        model = run.setup(build())
        if run.rank == 1:
            add, calls = shared_memory._add, itertools.count()

            def failing(*args: Any) -> None:
                if next(calls) == step:
                    raise MemoryError("no room for the sum")
                add(*args)

            shared_memory._add = failing
        for number in itertools.count():
            try:
                run.backward(loss_of(model, batch(run.rank, number)))
            except RuntimeError as error:
                say(Path(folder, str(run.rank)), f"{number}: {error}")
                if run.rank == 0:  # it hears of it; the end of its process would end the other one
                    eventually(Path(folder, "1").exists, "rank 1 says why")
                raise


def test_a_failure_within_an_exchange_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        launch(fails_at, (2, str(tmp_path)), 2)
    failed = "the exchange of gradients failed: "
    assert (tmp_path / "1").read_text() == f"2: {failed}no room for the sum"


def after_close() -> None:
    run = paceline.init()
    model = run.setup(build())
    run.backward(loss_of(model, batch(run.rank, 0)))
    loss = loss_of(model, batch(run.rank, 1))
    run.close()
    loss.backward()


def test_a_backward_after_the_end_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="the run is closed"):
        launch(after_close, (), 2)


# -- other features ----------------------------------------------------------------------------------------------------


class Words(torch.nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = torch.nn.Embedding(50, 8, sparse=sparse)
        self.out = torch.nn.Linear(8, 2)
        self.unused = torch.nn.Linear(2, 2)

    def forward(self, x: Any) -> Any:
        return self.out(self.table(x))


def half_weights(syncs: Any) -> list[float]:
    found = []
    for sync in syncs:
        with paceline.init() as run:
            model = run.setup(build().to(torch.bfloat16), strategy=paceline.Strategy(sync=sync))
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for step in range(10):
                model.zero_grad()
                loss = loss_of(model, batch(run.rank, step).to(torch.bfloat16))
                run.backward(loss)
                optimizer.step()
            found.append(run.mean(float(loss), 1))
    return found


def test_weights_in_half_precision() -> None:
    syncs = [AllReduce(hierarchical=False), *(each for each in LOSSY if each.hierarchical is False)]
    for exact, *lossy in launch(half_weights, (syncs,), 4):
        assert all(each == pytest.approx(exact, rel=0.2) for each in lossy)


def complex_weights(syncs: Any) -> list[tuple[list[float], list[float]]]:
    """With each method, the gradients of a complex layer and of a real one, after two steps."""
    found = []
    for sync in syncs:
        with paceline.init(seed=1) as run:
            model = torch.nn.Sequential(torch.nn.Linear(9, 300, dtype=torch.complex64), torch.nn.Linear(300, 4))
            model[1].forward = lambda x, of=model[1].forward: of(x.abs())
            trained = run.setup(model, strategy=paceline.Strategy(sync=sync))
            for _ in range(2):
                trained.zero_grad()
                x = batch(run.rank, 0)
                run.backward((trained(x.to(torch.complex64)) - x[:, :4].sin()).square().mean())
            gradients = [torch.view_as_real(model[0].weight.grad), model[1].weight.grad]
            found.append(tuple(each.flatten().tolist() for each in gradients))
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_complex_gradients_are_not_compressed(ranks: int) -> None:
    syncs = [AllReduce(hierarchical=False), *(each for each in LOSSY if each.hierarchical is False)]
    for (exact, real), *lossy in launch(complex_weights, (syncs,), ranks):
        for sync, (same, differs) in zip(syncs[1:], lossy, strict=True):
            assert same == pytest.approx(exact, rel=1e-5, abs=1e-7), sync
            assert differs != real or (isinstance(sync, PowerSGD) and sync.warmup > 2), sync


def with_words(sparse: bool, accumulate: int, precision: str) -> list[float]:
    with paceline.init() as run:
        model = Words(sparse)
        model.unused.requires_grad_(run.world_size > 5)
        strategy = paceline.Strategy(accumulate=accumulate, precision=precision, sync="int8")  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer = run.setup(model, optimizer, strategy=strategy)
        for step in range(4):
            x = torch.randint(50, (3, 4), generator=torch.Generator().manual_seed(step + 10 * run.rank))
            run.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return [value for p in model.parameters() for value in p.flatten().tolist()]


def test_sparse_gradients_accumulation_and_half_precision() -> None:
    for one, other in launch_each(with_words, [(True, 1, "fp32"), (False, 2, "fp32"), (False, 1, "bf16")], 2):
        assert one == other


BYTES = [  # sent by one of two ranks for 4204 parameters
    (AllReduce(), 0),
    (AllReduce(hierarchical=False), 4204 * 4),
    (AllReduce(wire="fp16", hierarchical=False), 4204 * 2),
    (AllReduce(wire="int8", hierarchical=False), 22 * 260),  # blocks: 11, 2, 5 and 1, made even
    (TopK(fraction=0.01, hierarchical=False), (27 + 3 + 12 + 1) * 8),
    (PowerSGD(rank=2, warmup=0, hierarchical=False), 309 * 2 * 2 + (1200 + 300 + 4) * 4),
]


def logged(folder: str) -> None:
    for number, (sync, _) in enumerate(BYTES):
        with paceline.init(log_dir=f"{folder}/{number}", log_every=5, progress=False) as run:
            model = build()
            model, _ = run.setup(model, torch.optim.SGD(model.parameters(), 0.1), strategy=paceline.Strategy(sync=sync))
            for x in run.steps([batch(run.rank, step) for step in range(10)]):
                run.backward(loss_of(model, x))


def test_metrics_have_the_bytes_sent_per_step(tmp_path: Path) -> None:
    launch(logged, (str(tmp_path),), 2)
    for number, (sync, expected) in enumerate(BYTES):
        lines = [json.loads(line) for line in (tmp_path / str(number) / "metrics.jsonl").read_text().splitlines()]
        assert [line["sent_bytes"] for line in lines] == [expected, expected], sync
        assert all(line["sync_seconds"] > 0 for line in lines)
        assert {line["sync_method"] for line in lines} == {name_of(sync)}


# -- large tensors in pieces -------------------------------------------------------------------------------------------


def sums(sizes: Sequence[int]) -> list[bool]:
    """For each size, whether a sum in pieces has the bits of one that is sent as it is."""
    found = []
    with paceline.init() as run:
        for size in sizes:
            both = []
            for piece in (4096, 1 << 30):
                wire._PIECE = piece
                tensor = torch.randn(size, generator=torch.Generator().manual_seed(run.rank))
                all_reduce(tensor, torch.distributed.group.WORLD)
                both.append(tensor)
            found.append(torch.equal(*both))
    return found


def test_sums_in_pieces_have_the_same_bits() -> None:
    for found in launch(sums, ([1, 3071, 3072, 3073, 6145, 100_000],), 3):
        assert all(found)


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sync", "message"),
    [
        ("gossip", "'gossip' is none of 'allreduce'"),
        ("powersgd(many)", "'many' is not a number"),
        ("fp16(2)", "fp16 has no number"),
        ("topk(0)", "fraction=0.0 is not more than 0"),
        ("powersgd(0)", "rank=0 is not a number of 1 or more"),
        (3, "neither a name nor one of"),
    ],
)
def test_what_is_no_method(sync: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        paceline.Strategy(sync=sync)


METHODS = Sync.__subclasses__() + EveryStep.__subclasses__()


@pytest.mark.parametrize("method", [each for each in METHODS if each is not EveryStep], ids=lambda it: it.__name__)
def test_the_number_of_a_name_needs_no_keyword_and_all_else_does(method: Any) -> None:
    name = name_of(method()).partition("(")[0]
    number = next((each for each in (3, 0.5) if _is_taken(f"{name}({each})")), None)
    if method is AllReduce:
        assert method("fp16") == parse("fp16")
    elif number is not None:
        assert method(number) == parse(f"{name}({number})")
    count = 0 if number is None and method is not AllReduce else 1
    with pytest.raises(TypeError, match=r"takes .* positional argument"):
        method(*([number or "fp16"] * count), 1)


def _is_taken(name: str) -> bool:
    try:
        return bool(parse(name))
    except ValueError:
        return False


@pytest.mark.parametrize("groups", [((0,),), ((0, 1), (1,)), ((0, 2),)])
def test_groups_must_name_each_rank(groups: Any) -> None:
    with pytest.raises(ValueError, match="must name each of the ranks 0 to 1 once"):
        launch(trained, ([AllReduce(hierarchical=groups)], 1), 2)


def different() -> list[str]:
    said = []
    with paceline.init() as run:
        for mine, other in (("fp16", "bf16"), (AllReduce(), PowerSGD(rank=3))):
            with pytest.raises(paceline.ModelMismatch) as error:
                run.setup(build(), strategy=paceline.Strategy(sync=other if run.rank else mine))
            said.append(str(error.value))
    return said


def test_ranks_with_different_methods() -> None:
    first, second = launch(different, (), 2)
    assert second[0] == "rank 1 has Strategy(sync='bf16'), rank 0 has 'fp16'; give all the same"
    assert "PowerSGD" in second[1]
    assert all("rank 1 differs" in line for line in first)


def test_what_is_kept_for_a_gradient_is_kept_once() -> None:
    with pytest.raises(ValueError, match="communicators=2: what PowerSGD keeps"):
        PowerSGD(communicators=2)
