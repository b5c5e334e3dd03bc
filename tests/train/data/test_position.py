"""Where training is, when a loop is left, an epoch is over, or the number of ranks changes."""

from __future__ import annotations

import os
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.train.launching import launch  # noqa: E402
from torch.utils.data import Dataset  # noqa: E402

import paceline  # noqa: E402
from paceline.train.checkpoint.store import CheckpointError  # noqa: E402

pytestmark = pytest.mark.torch


class Numbers(Dataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return index, torch.tensor([float(index)])


def start(folder: Any = None, **options: Any) -> Any:
    run = paceline.init(seed=0, checkpoint_dir=folder, **options)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    return run, *run.setup(model, optimizer)


def test_a_batch_that_was_not_trained_on_comes_again() -> None:
    run, model, optimizer = start()
    train = run.dataloader(Numbers(10), global_batch_size=2)
    seen = []
    for number, (indices, x) in enumerate(train):
        if number == 2:
            break
        run.backward(model(x).mean())
        optimizer.step()
        seen += indices.tolist()
    assert run.step == 2
    for indices, x in train:
        run.backward(model(x).mean())
        optimizer.step()
        seen += indices.tolist()
        if run.step == 3:
            break  # after it was trained on
    assert (run.step, seen) == (3, list(range(6)))
    seen += [i for indices, _ in train for i in indices.tolist()]
    assert seen == list(range(10))
    run.close()


def test_gradients_that_were_not_used_are_computed_again(tmp_path: Any) -> None:
    run, model, _ = start(tmp_path)
    train = run.dataloader(Numbers(10), global_batch_size=2)
    for _, x in train:
        run.backward(model(x).mean())
        with pytest.raises(RuntimeError, match=r"save after optimizer\.step\(\)"):
            run.save()
        break
    assert run.step == 0
    assert next(indices.tolist() for indices, _ in train) == [0, 1]
    run.close()


def test_what_follows_a_save_behind_the_loop_is_not_done_twice(tmp_path: Any) -> None:
    rates = []
    for stop in (3, 0):
        run, model, optimizer = start(tmp_path)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        run.register(scheduler=scheduler)
        train = run.dataloader(Numbers(4), global_batch_size=2)
        for epoch in run.epochs(5):
            for _, x in train:
                run.backward(model(x).mean())
                optimizer.step()
            rates.append((epoch, scheduler.get_last_lr()[0] / 1e-6))
            scheduler.step()
            run.save(block=True)
            if len(rates) == stop:
                break
        run.close()
    assert rates == [(epoch, 0.5**epoch) for epoch in range(5)]


def test_leaving_the_epochs_early_saves_what_was_done(tmp_path: Any) -> None:
    run, model, optimizer = start(tmp_path, checkpoint_every=1000)
    train = run.dataloader(Numbers(4), global_batch_size=2)
    for epoch in run.epochs(5):
        for _, x in train:
            run.backward(model(x).mean())
            optimizer.step()
        if epoch == 2:
            break
    run.close()
    assert [path.name for path in tmp_path.iterdir()] == ["step-000006"]


def test_an_optimizer_that_steps_has_trained(tmp_path: Any) -> None:
    run, model, optimizer = start()
    train = run.dataloader(Numbers(10), global_batch_size=2)
    for _, x in train:
        model(x).mean().backward()
        optimizer.step()
        break
    assert next(indices.tolist() for indices, _ in train) == [2, 3]
    run.close()


@pytest.mark.parametrize("when", ["before", "after"])
def test_save_within_a_step(tmp_path: Any, when: str) -> None:
    run, model, optimizer = start(tmp_path)
    train = run.dataloader(Numbers(10), global_batch_size=2)
    for _ in run.epochs(1):
        for indices, x in train:
            if when == "before" and indices[0] == 4:
                run.save(block=True)
                break
            run.backward(model(x).mean())
            optimizer.step()
            if indices[0] == 4:
                run.save(block=True)
                break
        break
    run.close()
    run, model, optimizer = start(tmp_path)
    train = run.dataloader(Numbers(10), global_batch_size=2)
    rest = [indices[0].item() for _ in run.epochs(1) for indices, _ in train]
    assert rest == ([4, 6, 8] if when == "before" else [6, 8])
    assert run.step == 5
    run.close()


def test_save_within_an_accumulation_is_refused(tmp_path: Any) -> None:
    run = paceline.init(checkpoint_dir=tmp_path)
    model = run.setup(torch.nn.Linear(1, 1), strategy=paceline.Strategy(accumulate=3))
    for number, (_, x) in enumerate(run.dataloader(Numbers(8), global_batch_size=1)):
        if number == 3:
            run.save()  # before the fourth: nothing is pending
        run.backward(model(x).mean())
        if number == 4:
            with pytest.raises(RuntimeError, match="the gradients of 2 of 3 accumulated batches are in no checkpoint"):
                run.save()
        if number == 7:  # an epoch ends an accumulation
            run.save()
    run.close()


def test_checkpoints_fall_between_accumulations(tmp_path: Any) -> None:
    run = paceline.init(checkpoint_dir=tmp_path, checkpoint_every=2, keep=9)
    model = run.setup(torch.nn.Linear(1, 1), strategy=paceline.Strategy(accumulate=3))
    for _, x in run.dataloader(Numbers(8), global_batch_size=1):
        run.backward(model(x).mean())
    run.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000003", "step-000006", "step-000008"]


def test_an_epoch_that_is_saved_behind_its_loop_is_done(tmp_path: Any) -> None:
    history: list[tuple[int, int]] = []

    def train_until(evaluations: int) -> None:
        run, model, optimizer = start(tmp_path)
        train = run.dataloader(Numbers(10), global_batch_size=2)
        for epoch in run.epochs(3):
            trained = 0
            for _, x in train:
                run.backward(model(x).mean())
                optimizer.step()
                trained += 1
            history.append((epoch, trained))
            run.save(block=True)
            if len(history) == evaluations:
                break  # killed while it evaluates
        run.close()

    train_until(2)
    train_until(-1)
    assert history == [(0, 5), (1, 5), (2, 5)]


def batches_of(folder: Any, stop: int, options: dict[str, int]) -> list[int]:
    """The samples of each step, and at the end the sum of all that it has trained on."""
    run, model, optimizer = start(folder)
    train = run.dataloader(Numbers(40), **options)
    sizes, seen = [], 0
    for _ in run.epochs(1):
        for indices, x in train:
            run.backward(model(x).mean())
            optimizer.step()
            sizes.append(run.all_reduce(train.samples))
            seen += run.all_reduce(int(indices[: train.samples].sum()))
            if len(sizes) == stop:
                run.save(block=True)
                break
    run.close()
    return [*map(int, sizes), int(seen)]


RANKS_GO = "a step still takes 9 samples, on 2 ranks now, since batch_size=3 is that of each rank at the first start"


@pytest.mark.parametrize(
    ("options", "ranks", "then", "sizes", "line"),
    [
        ({"batch_size": 3}, 2, {"batch_size": 3}, [9, 9, 4], f"{RANKS_GO}; for steps of 6, pass global_batch_size=6"),
        ({"batch_size": 3}, 3, {"batch_size": 3}, [9, 9, 4], ""),
        (
            {"batch_size": 3}, 3, {"batch_size": 5}, [15, 7], "a step takes 15 samples from here on, since the script "
            "says batch_size=5 now; it took 9 until the checkpoint, so to go on as before, pass global_batch_size=9",
        ),
        ({"batch_size": 3}, 2, {"batch_size": 5}, [10, 10, 2], "a step takes 10 samples from here on"),
        ({"batch_size": 2}, 2, {"batch_size": 3}, [6, 6, 6, 6, 4], ""),  # the script divides by the ranks itself
        (
            {"global_batch_size": 9}, 3, {"global_batch_size": 20}, [20, 2], "a step takes 20 samples from here on, "
            "since the script says global_batch_size=20 now; it took 9 until the checkpoint",
        ),
        ({"global_batch_size": 9}, 3, {"batch_size": 4}, [12, 10], "the script says batch_size=4 now; it took 9 until"),
        ({"batch_size": 3}, 3, {"global_batch_size": 20}, [20, 2], "says global_batch_size=20 now; it took 9 until"),
        ({"batch_size": 3}, 3, {"batch_size": 3, "drop_last": True}, [9, 9], ""),
    ],
)  # fmt: skip
def test_which_batches_follow_a_resume(
    options: Any, ranks: int, then: Any, sizes: list[int], line: str, tmp_path: Any, capfd: Any
) -> None:
    (*before, seen), *_ = launch(batches_of, (tmp_path, 2, options), nproc=3)
    (*after, rest), *_ = launch(batches_of, (tmp_path, -1, then), nproc=ranks)
    assert (before[1], after) == (sum(before) // 2, sizes)
    if sum([*before, *after]) == 40:
        assert seen + rest == sum(range(40)), "each sample once"
    said = capfd.readouterr().err
    assert line in said and said.count("a step ") == bool(line)


def test_no_whole_checkpoint_left_is_an_error(tmp_path: Any) -> None:
    run, *_ = start(tmp_path)
    run.save(block=True)
    run.close()
    (saved,) = tmp_path.iterdir()
    os.truncate(saved / "model.pt", 10)
    run, *_ = start(tmp_path)
    with pytest.raises(CheckpointError, match=r"the only checkpoint in .* is damaged; move the folder away to start"):
        run.resume()
    run.close()


def test_checkpoints_without_a_folder_are_told_of(caplog: Any) -> None:
    paceline.init(checkpoint_every=5).close()
    assert caplog.messages == [
        "no checkpoints are taken: without `paceline run`, pass checkpoint_dir= to paceline.init"
    ]


def printed() -> float:
    with paceline.init() as run:
        run.print("mean", run.mean(run.rank, 1))
        return run.mean(0, 0)


def test_print_and_the_mean_of_nothing(capfd: Any) -> None:
    assert str(launch(printed, nproc=2)) == "[nan, nan]"
    assert capfd.readouterr().out == "mean 0.5\n"
